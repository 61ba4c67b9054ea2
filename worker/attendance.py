"""Which cache manager a worker attends: one of a list, the next one when that one fails.

    await attendance.join(registration, inventory)   until one has taken the worker in
    grant = await attendance.exchange(exchange)      until that raises ManagerLost; then join again

A worker begins with a manager that its id picks, so that a fleet spreads over the managers. One that leaves or cannot
be reached is given up for the next; one that only says that the epoch is over is asked again first. After each round
through the list there is a pause of 100 to 500 ms, drawn anew and short at first, so that workers come back soon and,
when that takes longer, not in step.

A worker that attends another manager than its own goes back when its own one is there again, and has been for a while:
else one restart after another of the managers would leave all workers with one of them. It brings its books along, as
when a manager leaves, and nothing is computed again.

The lease: the manager wants to hear from the worker before it runs out (`renewal_in`). When it has run out, the manager
has given the worker up, and so may have the gateways (`is_cut_off`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Protocol

from octavo.errors import Draining, OctavoError, StaleEpoch, Superseded
from octavo.ids import NO_EPOCH, CacheEpoch, WorkerId
from octavo.records.attend import Exchange, Grant, Inventory, Registration
from octavo.telemetry import Outage
from worker.cache_client import CacheClient

log = logging.getLogger("octavo.worker.attendance")

_LEAST_PAUSE_SECONDS = 0.1
_PAUSE_SPREAD_SECONDS = 0.4
_SPREADING_TRIES = 8
"""Until pauses differ as far as they may: a manager that is started again is there in less than a second."""

_LOOK_HOME_SECONDS = 30.0
"""Between two looks whether the worker's own manager is there again, give or take a half."""
_LOOKS_UNTIL_HOME = 2
"""In a row that find it there: one that fails often is not gone back to."""

Draw = Callable[[], float]
"""A random number in [0, 1)."""


class Holder(Protocol):
    """What knows the pool that the worker comes with."""

    @property
    def cache_epoch(self) -> CacheEpoch:
        """Under which its blocks are published, as it was told last."""
        ...

    def inventory(self) -> Sequence[Inventory]:
        """What the pool holds; no part if that is nothing."""
        ...

    def joined(self, cache_epoch: CacheEpoch) -> None:
        """A manager has opened books for it, and publishes under this cache epoch."""
        ...


class ManagerLost(Exception):
    """The worker has to join again."""

    def __init__(self, why: str, *, books_in_doubt: bool = False, by_choice: bool = False) -> None:
        """Say why.

        Args:
            why: in words.
            books_in_doubt: the manager and the worker disagree, so the worker must not go on from what it knows.
            by_choice: the manager is there; the worker's own one is there again as well.
        """
        super().__init__(why)
        self.books_in_doubt = books_in_doubt
        self.by_choice = by_choice


class InventoryRefused(Exception):
    """A manager will not open books again as the worker tells; it may take the worker with an empty pool."""


