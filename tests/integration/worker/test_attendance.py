"""A worker without a cache manager, and between several: what it goes on with, where it goes, when it gives up."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from octavo.errors import Draining, InvalidRequest, OctavoError, Superseded
from octavo.ids import NO_EPOCH, Epoch, Incarnation, WorkerId
from octavo.records.attend import Exchange, Registration
from octavo.records.serve import Submission
from tests.support import books
from tests.support.fakes import FunctionRunner, LedgerClient
from tests.support.scheduling import submission
from tests.support.turnstile import LONG, POOL, SHORT, Turnstile, assert_served, computed_once
from tests.support.worker_service import (
    ManagerProcess,
    WorkerService,
    attend,
    manager_process,
    until,
    worker_service,
)
from worker import attendance
from worker.attendance import Attendance, ManagerLost
from worker.core.scheduler import Scheduler

REGISTRATION = Registration(worker_id=WorkerId("w"), incarnation=Incarnation(7), address="127.0.0.1:1", pool=POOL)


class Moody(LedgerClient):
    """A manager that is away, or refuses, when the test says so."""

    def __init__(self, lease_seconds: float = 60.0) -> None:
        super().__init__(lease_seconds)
        self.away = False
        self.refusal: OctavoError | None = None
        """Of the next inventory."""
        self.tries = 0
        """To find it while it was away."""
        self.before_exchange = self.before_registration = self._judge

    async def is_there(self) -> bool:
        return not self.away

    def _judge(self, asked: Exchange | Registration) -> None:
        if self.away:
            self.tries += 1
            raise ConnectionError("away")
        if isinstance(asked, Registration) and asked.last_epoch and self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal


@pytest.fixture
def runner() -> FunctionRunner:
    return FunctionRunner(POOL)


class Held:
    """A worker, and a long request of which one step has run; the next one waits at the turnstile."""

    def __init__(self, worker: WorkerService, runner: FunctionRunner) -> None:
        self.worker = worker
        self.runner = runner
        self.turnstile = Turnstile(runner)
        self.gateway = worker.gateway()

    @classmethod
    async def begin(cls, worker: WorkerService, runner: FunctionRunner) -> "Held":
        held = cls(worker, runner)
        await held.gateway.submit(LONG)
        held.turnstile.let_through()
        await held.turnstile.until_waiting(2)
        return held

    async def lose(self, manager: Moody) -> None:
        """Let steps run until the worker has noticed that the manager is away, and is out of room."""
        manager.away = True
        self.turnstile.let_through(1000)
        tokens = self.gateway.heard.of(LONG.request).tokens.setdefault(0, [])
        while len(LONG.prompt) + len(tokens) <= 2 * POOL.block_size:  # the last of them finds no room
            await self.gateway.hear()
        await until(lambda: manager.tries > 1)

    async def finish(self, *requests: Submission) -> None:
        self.turnstile.let_through(1000)
        await self.gateway.until_ended(LONG, *requests)
        assert_served(self.gateway, LONG, *requests)


async def test_a_worker_computes_on_in_its_blocks_and_then_where_it_stands(runner: FunctionRunner):
    """No further than there is room, and nobody comes in meanwhile."""
    manager = Moody()
    async with worker_service(POOL, runner, manager) as worker:
        held = await Held.begin(worker, runner)
        await held.lose(manager)
        await held.gateway.submit(SHORT)
        await until(lambda: worker.scheduler.load().waiting_sequences == 1)
        chunks = [(chunk.start, chunk.end) for step in runner.steps for chunk in step.chunks]
        assert chunks == [(0, 5), (5, 6), (6, 7), (7, 8)]
        manager.away = False
        await held.finish(SHORT)
    assert runner.computed_tokens == computed_once(LONG) + computed_once(SHORT)
    assert [registration.inventory_parts > 0 for registration in manager.registrations] == [False, True]
    assert worker.ready == [True, False, True]


async def test_steps_begin_without_a_manager_while_blocks_have_room(runner: FunctionRunner):
    manager = Moody(lease_seconds=0.03)
    async with worker_service(POOL, runner, manager) as worker:
        held = await Held.begin(worker, runner)
        manager.away = True
        await until(lambda: manager.tries > 1)  # by a heartbeat, then to find it again
        held.turnstile.let_through()
        await held.turnstile.until_waiting(3)
        manager.away = False
        await held.finish()
    assert runner.computed_tokens == computed_once(LONG)


async def test_what_is_cancelled_meanwhile_is_freed_by_the_next_exchange(runner: FunctionRunner):
    manager = Moody()
    async with worker_service(POOL, runner, manager) as worker:
        held = await Held.begin(worker, runner)
        await held.lose(manager)
        await held.gateway.cancel(LONG.request)
        await until(lambda: not worker.scheduler.busy)
        manager.away = False
        await until(lambda: manager.ledger is not None and manager.ledger.num_held == 0)
        assert manager.ledger is not None
        assert manager.ledger.num_cached == 2


async def test_a_worker_whose_inventory_is_refused_computes_again(
    runner: FunctionRunner, caplog: pytest.LogCaptureFixture
):
    manager = Moody()
    manager.refusal = InvalidRequest("inventory.published: 3 bytes")
    async with worker_service(POOL, runner, manager) as worker:
        held = await Held.begin(worker, runner)
        await held.lose(manager)
        manager.away = False
        await held.finish()
    assert [registration.inventory_parts for registration in manager.registrations] == [0, 0]
    assert runner.computed_tokens > computed_once(LONG)
    assert [record.message for record in caplog.records].count("inventory_refused") == 1


async def test_a_worker_whose_place_was_taken_leaves_for_good(runner: FunctionRunner):
    """S44: it says why, and does not come again."""
    manager = Moody()
    manager.refusal = Superseded("worker w is another process, which first registered in epoch 9")
    async with worker_service(POOL, runner, manager) as worker:
        held = await Held.begin(worker, runner)
        await held.lose(manager)
        manager.away = False
        with pytest.raises(Superseded, match="another process"):
            await worker.loop
    assert len(manager.registrations) == 1


async def test_a_worker_without_a_manager_for_a_lease_time_takes_nothing_new_and_loses_nothing(
    runner: FunctionRunner,
):
    manager = Moody(lease_seconds=0.01)
    async with worker_service(POOL, runner, manager) as worker:
        held = await Held.begin(worker, runner)
        await held.lose(manager)
        outbox = worker.engine.open_outbox()
        numbers = itertools.count()

        def refused() -> bool:
            try:
                worker.engine.submit(outbox, submission(next(numbers), [1], 1))
            except Draining as error:
                return "finds no cache manager" in str(error)
            return False

        await until(refused)
        worker.engine.close_outbox(outbox)
        manager.away = False
        await held.finish()
    assert runner.computed_tokens == computed_once(LONG)


async def kill(manager: ManagerProcess) -> None:
    await manager.kill()


async def hand_over(manager: ManagerProcess) -> None:
    manager.manager.close()


@pytest.mark.parametrize("leave", [kill, hand_over])
async def test_a_worker_takes_what_it_holds_to_the_next_manager(
    runner: FunctionRunner, leave: Callable[[ManagerProcess], Awaitable[None]]
):
    async with (
        manager_process() as one,
        manager_process() as other,
        worker_service(POOL, runner, attend(one), attend(other)) as worker,
    ):
        held = await Held.begin(worker, runner)
        first, second = (one, other) if one.attended else (other, one)
        assert not second.attended
        await leave(first)
        await held.finish()
        await until(lambda: second.attended and second.audit().held_blocks == 0)
        assert second.audit().cached_blocks == computed_once(LONG) // POOL.block_size
        assert worker.ready == [True, False, True]
    assert runner.computed_tokens == computed_once(LONG)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every half minute, whether its own manager is there again."""
    monkeypatch.setattr(attendance, "_LOOK_HOME_SECONDS", 0.01)


