"""A long random life of one pool, whose manager may be lost between any two operations.

The worker is played by a mirror that learns from nothing but grants, and by a memory with a cell for each position of
each block, in which lies what a position's keys and values depend on: the whole prefix. Whatever is lost and opened
again, the books balance, a sequence reads what it would have computed alone, and what was published still is.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count, product
from typing import Any

import pytest

from cache_manager.core.accounts import Allowance, Allowances
from cache_manager.core.books import empty_books
from cache_manager.core.eviction import SEGMENTED, EvictionPolicy
from cache_manager.core.ledger import Ledger
from cache_manager.core.restoration import Restoration
from octavo.errors import UnknownSequence
from octavo.hashing import next_hash
from octavo.ids import NOBODY, BlockId, CacheEpoch, Epoch, SequenceId, TenantTag
from octavo.records.attend import Attach, Exchange, Grant
from octavo.records.fleet import PoolSpec
from tests.support.books import exchange, pool_spec
from tests.support.mirror import Mirror

OPERATIONS = 100_000
SHORT_LIVES, SHORT_LIFE = 32, 14
"""How many lives are lived again and again, once for each moment of theirs, and how many operations each is long."""
SPEC = pool_spec(num_blocks=16, block_size=2, vocab_size=10)
MOST_SEQUENCES = 7
CRASHES = 0.02
"""Of the operations, those before which the manager is lost. Half as many lose it with their grant on its way."""

ACME, BOLT = TenantTag(b"acme...."), TenantTag(b"bolt....")
POLICY = EvictionPolicy(
    ratios=SEGMENTED.ratios,
    allowances=Allowances(
        named={ACME: Allowance(floor_blocks=4), BOLT: Allowance(retained_blocks=3)}, others=Allowance(retained_blocks=2)
    ),
)

RESETS = 0.003
"""Of the operations, those that are resets of the cache."""


class NowAndThen:
    """When the manager is lost, in a long life."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def strikes_before(self, operation: str) -> bool:
        return self._dice.random() < CRASHES

    def strikes_on_the_way(self) -> bool:
        return self._dice.random() < CRASHES / 2


class Once:
    """The manager is lost at one moment: before an operation, or while the grant of one is on its way."""

    def __init__(self, moment: int) -> None:
        self._moments_left = moment
        self._last = "birth"
        self.struck = ""
        """Between what."""

    def strikes_before(self, operation: str) -> bool:
        last, self._last = self._last, operation
        return self._strikes(f"{last}, {operation}")

    def strikes_on_the_way(self) -> bool:
        return self._strikes(f"{self._last} and its answer")

    def _strikes(self, between: str) -> bool:
        self._moments_left -= 1
        if self._moments_left == 0:
            self.struck = between
        return self._moments_left == 0


