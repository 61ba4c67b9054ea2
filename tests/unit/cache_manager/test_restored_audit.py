"""The audit of books that were opened from an inventory, without a wire: time is an argument."""

import asyncio
import logging

import pytest

from cache_manager.change_queue import ChangeQueue
from cache_manager.core.block import UNPUBLISHED
from cache_manager.core.ledger import Ledger
from cache_manager.manager import Manager
from cache_manager.metrics import ManagerMetrics
from cache_manager.restored_audit import audit_books
from octavo.ids import Incarnation, WorkerId
from octavo.records.attend import Registration
from tests.support.books import EPOCH, exchange, pool_spec, tokens_of
from tests.support.mirror import Mirror

NOW = 1_700_000_000.0
SPEC = pool_spec(num_blocks=2000, max_model_tokens=8000)
WORKER = WorkerId("w")


def inventory():
    """Of a worker that has computed a prompt of 100 blocks."""
    ledger, mirror = Ledger(SPEC, EPOCH), Mirror(SPEC.block_size)
    prompt = tokens_of(0, 400)
    for step, parts in enumerate(
        ({"attaches": {1: prompt}, "reserves": [(1, 400)]}, {"commits": {1: prompt}}), start=1
    ):
        told = exchange(step=step, **parts)
        mirror.does(told)
        mirror.hears(told, ledger.apply(told))
    return mirror.inventory(2)


@pytest.fixture
def manager() -> Manager:
    return Manager(ChangeQueue(), lease_seconds=5.0)


def come_again(manager: Manager) -> Ledger:
    """Register with an inventory. Returns the books that were opened from it."""
    registration = Registration(
        worker_id=WORKER, incarnation=Incarnation(1), address="127.0.0.1:1", pool=SPEC, inventory_parts=2
    )
    restoration = manager.restoration(registration, NOW)
    for part in inventory():
        restoration.add(part)
    for _ in restoration.steps():
        pass
    manager.register(registration, NOW, lambda why: None, restoration)
    return manager._members[WORKER].ledger


async def audited(manager: Manager) -> None:
    worker, epoch = manager.restored.get_nowait()
    await audit_books(manager, lambda: NOW, worker, epoch)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="octavo.cache_manager.restored_audit")
    return caplog


async def test_restored_books_are_audited_while_they_are_in_use(manager: Manager, told) -> None:
    ledger = come_again(manager)
    audit = asyncio.create_task(audited(manager))
    exchanges = 0
    while not audit.done():
        exchanges += 1
        parts = {"attaches": {1 + exchanges: tokens_of(0, 200 + exchanges)}, "reserves": [(1 + exchanges, 50)]}
        manager.exchange(WORKER, exchange(step=exchanges, **parts)._replace(epoch=ledger.epoch), NOW)
        await asyncio.sleep(0)
    (record,) = told.records
    assert exchanges > 5
    assert (record.message, record.worker, record.epoch) == ("restored_books_audited", WORKER, ledger.epoch)
    assert manager.counts.unbalanced == 0


async def test_restored_books_that_do_not_balance_are_an_error_in_log_and_metrics(manager: Manager, told) -> None:
    come_again(manager)._pool.blocks[0].references += 1
    await audited(manager)
    (record,) = told.records
    assert (record.message, record.levelname) == ("restored_books_unbalanced", "ERROR")
    assert "block 0 has 2 references, 1 tables name it" in record.first
    assert manager.counts.unbalanced == 1
    families = {family.name: family.samples[0].value for family in ManagerMetrics(manager).collect() if family.samples}
    assert families["octavo_unbalanced_restorations"] == 1


async def test_an_audit_ends_with_its_epoch(manager: Manager) -> None:
    ledger = come_again(manager)
    parts = manager.audit_parts(WORKER, ledger.epoch)
    assert next(parts) == []
    manager.stream_lost(WORKER, ledger.epoch)
    assert [*parts] == []
    assert [*manager.audit_parts(WORKER, ledger.epoch)] == []


def test_an_audit_in_parts_says_what_one_at_once_says(manager: Manager) -> None:
    ledger = come_again(manager)
    ledger._pool.blocks[3].state = UNPUBLISHED
    violations = [violation for part in manager.audit_parts(WORKER, ledger.epoch) for violation in part]
    assert "pool and index differ on whether block 3 is published" in violations
    assert "; ".join(violations) == ledger.audit().violation