class Attendance:
    """The managers, and the registration with one of them."""

    def __init__(self, managers: Sequence[CacheClient], draw: Draw) -> None:
        assert managers, "managers: 0, wanted at least 1"
        self._managers = managers
        self._draw = draw
        self._outage = Outage()
        self._at: int | None = None
        self._own: int | None = None
        self._looking_home: asyncio.Task[None] | None = None
        self._own_is_back = False
        self._left: int | None = None
        """Where the worker comes from that goes back to its own manager: it leaves when another one has taken it in."""
        self._goes_by_choice = False
        self._first_epoch = NO_EPOCH
        self._lease_seconds = 1.0
        self._lease_ends: float | None = None
        self._renew_at: float | None = None
        self._ended: Callable[[], None] = lambda: None
        self.epoch = NO_EPOCH
        """The last that was given."""
        self.step = 0
        """Of the last exchange in it."""

    @property
    def renewal_in(self) -> float | None:
        """Seconds until an exchange must be made to keep the lease, 0 if it is time; None while nobody is attended."""
        return None if self._renew_at is None else max(0.0, self._renew_at - _now())

    @property
    def is_cut_off(self) -> bool:
        """Whether a lease was held and has run out."""
        return self._renew_at is None and self._lease_ends is not None and self._lease_ends <= _now()

    async def join(self, registration: Registration, holder: Holder, ended: Callable[[], None]) -> None:
        """Return when a manager has taken the worker in.

        `holder` is asked at each try anew. `ended` is called when the stream ends, though nobody has asked anything:
        then it is time for an exchange, which says why.

        Raises:
            InventoryRefused: a manager refused what the worker told.
            Superseded: another process has taken this worker's place.
            OctavoError: a manager will not have this worker at all.
        """
        tries = 0
        if self._at is None:
            self._at = self._own = _pick(registration.worker_id, len(self._managers))
        self._ended = ended
        await self._look_no_more()
        while not await self._try(registration, holder):
            tries += 1
            self._give_up()
            rounds, left = divmod(tries, len(self._managers))
            if not left:
                spread = _PAUSE_SPREAD_SECONDS * min(1.0, rounds / _SPREADING_TRIES)
                await asyncio.sleep(_LEAST_PAUSE_SECONDS + spread * self._draw())

    async def _try(self, registration: Registration, holder: Holder) -> bool:
        """Whether the manager whose turn it is has taken the worker in."""
        ours = replace(
            registration, first_epoch=self._first_epoch, last_epoch=self.epoch, cache_epoch=holder.cache_epoch
        )
        inventory, asked_at = holder.inventory(), _now()
        by_choice, self._goes_by_choice = self._goes_by_choice, False
        try:
            registered = await self._manager.register(ours, inventory)
        except (ConnectionError, StaleEpoch, Draining) as error:
            self._outage.away(log, "manager_not_joined", manager=self._at, reason=str(error))
            return False
        except OctavoError as error:
            if by_choice and not isinstance(error, Superseded):
                log.warning("own_manager_refused", extra={"manager": self._at, "reason": str(error)})
                self._own = self._left  # it stays where it was taken in
                return False
            if inventory and not isinstance(error, Superseded):
                raise InventoryRefused(str(error)) from error
            raise
        self.epoch, self.step = registered.epoch, 0
        holder.joined(registered.cache_epoch)
        self._first_epoch = self._first_epoch or registered.epoch
        self._lease_seconds = registered.lease_seconds
        self._heard(asked_at)
        self._manager.when_ended(self._hurry)
        if self._left is not None and self._left != self._at:
            self._managers[self._left].leave()
        self._left = None
        if self._at != self._own:
            self._looking_home = asyncio.create_task(self._look_home())
        self._outage.back(log, "manager_joined", manager=self._at)
        log.info(
            "registered",
            extra={
                "epoch": self.epoch,
                "lease_seconds": self._lease_seconds,
                "cache_epoch": registered.cache_epoch,
                "inventory_parts": len(inventory),
            },
        )
        return True

    async def exchange(self, exchange: Exchange) -> Grant:
        """Make the next exchange. Raises ManagerLost when the worker must join again."""
        if self._own_is_back and not exchange.draining:
            raise self._goes_home()
        self.step, asked_at = exchange.step, _now()
        try:
            grant = await self._manager.exchange(exchange)
        except (ConnectionError, Draining) as error:
            raise self._lost(str(error), give_up=True) from error
        except StaleEpoch as error:
            raise self._lost(str(error), give_up=False) from error
        except OctavoError as error:  # a bug in one of the two
            log.error("exchange_refused", exc_info=error, extra={"epoch": exchange.epoch, "step": exchange.step})
            raise self._lost(f"it refuses step {exchange.step}", give_up=False, books_in_doubt=True) from error
        self._heard(asked_at)
        return grant

    async def close(self) -> None:
        """Leave."""
        await self._look_no_more()
        for manager in self._managers:
            await manager.close()

    @property
    def _manager(self) -> CacheClient:
        assert self._at is not None, "join first"
        return self._managers[self._at]

    # ---- back to its own manager -----------------------------------------------------------------------------

    async def _look_home(self) -> None:
        """Return when the worker's own manager has been there for a while."""
        assert self._own is not None, "join first"
        seen = 0
        while seen < _LOOKS_UNTIL_HOME:
            await asyncio.sleep(_LOOK_HOME_SECONDS * (0.5 + self._draw()))
            seen = seen + 1 if await self._managers[self._own].is_there() else 0
        self._own_is_back = True

    async def _look_no_more(self) -> None:
        self._own_is_back = False
        if self._looking_home is not None:
            self._looking_home.cancel()
            await asyncio.wait({self._looking_home})
            self._looking_home = None

    def _goes_home(self) -> ManagerLost:
        log.info("goes_back_to_its_manager", extra={"epoch": self.epoch, "manager": self._own, "left": self._at})
        self._left, self._at, self._goes_by_choice = self._at, self._own, True
        self._renew_at = None
        return ManagerLost("its own manager is there again", by_choice=True)

    def _heard(self, asked_at: float) -> None:
        """The manager has heard the worker, not before this moment."""
        self._lease_ends = asked_at + self._lease_seconds
        self._renew_at = asked_at + self._lease_seconds / 3

    def _hurry(self) -> None:
        if self._renew_at is not None:
            self._renew_at = _now()
            self._ended()

    def _lost(self, why: str, *, give_up: bool, books_in_doubt: bool = False) -> ManagerLost:
        log.warning("manager_lost", extra={"epoch": self.epoch, "manager": self._at, "reason": why})
        self._renew_at = None
        if give_up:
            self._give_up()
        return ManagerLost(why, books_in_doubt=books_in_doubt)

    def _give_up(self) -> None:
        """The next one's turn."""
        assert self._at is not None, "join first"
        self._at = (self._at + 1) % len(self._managers)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _pick(worker: WorkerId, managers: int) -> int:
    """A manager for a worker. A checksum would not do: those of worker-0, worker-1, ... are all even, or all odd."""
    return int.from_bytes(sha256(worker.encode()).digest()[:8], "little") % managers
