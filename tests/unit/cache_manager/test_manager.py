"""The single writer, without a wire: time is an argument."""

import gc
from typing import Any

import pytest

from cache_manager.change_queue import ChangeQueue
from cache_manager.core.block import Block
from cache_manager.manager import Manager
from octavo.errors import Draining, InvalidRequest, OctavoError, StaleEpoch, UnknownSequence, UnknownWorker
from octavo.ids import Epoch, Incarnation, WorkerId
from octavo.index_schema import index_key
from octavo.records.attend import Registration
from octavo.records.fleet import WorkerLoad
from tests.support import books

NOW = 1_700_000_000.0
LEASE = 5.0
TOKENS = list(range(10))


class Worker:
    """A worker's calls of the manager, and what its stream was told."""

    def __init__(self, manager: Manager, worker_id: str = "w", now: float = NOW, **pool: Any) -> None:
        self.manager = manager
        self.worker_id = WorkerId(worker_id)
        self.told: list[OctavoError] = []
        registration = Registration(
            worker_id=self.worker_id, incarnation=Incarnation(1), address="127.0.0.1:1", pool=books.pool_spec(**pool)
        )
        self.epoch = manager.register(registration, now, self.told.append).epoch
        self.step = 0

    def exchange(self, now: float = NOW, *, step: int | None = None, **fields: Any) -> Any:
        records = {name: fields.pop(name) for name in ("load", "draining", "epoch") if name in fields}
        wanted = self.step + 1 if step is None else step
        exchange = books.exchange(step=wanted, **fields)._replace(**({"epoch": self.epoch} | records))
        grant = self.manager.exchange(self.worker_id, exchange, now)
        self.step = wanted
        return grant

    def compute(self, sequence: int, tokens: list[int]) -> None:
        self.exchange(attaches={sequence: tokens}, reserves=[(sequence, len(tokens))])
        self.exchange(commits={sequence: tokens})


@pytest.fixture
def changes() -> ChangeQueue:
    return ChangeQueue()


@pytest.fixture
def manager(changes: ChangeQueue) -> Manager:
    return Manager(changes, lease_seconds=LEASE)


def workers_of(manager: Manager) -> dict[str, Any]:
    """The fleet as a new subscriber is told of it."""
    with manager.subscribe() as subscription:
        update = subscription.take()
        assert update.snapshot
        return {worker.worker_id: worker for worker in update.workers}


def test_epochs_grow_with_every_registration(manager: Manager) -> None:
    epochs = [Worker(manager, name).epoch for name in ("a", "b", "a", "c")]
    assert epochs == sorted(set(epochs))


def test_a_second_registration_supersedes_the_first(manager: Manager, changes: ChangeQueue) -> None:
    first = Worker(manager)
    second = Worker(manager)
    assert [type(error) for error in first.told] == [StaleEpoch]
    assert second.told == []
    with pytest.raises(StaleEpoch):
        first.exchange()
    second.exchange()
    assert changes.take().ended == [index_key(first.worker_id, first.epoch)]
    assert list(changes.open_indexes()) == [index_key(second.worker_id, second.epoch)]


def test_an_impossible_registration_leaves_the_present_one(manager: Manager) -> None:
    present = Worker(manager)
    with pytest.raises(InvalidRequest):
        Worker(manager, num_blocks=0)
    assert present.told == []
    present.exchange()


def test_the_last_exchange_may_be_repeated_and_not_the_one_before(manager: Manager) -> None:
    worker = Worker(manager)
    worker.exchange()
    grant = worker.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    assert worker.exchange(step=2, attaches={7: TOKENS}) is grant
    with pytest.raises(InvalidRequest, match=r"exchange\.step: 1, the last one was 2"):
        worker.exchange(step=1)


def test_a_refused_exchange_does_not_count_as_a_step(manager: Manager) -> None:
    worker = Worker(manager)
    with pytest.raises(UnknownSequence):
        worker.exchange(finished=[9])
    worker.exchange(step=1)


def test_a_refused_exchange_does_not_renew_the_lease(manager: Manager) -> None:
    worker = Worker(manager)
    with pytest.raises(UnknownSequence):
        worker.exchange(NOW + LEASE / 2, finished=[9])
    manager.expire(NOW + LEASE)
    assert workers_of(manager) == {}


@pytest.mark.parametrize("repeated", [False, True])
def test_an_exchange_renews_the_lease_even_a_repeated_one(manager: Manager, repeated: bool) -> None:
    worker = Worker(manager)
    worker.exchange()
    worker.exchange(NOW + LEASE / 2, step=1 if repeated else 2)
    manager.expire(NOW + LEASE)
    assert list(workers_of(manager)) == ["w"]
    assert manager.next_expiry() == NOW + 1.5 * LEASE


def test_an_expired_worker_is_gone_from_everywhere(manager: Manager, changes: ChangeQueue) -> None:
    worker = Worker(manager)
    manager.expire(NOW + LEASE)
    assert [type(error) for error in worker.told] == [StaleEpoch]
    assert workers_of(manager) == {}
    assert changes.take().ended == [index_key(worker.worker_id, worker.epoch)]
    with pytest.raises(StaleEpoch):
        worker.exchange()
    with pytest.raises(UnknownWorker):
        manager.audit(worker.worker_id)
    assert manager.next_expiry() is None