async def test_a_worker_goes_back_to_its_own_manager_when_that_is_there_again(
    runner: FunctionRunner, looks_often: None
):
    async with (
        manager_process() as one,
        manager_process() as other,
        worker_service(POOL, runner, attend(one), attend(other)) as worker,
    ):
        held = await Held.begin(worker, runner)
        own, next_one = (one, other) if one.attended else (other, one)
        await own.kill()
        held.turnstile.let_through(20)
        await until(lambda: next_one.attended)
        await own.start()
        held.turnstile.let_through(100)
        await until(lambda: own.attended and not next_one.attended)
        await held.finish()
        await until(lambda: own.audit().held_blocks == 0)
        assert own.audit().cached_blocks == computed_once(LONG) // POOL.block_size
        assert worker.engine.counts.lost_managers == 1
    assert runner.computed_tokens == computed_once(LONG)


async def test_a_worker_that_its_own_manager_refuses_stays_where_it_is(
    runner: FunctionRunner, looks_often: None, caplog: pytest.LogCaptureFixture
):
    managers = [Moody(), Moody()]
    async with worker_service(POOL, runner, *managers) as worker:
        held = await Held.begin(worker, runner)
        own, next_one = sorted(managers, key=lambda manager: not manager.registrations)
        own.away = True
        held.turnstile.let_through(20)
        await until(lambda: bool(next_one.registrations))
        own.away, own.refusal = False, InvalidRequest("pool.dtype: float32, worker v serves tiny with bfloat16")
        held.turnstile.let_through(100)
        await until(lambda: own.refusal is None and len(next_one.registrations) == 2)
        await held.finish()
    assert len(own.registrations) == 1
    assert [registration.inventory_parts > 0 for registration in next_one.registrations] == [True, True]
    assert runner.computed_tokens == computed_once(LONG)
    assert "own_manager_refused" in caplog.messages
    assert "inventory_refused" not in caplog.messages


