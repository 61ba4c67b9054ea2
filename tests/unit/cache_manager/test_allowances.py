"""From the operator's words to who makes room: through the manager, which tells the books the time."""

from dataclasses import replace
from decimal import Decimal

import pytest

from cache_manager.allowances import PLAIN_LRU, EvictionSettings, require_floors_fit
from cache_manager.change_queue import ChangeQueue
from cache_manager.core.accounts import Allowance
from cache_manager.manager import Manager
from octavo.ids import Incarnation, SequenceId, WorkerId
from octavo.pool_part import PoolPart
from octavo.records.attend import Attach, Commit, Exchange, Registration, Reservation
from octavo.records.scope import PLAIN
from octavo.tenants import Tenant
from tests.support.books import pool_spec, tokens_of
from tests.support.mirror import Mirror

NOW = 1_700_000_000.0
ACME = Tenant(name="acme", cache_floor=PoolPart(percent=Decimal(25)), retention_quota=PoolPart(num_bytes=3000))
BOLT = Tenant(name="bolt")


class Visitors:
    """Requests at a manager with one worker: each comes, is computed, and goes."""

    def __init__(self, eviction: EvictionSettings, **pool: int) -> None:
        self.eviction = eviction
        self.manager = Manager(ChangeQueue(), lease_seconds=3600.0, eviction=eviction)
        self.registration = Registration(
            worker_id=WorkerId("w"), incarnation=Incarnation(1), address="127.0.0.1:1", pool=pool_spec(**pool)
        )
        self.epoch = self.manager.register(self.registration, NOW, lambda _: None).epoch
        self.mirror = Mirror(self.registration.pool.block_size)
        self.last = 0
        self.step = 0

    def lose_manager(self, seconds: float) -> None:
        """Another one opens the books again."""
        self.manager = Manager(ChangeQueue(), lease_seconds=3600.0, eviction=self.eviction)
        registration = replace(self.registration, first_epoch=self.epoch, last_epoch=self.epoch)
        restoration = self.manager.restoration(registration, NOW + seconds)
        for part in self.mirror.inventory():
            restoration.add(part)
        for _ in restoration.steps():
            pass
        self.epoch = self.manager.register(registration, NOW + seconds, lambda _: None, restoration).epoch
        self.step = 0

    def visit(self, tokens: list[int], tenant: Tenant, retain_seconds: int = 0, seconds: float = 0.0) -> int:
        """Returns how many tokens were found; `seconds` after the start."""
        self.last += 1
        sequence, now = SequenceId(self.last), NOW + seconds
        attach = Attach(sequence, tokens, PLAIN, tenant.tag, retain_seconds)
        wants = (Reservation(sequence, len(tokens)),)
        ((_, found),) = self.exchange(now, attaches=(attach,), reserves=wants).attached
        self.exchange(now, commits=(Commit(sequence, tokens[found:]),), finished=(sequence,))
        return found

    def exchange(self, now: float, **parts):
        self.step += 1
        exchange = Exchange(epoch=self.epoch, step=self.step, **parts)
        self.mirror.does(exchange)
        grant = self.manager.exchange(WorkerId("w"), exchange, now)
        self.mirror.hears(exchange, grant)
        return grant


def test_parts_of_a_pool_become_blocks_of_each_pool():
    settings = replace(PLAIN_LRU, tenants=(ACME, BOLT), retention_quota=PoolPart(percent=Decimal(10)))
    owed = settings.policy(pool_spec(num_blocks=40, block_bytes=1000)).allowances
    assert owed.named == {
        ACME.tag: Allowance(floor_blocks=10, retained_blocks=3),
        BOLT.tag: Allowance(floor_blocks=0, retained_blocks=4),
    }
    assert owed.others == Allowance(retained_blocks=4)


def test_a_tenants_floor_holds_against_another_ones_sweep():
    """S34, from the tenants file's words on."""
    visitors = Visitors(replace(PLAIN_LRU, tenants=(ACME, BOLT)), num_blocks=16)
    chat = tokens_of(0, 16)
    visitors.visit(chat, ACME)
    for start in range(100, 900, 25):
        visitors.visit(tokens_of(start, 25), BOLT)
    assert visitors.visit([*chat, 1, 2, 3], ACME) == 16


def test_what_is_retained_ages_again_when_its_time_is_up():
    """S32: and is no more than the quota."""
    visitors = Visitors(replace(PLAIN_LRU, tenants=(ACME, BOLT)), num_blocks=16, block_bytes=1000)
    visitors.visit(tokens_of(0, 40), BOLT, retain_seconds=60)
    visitors.visit(tokens_of(50, 40), replace(ACME, cache_floor=PoolPart()), retain_seconds=60)
    for start in range(100, 900, 25):
        visitors.visit(tokens_of(start, 25), BOLT, seconds=59.0)
    kept = visitors.visit(tokens_of(50, 41), ACME, seconds=59.0)
    for start in range(100, 900, 25):
        visitors.visit(tokens_of(start, 25), BOLT, seconds=120.0)
    assert (kept, visitors.visit(tokens_of(0, 41), BOLT, seconds=120.0)) == (16, 0)


def test_what_is_owed_outlives_the_manager():
    """Whose a block is, and that it is to be retained, is told to the worker with the block."""
    visitors = Visitors(
        replace(PLAIN_LRU, tenants=(ACME, BOLT), retention_quota=PoolPart(percent=Decimal(25))), num_blocks=16
    )
    chat, notes = tokens_of(0, 16), tokens_of(50, 16)
    visitors.visit(chat, ACME)
    visitors.visit(notes, BOLT, retain_seconds=60)
    visitors.lose_manager(seconds=30.0)
    for start in range(100, 900, 25):
        visitors.visit(tokens_of(start, 25), Tenant(name="stranger"), seconds=80.0)
    assert visitors.visit([*chat, 1], ACME, seconds=80.0) == 16
    assert visitors.visit([*notes, 1], BOLT, seconds=80.0) == 16
    for start in range(100, 900, 25):
        visitors.visit(tokens_of(start, 25), Tenant(name="stranger"), seconds=100.0)
    assert visitors.visit([*notes, 1], BOLT, seconds=100.0) == 0


def test_floors_of_more_than_a_pool_are_refused():
    half = PoolPart(percent=Decimal(60))
    with pytest.raises(ValueError, match=r"cache_floor: 120% of a pool are owed to all tenants together, .* 100%"):
        require_floors_fit([Tenant(name="a", cache_floor=half), Tenant(name="b", cache_floor=half)])
