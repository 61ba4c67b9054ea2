"""What changed in the fleet, told to everyone who watches it.

A worker that came, left or drains is told at once; a changed load waits until a subscriber has been left alone for a
while. A subscription remembers *which* workers changed and reads *how they are* when it speaks, so a slow subscriber
hears less often, never late news; one that is far behind is told the whole fleet again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from octavo.errors import Draining
from octavo.ids import WorkerId
from octavo.records.fleet import FleetUpdate, WorkerInfo

PACE_SECONDS = 0.1
"""Between two updates that tell of loads only."""

MAX_CHANGED = 1 << 12
"""Workers a subscription remembers by name; beyond, it tells the whole fleet."""


class Member(Protocol):
    """A worker of the fleet."""

    def info(self) -> WorkerInfo:
        """The worker as it is now."""
        ...


class Subscription:
    """One subscriber's backlog. `updates` is for one reader."""

    def __init__(self, fleet: Mapping[WorkerId, Member], pace_seconds: float) -> None:
        self._fleet = fleet
        self._pace = pace_seconds
        self._whole = True
        """The next update is a snapshot."""
        self._changed: set[WorkerId] = set()
        self._closed = False
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()

    def note(self, worker: WorkerId, *, urgent: bool) -> None:
        """The worker is not as it was."""
        self._changed.add(worker)
        if len(self._changed) > MAX_CHANGED:
            self._changed.clear()
            self._whole = True
        self._news.set()
        if urgent:
            self._urgent.set()

    def close(self) -> None:
        """End `updates` with Draining."""
        self._closed = True
        self._news.set()
        self._urgent.set()

    def take(self) -> FleetUpdate:
        """All news since the last call; the first time, the whole fleet."""
        whole, changed = self._whole, sorted(self._changed)
        self._whole = False
        self._changed.clear()
        self._news.clear()
        self._urgent.clear()
        if whole:
            return FleetUpdate(workers=tuple(member.info() for member in self._fleet.values()), snapshot=True)
        return FleetUpdate(
            workers=tuple(self._fleet[worker].info() for worker in changed if worker in self._fleet),
            gone=tuple(worker for worker in changed if worker not in self._fleet),
        )

    async def updates(self) -> AsyncGenerator[FleetUpdate]:
        """A snapshot, then changes. Raises Draining when the manager leaves."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            yield self.take()
            told_at = loop.time()
            await self._news.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(told_at + self._pace):
                    await self._urgent.wait()
        raise Draining("this cache manager leaves")


class FleetFeed:
    """All subscriptions."""

    def __init__(self, fleet: Mapping[WorkerId, Member], pace_seconds: float = PACE_SECONDS) -> None:
        self._fleet = fleet
        self._pace = pace_seconds
        self._subscriptions: set[Subscription] = set()
        self._closed = False

    def subscribe(self) -> Subscription:
        """A new subscription, which has ended if the feed has. Give it back to `unsubscribe`."""
        subscription = Subscription(self._fleet, self._pace)
        if self._closed:
            subscription.close()
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a subscription."""
        self._subscriptions.discard(subscription)

    def note(self, worker: WorkerId, *, urgent: bool) -> None:
        """Tell every subscriber that a worker came, left or changed."""
        for subscription in self._subscriptions:
            subscription.note(worker, urgent=urgent)

    def close(self) -> None:
        """End every subscription, those to come as well. What is not told by then never is."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()