def test_a_lost_stream_of_an_earlier_epoch_changes_nothing(manager: Manager) -> None:
    first, second = Worker(manager), Worker(manager)
    manager.stream_lost(first.worker_id, first.epoch)
    second.exchange()
    manager.stream_lost(second.worker_id, second.epoch)
    manager.stream_lost(second.worker_id, second.epoch)
    assert workers_of(manager) == {}


def test_what_is_published_and_evicted_is_queued_for_the_mirror(manager: Manager, changes: ChangeQueue) -> None:
    worker = Worker(manager, num_blocks=3)
    index = index_key(worker.worker_id, worker.epoch)
    assert changes.take().stale == [index]
    worker.compute(1, TOKENS)
    assert list(changes.take().updates[index].values()) == [True, True]
    worker.exchange(finished=[1])
    worker.exchange(attaches={2: [9, 9, 9, 9, 9]}, reserves=[(2, 5)])
    assert list(changes.take().updates[index].values()) == [False]
    assert len(list(changes.truth(index))) == 1


def test_the_fleet_is_told_the_blocks_that_the_books_count(manager: Manager) -> None:
    worker = Worker(manager)
    worker.compute(1, TOKENS)
    worker.compute(2, [8, *TOKENS])
    worker.exchange(finished=[1], load=WorkerLoad(held_blocks=77, cached_blocks=88, output_tokens=5))
    load = workers_of(manager)["w"].load
    assert (load.held_blocks, load.cached_blocks, load.output_tokens) == (3, 2, 5)


def test_draining_is_told_and_not_taken_back(manager: Manager) -> None:
    worker = Worker(manager)
    worker.exchange(draining=True)
    worker.exchange(draining=False)
    assert workers_of(manager)["w"].draining


def test_the_audit_is_of_the_epoch_that_lives(manager: Manager) -> None:
    worker = Worker(manager)
    worker.compute(1, TOKENS)
    audit = manager.audit(worker.worker_id)
    assert (audit.epoch, audit.num_blocks, audit.held_blocks, audit.sequences) == (worker.epoch, 16, 3, 1)
    assert audit.violation == ""


def test_a_manager_that_leaves_sends_its_workers_away_but_for_those_that_leave_themselves(manager: Manager) -> None:
    stays, leaves = Worker(manager, "stays"), Worker(manager, "leaves")
    leaves.exchange(draining=True)
    manager.hand_over()

    assert [type(error) for error in stays.told] == [Draining]
    assert leaves.told == []
    leaves.exchange(draining=True)
    with pytest.raises(Draining):
        Worker(manager, "late")


async def test_gateways_are_not_told_of_workers_that_another_manager_is_about_to_have(manager: Manager) -> None:
    """To them the manager is away, so the workers are as they were; who asks anew is told nothing either."""
    Worker(manager)
    with manager.subscribe() as before:
        updates = before.updates()
        await anext(updates)
        manager.hand_over()
        with pytest.raises(Draining):
            await anext(updates)
    with manager.subscribe() as after, pytest.raises(Draining):
        await anext(after.updates())


async def test_a_manager_is_alone_when_the_last_worker_has_gone(manager: Manager) -> None:
    await manager.until_alone()
    worker = Worker(manager)
    manager.stream_lost(worker.worker_id, worker.epoch)
    await manager.until_alone()


def test_a_closed_manager_has_told_everyone_why(manager: Manager, changes: ChangeQueue) -> None:
    one, two = Worker(manager, "one"), Worker(manager, "two")
    manager.close()
    assert [type(error) for error in one.told + two.told] == [Draining, Draining]
    assert len(changes.take().ended) == 2
    assert workers_of(manager) == {}


def test_an_unknown_epoch_is_stale_whoever_asks(manager: Manager) -> None:
    worker = Worker(manager)
    with pytest.raises(StaleEpoch):
        worker.exchange(epoch=Epoch(worker.epoch + 1))
    with pytest.raises(StaleEpoch):
        manager.exchange(WorkerId("stranger"), books.exchange()._replace(epoch=worker.epoch), NOW)


def test_dropped_books_are_gone_before_the_collector_comes(manager: Manager) -> None:
    gc.collect()
    gc.disable()
    try:
        before = _blocks_in_memory()
        workers = [_busy_worker(manager) for _ in range(3)]
        assert 1000 <= _blocks_in_memory() - before < 1100, "the books of the last epoch alone"
        manager.stream_lost(workers[-1].worker_id, workers[-1].epoch)
        assert _blocks_in_memory() - before < 100
    finally:
        gc.enable()


def _busy_worker(manager: Manager) -> Worker:
    """Its books have chains that part, cached blocks and a sequence that lives."""
    worker = Worker(manager, num_blocks=1000)
    worker.compute(1, TOKENS)
    worker.exchange(finished=[1])
    worker.exchange(attaches={2: [*TOKENS[:5], *TOKENS]})
    return worker


def _blocks_in_memory() -> int:
    return sum(type(each) is Block for each in gc.get_objects())  # isinstance would ask objects of others, who may warn
