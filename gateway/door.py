"""The waiting line of one gateway: the rules of `gateway.core.admission`, with requests that really wait.

Invariant: a place is given back on every way out, and whoever is next gets it at once.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from gateway.core.admission import Admission, Ticket
from octavo.errors import OctavoError, QueueFull


class Door:
    """Lets so many requests in at once, oldest first."""

    def __init__(
        self, *, max_running: int, max_waiting: int, max_wait_seconds: float, clock: Callable[[], float]
    ) -> None:
        """Let `max_running` in and `max_waiting` wait, none of them longer than `max_wait_seconds`."""
        self._admission = Admission(max_running=max_running, max_waiting=max_waiting)
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._tickets = itertools.count()
        self._turns: dict[Ticket, asyncio.Future[bool]] = {}
        self._left = asyncio.Event()

    @property
    def running(self) -> int:
        """Requests that are in."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._admission.waiting

    async def until_empty(self, seconds: float) -> bool:
        """Return when nobody is in and nobody waits, or after so many seconds; whether it is so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.running or self.waiting:
                    self._left.clear()
                    await self._left.wait()
        return not (self.running or self.waiting)

    def refuse_waiting(self, reason: OctavoError) -> None:
        """End every wait with an error; nobody is let in by it."""
        for future in self._turns.values():
            if not future.done():
                future.set_exception(reason)

    @asynccontextmanager
    async def place(self, deadline: float) -> AsyncGenerator[None]:
        """Wait for a place and hold it.

        Raises:
            QueueFull: too many wait, or this one waited too long.
            TimeoutError: the deadline passed.
        """
        ticket = Ticket(next(self._tickets))
        try:
            await self._turn_of(ticket, deadline)
            yield
        finally:
            self._turns.pop(ticket, None)
            self._admission.leave(ticket)
            self._take_turns()
            self._left.set()

    async def _turn_of(self, ticket: Ticket, deadline: float) -> None:
        entered = self._clock()
        expires = min(deadline, entered + self._max_wait_seconds)
        self._admission.enter(ticket, expires=expires)
        self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._take_turns()
        try:
            async with asyncio.timeout(expires - entered):
                admitted = await self._turns[ticket]
        except TimeoutError:
            admitted = False
        if not admitted:
            waited = f"waited {self._clock() - entered:.1f} s while {self.running} requests ran"
            raise TimeoutError(waited) if expires == deadline else QueueFull(waited)

    def _take_turns(self) -> None:
        turn = self._admission.turn(self._clock())
        for tickets, admitted in ((turn.admitted, True), (turn.expired, False)):
            for ticket in tickets:
                future = self._turns[ticket]
                if not future.done():  # its request may have been cancelled in this very moment
                    future.set_result(admitted)
