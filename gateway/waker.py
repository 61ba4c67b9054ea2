"""Lets those go on who wait for news, a few in each turn of the event loop.

A step of a worker has news for all of its requests at once. Were they all woken at once, the next step's would be read
when the last of them had its turn: a gateway that is asked for more than it can relay one by one would fall behind
for ever. As it is, news is read on between turns, and whoever waits longer for a turn finds several tokens, which cost
hardly more than one. So the busier the gateway, the more tokens a message has; an idle one delays nothing.
"""

import asyncio
from itertools import islice
from typing import Protocol

WAKES = 4
"""A turn. Each is followed by the sending of a message, which takes some 40 us, and a turn reads one step of a worker:
so of a gateway that cannot keep up, this is how few messages a step becomes. With 32, 64 streams were told 1.5 tokens a
message where they asked for twenty times what a core can send; with 4, up to 7."""


class Sleeper(Protocol):
    """Whoever waits for news."""

    def go_on(self) -> None:
        """Its turn has come."""
        ...


class Waker:
    """For one event loop. First come, first served."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._due: dict[Sleeper, None] = {}

    def wake(self, sleeper: Sleeper) -> None:
        """Let it go on when its turn comes."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._turn)
        self._due[sleeper] = None

    def _turn(self) -> None:
        for sleeper in [*islice(self._due, WAKES)]:
            del self._due[sleeper]
            sleeper.go_on()
        if self._due:
            asyncio.get_running_loop().call_soon(self._turn)