class PoolMemory:
    """Cells, written and copied as a worker does."""

    def __init__(self, spec: PoolSpec) -> None:
        self._size = spec.block_size
        self._cells: list[list[int | None]] = [[None] * spec.block_size for _ in range(spec.num_blocks)]

    def copy(self, grant: Grant) -> None:
        for copy in grant.copies:
            self._cells[copy.target] = self._cells[copy.source].copy()

    def write(self, table: Sequence[BlockId], start: int, tokens: Sequence[int]) -> None:
        before = self._cells[table[(start - 1) // self._size]][(start - 1) % self._size] if start else 0
        for position, token in enumerate(tokens, start):
            before = hash((before, token))
            self._cells[table[position // self._size]][position % self._size] = before

    def holds(self, table: Sequence[BlockId], tokens: Sequence[int]) -> bool:
        """Whether what lies under the table is what these tokens would have written."""
        before = 0
        for position, token in enumerate(tokens):
            before = hash((before, token))
            if self._cells[table[position // self._size]][position % self._size] != before:
                return False
        return True


class Life:
    """A worker, its manager, and dice."""

    def __init__(self, seed: int, fate: NowAndThen | Once, resets: float = RESETS) -> None:
        self.dice = random.Random(seed)
        self.fate = fate
        self.resets = resets
        self.ledger = Ledger(SPEC, Epoch(1), books=empty_books(SPEC, next_hash, POLICY), min_copy_tokens=1)
        self.mirror = Mirror(SPEC.block_size)
        self.memory = PoolMemory(SPEC)
        self.step = 0
        self.last_id = 0
        self.audit = self.ledger.audit_parts()
        """One that goes on while the books are in use."""
        self.seen = Counter[str]()
        """How often which kind of thing has happened."""

    @property
    def alive(self) -> list[SequenceId]:
        return list(self.mirror.sequences)

    def picked(self) -> SequenceId:
        return self.dice.choice(self.alive)

    def new_ids(self, count: int) -> list[int]:
        self.last_id += count
        return list(range(self.last_id - count + 1, self.last_id + 1))

    def drawn(self, most: int) -> list[int]:
        """Tokens of few kinds, so that prefixes meet again."""
        return self.dice.choices(range(3), k=self.dice.randint(1, most))

    # ---- the operations --------------------------------------------------------------------------------------

    def operate(self) -> None:
        """One operation, before which the manager may be lost, or before its answer."""
        operation = self.drawn_operation()
        if self.fate.strikes_before(operation.__name__):
            published = sorted(self.ledger.published())
            self.lose_manager()
            assert sorted(self.ledger.published()) == published
        operation()

    def drawn_operation(self) -> Callable[[], None]:
        if self.dice.random() < self.resets:
            return self.reset
        if not self.alive:
            return self.attach
        if len(self.alive) >= MOST_SEQUENCES:
            return self.end
        return self.dice.choice(
            [self.attach, self.grow, self.grow, self.decode, self.decode, self.fork, self.cut, self.end]
        )

    def attach(self) -> None:
        (sequence,) = self.new_ids(1)
        tokens = self.drawn(12)
        guest = Attach(
            SequenceId(sequence),
            tuple(tokens),
            tenant=self.dice.choice([NOBODY, ACME, BOLT]),
            retain_seconds=self.dice.choice([0, 0, 60]),
        )
        self.tell(guest, reserves=[(sequence, self.dice.randint(0, 12))])

    def grow(self) -> None:
        """Computes as much of a prompt as there is room for, or decodes."""
        sequence = self.picked()
        known = self.mirror.sequences[sequence]
        rest = known.prompt[len(known.tokens) :] or self.drawn(3)
        self.write(sequence, rest[: known.room - len(known.tokens)])

    def decode(self) -> None:
        sequence = self.picked()
        self.tell(reserves=[(sequence, self.dice.randint(1, 3))])
        known = self.mirror.sequences[sequence]
        if not known.prompt[len(known.tokens) :]:
            self.write(sequence, self.drawn(1)[: known.room - len(known.tokens)])

    def write(self, sequence: SequenceId, tokens: list[int]) -> None:
        """A step writes, and may be cancelled while it does so: the sequence ends before its tokens are told."""
        known = self.mirror.sequences[sequence]
        self.memory.write(known.table, len(known.tokens), tokens)
        if self.dice.random() < 0.1:
            self.tell(finished=[sequence])
        elif tokens:
            self.tell(commits={sequence: tokens})

    def fork(self) -> None:
        parent, children = self.picked(), self.new_ids(self.dice.randint(1, 3))
        ends = [parent] if self.dice.random() < 0.3 else []
        self.tell(forks=[(parent, children, self.dice.randint(0, 2))], finished=ends)

    def cut(self) -> None:
        sequence = self.picked()
        self.tell(truncations={sequence: self.dice.randint(0, len(self.mirror.sequences[sequence].tokens))})

    def end(self) -> None:
        """Ends some, and one of them a second time, which is refused."""
        ended = self.dice.sample(self.alive, self.dice.randint(1, len(self.alive)))
        self.tell(finished=ended)
        before = self.ledger.audit()
        for again in ({"finished": ended[:1]}, {"finished": [*self.alive[:1], ended[0]]}):
            with pytest.raises(UnknownSequence):
                self.ledger.apply(self.numbered(**again))
        assert self.ledger.audit() == before

    def reset(self) -> None:
        """All that is published is forgotten, unless the manager is lost before it has said so."""
        self.ledger.reset(CacheEpoch(self.ledger.cache_epoch + 1))
        self.seen["resets"] += 1
        self.tell()

    # ---- both sides ------------------------------------------------------------------------------------------

    def numbered(self, *attaches: Attach, **parts: Any) -> Exchange:
        return exchange(step=self.step + 1, **parts)._replace(epoch=self.ledger.epoch, attaches=attaches)

    def tell(self, *attaches: Attach, **parts: Any) -> None:
        told = self.numbered(*attaches, **parts)
        self.mirror.does(told)
        grant = self.ledger.apply(told)
        if self.fate.strikes_on_the_way():
            self.lose_manager()  # the worker has not heard of the grant: what it did itself is in its inventory
            told = self.numbered(*attaches, **parts)._replace(truncations=(), commits=())
            grant = self.ledger.apply(told)
        self.step += 1
        self.seen["unmet"] += len(grant.unmet)
        self.memory.copy(grant)
        self.mirror.hears(told, grant)

    def lose_manager(self) -> None:
        """Another one opens the books from what the worker tells, in parts."""
        restoration = Restoration(SPEC, eviction=POLICY)
        for part in self.mirror.inventory(self.dice.randint(1, 3)):
            restoration.add(part)
        for _ in restoration.steps():
            pass
        self.count_up()
        self.ledger = restoration.open(Epoch(self.ledger.epoch + 1), self.mirror.cache_epoch, min_copy_tokens=1)
        self.audit = self.ledger.audit_parts()

    def count_up(self) -> None:
        """What the books that end here have seen."""
        self.seen.update(asdict(self.ledger.stats()), crashes=1)

    def check(self) -> None:
        audit = self.ledger.audit()
        assert audit.violation == ""
        assert audit.free_blocks + audit.cached_blocks + audit.held_blocks == SPEC.num_blocks
        assert audit.sequences == len(self.mirror.sequences)
        part = next(self.audit, None)
        assert not part
        if part is None:
            self.audit = self.ledger.audit_parts()
        for sequence, known in self.mirror.sequences.items():
            assert self.ledger.length(sequence) == len(known.tokens)
            assert self.memory.holds(known.table, known.tokens), sequence

    def ends_in_balance(self) -> None:
        self.tell(finished=self.alive)
        audit = self.ledger.audit()
        assert (audit.held_blocks, audit.free_blocks + audit.cached_blocks) == (0, SPEC.num_blocks)


@pytest.mark.timeout(900)  # half a minute on a machine that does nothing else
def test_no_operation_and_no_crash_between_two_of_them_unbalances_the_books():
    """S17"""
    life = Life(seed=17, fate=NowAndThen(seed=18))
    for _ in range(OPERATIONS):
        life.operate()
        life.check()
    life.count_up()
    assert life.seen["crashes"] > OPERATIONS * CRASHES
    assert all(life.seen.values()), life.seen
    life.ends_in_balance()


def test_there_is_no_moment_at_which_a_manager_may_not_be_lost():
    """S17: some short lives, lived once for each of their moments, which is the one at which the manager is lost.

    Whatever follows whatever, it is lost between the two, and between each and its answer.
    """
    struck: set[str] = set()
    for seed in range(SHORT_LIVES):
        for moment in count(1):
            life = Life(seed, fate := Once(moment), resets=0.15)
            for _ in range(SHORT_LIFE):
                life.operate()
                if fate.struck:
                    life.check()
            life.ends_in_balance()
            if not fate.struck:
                break
            struck.add(fate.struck)
    kinds = ("attach", "grow", "decode", "fork", "cut", "end", "reset")
    assert struck >= {f"{kind} and its answer" for kind in kinds}
    assert struck >= {", ".join(two) for two in product(kinds, kinds)}
