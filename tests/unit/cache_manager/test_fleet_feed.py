"""What a subscriber hears of the fleet, and when. A pace of an hour stands for "not yet"."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cache_manager.fleet_feed import MAX_CHANGED, FleetFeed, Subscription
from octavo.errors import Draining
from octavo.ids import Epoch, WorkerId
from octavo.records.fleet import FleetUpdate, WorkerInfo, WorkerLoad
from tests.support import books

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
HOUR = 3600.0


class Member:
    """A worker whose load the test sets."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.output_tokens = 0

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            epoch=Epoch(1),
            address="127.0.0.1:1",
            pool=books.pool_spec(),
            load=WorkerLoad(output_tokens=self.output_tokens),
        )


class Fleet:
    """Workers a and b, their feed, and one subscription."""

    def __init__(self, pace_seconds: float = HOUR) -> None:
        self.members = {name: Member(name) for name in (A, B)}
        self.feed = FleetFeed(self.members, pace_seconds)
        self.subscription: Subscription = self.feed.subscribe()

    def join(self, worker: WorkerId) -> None:
        self.members[worker] = Member(worker)
        self.feed.note(worker, urgent=True)

    def leave(self, worker: WorkerId) -> None:
        del self.members[worker]
        self.feed.note(worker, urgent=True)

    def work(self, worker: WorkerId, output_tokens: int) -> None:
        self.members[worker].output_tokens = output_tokens
        self.feed.note(worker, urgent=False)


def names(update: FleetUpdate) -> list[str]:
    return [worker.worker_id for worker in update.workers]


async def settled(update: "asyncio.Task[FleetUpdate]") -> bool:
    """Whether the update has arrived, once everything that is ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)
    return update.done()


def following(updates: AsyncIterator[FleetUpdate]) -> "asyncio.Task[FleetUpdate]":
    async def read() -> FleetUpdate:
        return await anext(updates)

    return asyncio.create_task(read())


def test_the_first_update_is_the_whole_fleet() -> None:
    update = Fleet().subscription.take()
    assert update.snapshot
    assert names(update) == ["a", "b"]


def test_later_updates_name_what_changed_as_it_is_now() -> None:
    fleet = Fleet()
    fleet.subscription.take()
    fleet.work(B, 3)
    fleet.work(B, 5)
    fleet.leave(A)
    fleet.join(C)
    update = fleet.subscription.take()
    assert not update.snapshot
    assert names(update) == ["b", "c"]
    assert update.workers[0].load.output_tokens == 5
    assert update.gone == ("a",)


def test_a_worker_that_left_and_came_back_is_there() -> None:
    fleet = Fleet()
    fleet.subscription.take()
    fleet.leave(A)
    fleet.join(A)
    update = fleet.subscription.take()
    assert (names(update), update.gone) == (["a"], ())


async def test_membership_is_told_at_once() -> None:
    fleet = Fleet()
    updates = fleet.subscription.updates()
    await anext(updates)
    fleet.join(C)
    assert names(await anext(updates)) == ["c"]
    fleet.leave(C)
    assert (await anext(updates)).gone == ("c",)


async def test_a_load_waits_for_the_pace_and_goes_along_with_membership() -> None:
    fleet = Fleet()
    updates = fleet.subscription.updates()
    await anext(updates)
    fleet.work(A, 1)
    next_update = following(updates)
    assert not await settled(next_update)
    fleet.work(B, 2)
    fleet.join(C)
    assert names(await next_update) == ["a", "b", "c"]


async def test_a_load_is_told_when_the_pace_allows() -> None:
    fleet = Fleet(pace_seconds=0)
    updates = fleet.subscription.updates()
    await anext(updates)
    fleet.work(A, 1)
    assert (await anext(updates)).workers[0].load.output_tokens == 1


async def test_a_slow_subscriber_hears_the_latest_only() -> None:
    fleet = Fleet(pace_seconds=0)
    updates = fleet.subscription.updates()
    await anext(updates)
    for tokens in range(1000):
        fleet.work(A, tokens)
    update = await anext(updates)
    assert [worker.load.output_tokens for worker in update.workers] == [999]
    waiting = following(updates)
    assert not await settled(waiting)
    waiting.cancel()


def test_a_subscriber_that_is_far_behind_is_told_the_whole_fleet_again() -> None:
    fleet = Fleet()
    fleet.subscription.take()
    for number in range(MAX_CHANGED + 1):
        passer_by = WorkerId(f"passer-by {number}")
        fleet.join(passer_by)
        fleet.leave(passer_by)
    update = fleet.subscription.take()
    assert update.snapshot
    assert (names(update), update.gone) == (["a", "b"], ())


async def test_a_closed_feed_ends_its_subscriptions() -> None:
    fleet = Fleet()
    updates = fleet.subscription.updates()
    await anext(updates)
    waiting = following(updates)
    assert not await settled(waiting)
    fleet.feed.close()
    with pytest.raises(Draining):
        await waiting


def test_an_unsubscribed_reader_hears_nothing_more() -> None:
    fleet = Fleet()
    fleet.subscription.take()
    fleet.feed.unsubscribe(fleet.subscription)
    fleet.join(C)
    assert fleet.subscription.take() == FleetUpdate()
