"""Lets those go on who wait for news, a few in each turn of the event loop.

A step of a worker has news for all of its requests at once. Were they all woken at once, the next step's would be read
when the last of them had its turn: a gateway that is asked for more than it can relay one by one would fall behind
for ever. As it is, news is read on between turns, and whoever waits longer for a turn finds several tokens, which cost
hardly more than one. So the busier the gateway, the more tokens a message has; an idle one delays nothing.
"""

import asyncio
from itertools import islice

WAKES = 32
"""A turn. Each is followed by the sending of a message, which takes some 50 us."""


class Waker:
    """For one event loop. First come, first served."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._due: dict[asyncio.Event, None] = {}

    def wake(self, waiting: asyncio.Event) -> None:
        """Set the event, when its turn comes."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._turn)
        self._due[waiting] = None

    def _turn(self) -> None:
        for waiting in [*islice(self._due, WAKES)]:
            del self._due[waiting]
            waiting.set()
        if self._due:
            asyncio.get_running_loop().call_soon(self._turn)