async def test_it_goes_back_to_one_that_is_there_twice_in_a_row_and_not_while_it_drains(looks_often: None):
    managers = [Moody(), Moody()]
    await Attendance(managers, draw=lambda: 0.0).join(REGISTRATION, idle_holder(), lambda: None)
    own, next_one = sorted(managers, key=lambda manager: not manager.registrations)
    own.away = True
    worker = Attendance(managers, draw=lambda: 0.0)
    await worker.join(REGISTRATION, idle_holder(), lambda: None)
    assert (len(own.registrations), len(next_one.registrations)) == (1, 1)

    looks = iter([True, False, True, True])
    seen: list[bool] = []

    async def is_there() -> bool:
        seen.append(next(looks))
        return seen[-1]

    own.is_there = is_there  # pyright: ignore[reportAttributeAccessIssue]
    await until(lambda: len(seen) == 4)
    exchange = books.exchange(step=1)._replace(epoch=worker.epoch)
    await worker.exchange(exchange._replace(draining=True))
    with pytest.raises(ManagerLost, match="its own manager is there again"):
        await worker.exchange(exchange._replace(step=2))
    await worker.close()


async def test_an_idle_worker_notices_at_once_that_its_manager_is_gone(runner: FunctionRunner):
    """Its next heartbeat would be due in twenty seconds."""
    async with manager_process() as manager, worker_service(POOL, runner, attend(manager)) as worker:
        await until(lambda: worker.ready == [True])
        await manager.kill()
        await until(lambda: worker.ready == [True, False])
        await manager.start()
        await until(lambda: worker.ready == [True, False, True])


def idle_holder() -> Scheduler:
    """A pool with nothing in it."""
    return Scheduler(POOL, max_step_tokens=1, max_running=1, max_waiting=1)


async def test_who_says_that_the_epoch_is_over_is_asked_again_and_who_is_lost_is_given_up_for_the_next():
    managers, holder = [Moody() for _ in range(3)], idle_holder()
    worker = Attendance(managers, draw=lambda: 0.0)

    async def registrations_after(epoch: Epoch) -> list[int]:
        """By manager, from the worker's own on, once it has lost the one that it asked in this epoch."""
        with pytest.raises(ManagerLost):
            await worker.exchange(books.exchange(step=1)._replace(epoch=epoch))
        await worker.join(REGISTRATION, holder, lambda: None)
        return [len(manager.registrations) for manager in (*managers[own:], *managers[:own])]

    await worker.join(REGISTRATION, holder, lambda: None)
    own = next(at for at, manager in enumerate(managers) if manager.registrations)
    assert await registrations_after(NO_EPOCH) == [2, 0, 0]
    managers[own].away = True
    assert await registrations_after(worker.epoch) == [2, 1, 0]
    await worker.close()


async def test_an_answer_renews_the_lease_from_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(attendance, "_now", lambda: now)
    manager = LedgerClient(lease_seconds=30.0)
    worker = Attendance([manager], draw=lambda: 0.0)
    await worker.join(REGISTRATION, idle_holder(), lambda: None)
    assert worker.renewal_in == 10.0

    def answer_late(_: Exchange) -> None:
        nonlocal now
        now = 109.0

    now, manager.before_exchange = 107.0, answer_late
    await worker.exchange(books.exchange(step=1)._replace(epoch=worker.epoch))
    assert worker.renewal_in == 8.0
    now = 130.0
    assert worker.renewal_in == 0.0
    await worker.close()


async def test_workers_spread_over_the_managers():
    managers = [LedgerClient() for _ in range(2)]
    holder = idle_holder()
    for number in range(8):
        registration = replace(REGISTRATION, worker_id=WorkerId(f"worker-{number}"))
        await Attendance(managers, draw=lambda: 0.0).join(registration, holder, lambda: None)
    assert all(manager.registrations for manager in managers)


async def test_after_each_round_through_the_managers_it_waits_100_to_500_ms(monkeypatch: pytest.MonkeyPatch):
    managers, pauses, draws = [Moody(), Moody()], list[float](), iter([0.0, 0.5, 1.0])
    for manager in managers:
        manager.away = True

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        managers[0].away = len(pauses) < 3

    monkeypatch.setattr(asyncio, "sleep", sleep)
    holder = idle_holder()
    await Attendance(managers, draw=lambda: next(draws)).join(REGISTRATION, holder, lambda: None)

    assert pauses == [0.1, pytest.approx(0.15), pytest.approx(0.25)]
    assert [len(manager.registrations) for manager in managers] == [1, 0]
    assert managers[0].tries == 3


async def test_managers_that_are_away_are_said_once_and_not_at_every_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "octavo.worker.attendance")
    manager = Moody()
    manager.away = True

    async def sleep(_: float) -> None:
        manager.away = manager.tries < 10

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await Attendance([manager], draw=lambda: 0.0).join(REGISTRATION, idle_holder(), lambda: None)

    assert manager.tries == 10
    assert caplog.messages == ["manager_not_joined", "manager_joined", "registered"]
