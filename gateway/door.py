"""The waiting line of one gateway: the rules of `gateway.core.admission`, with requests that really wait.

Invariant: a place is given back on every way out, and whoever is next gets it at once.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.core.admission import Admission, Ticket, Wish
from octavo.errors import OctavoError, QueueFull


class Room(Protocol):
    """Room for one request at some worker."""

    def take(self) -> bool:
        """Take it if there is any now."""
        ...

    def give_back(self) -> None:
        """Let others have it; saying so again changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Wait:
    turn: asyncio.Future[bool]
    """Whether it was let in."""
    room: Room


class Door:
    """Lets so many requests in at once, each when its turn has come."""

    def __init__(
        self, *, max_running: int, max_waiting: int, max_wait_seconds: float, clock: Callable[[], float]
    ) -> None:
        """Let `max_running` in and `max_waiting` wait, none of them longer than `max_wait_seconds`."""
        self._admission = Admission(max_running=max_running, max_waiting=max_waiting)
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._tickets = itertools.count()
        self._waits: dict[Ticket, _Wait] = {}
        self._closed_by: OctavoError | None = None

    @property
    def running(self) -> int:
        """Requests that are in."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._admission.waiting

    def close(self, reason: OctavoError) -> None:
        """Nobody waits any more: those who do, and whoever comes, end with `reason`."""
        self._closed_by = reason
        for wait in self._waits.values():
            if not wait.turn.done():
                wait.turn.set_exception(reason)

    def look(self) -> None:
        """There may be room at some worker now."""
        if self.waiting:
            self._take_turns()

    @asynccontextmanager
    async def place(
        self, wish: Wish, room: Room, refusal: Callable[[str], OctavoError] = QueueFull
    ) -> AsyncGenerator[None]:
        """Wait for a place here and room at a worker, and hold the place.

        Args:
            wish: when it must end is the client's deadline; the door's own bound comes on top.
            room: at some worker; taken when the request is let in, given back with the place if not before.
            refusal: what a wait ends with that took too long; it is told how long that was.

        Raises:
            QueueFull: too many wait, or this one would wait too long.
            OctavoError: this one waited too long, or the door was closed.
            TimeoutError: the deadline passed.
        """
        ticket = Ticket(next(self._tickets))
        try:
            await self._turn_of(ticket, wish, room, refusal)
            yield
        finally:
            self._waits.pop(ticket, None)
            room.give_back()
            self._admission.leave(ticket, self._clock())
            self._take_turns()

    async def _turn_of(self, ticket: Ticket, wish: Wish, room: Room, refusal: Callable[[str], OctavoError]) -> None:
        if self._closed_by is not None:
            raise self._closed_by
        entered = self._clock()
        expires = min(wish.expires, entered + self._max_wait_seconds)
        self._admission.enter(ticket, replace(wish, expires=expires), entered)
        wait = self._waits[ticket] = _Wait(asyncio.get_running_loop().create_future(), room)
        self._take_turns()
        try:
            async with asyncio.timeout(expires - entered):
                admitted = await wait.turn
        except TimeoutError:
            admitted = False
        if not admitted:
            waited = f"waited {self._clock() - entered:.1f} s while {self.running} requests ran"
            raise TimeoutError(waited) if expires == wish.expires else refusal(waited)

    def _take_turns(self) -> None:
        turn = self._admission.turn(self._clock(), lambda ticket: self._waits[ticket].room.take())
        for tickets, admitted in ((turn.admitted, True), (turn.expired, False)):
            for ticket in tickets:
                future = self._waits[ticket].turn
                if not future.done():  # its request may have been cancelled in this very moment
                    future.set_result(admitted)
