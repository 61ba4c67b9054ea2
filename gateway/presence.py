"""Who is here, and when the last of them has left."""

import asyncio
from contextlib import suppress


class Presence:
    """Counts those who are within its `with`."""

    def __init__(self) -> None:
        """Nobody is here."""
        self._count = 0
        self._left = asyncio.Event()

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *failure: object) -> None:
        self._count -= 1
        self._left.set()

    async def until_empty(self, seconds: float) -> bool:
        """Return when nobody is here, or after so many seconds; whether it is so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._count:
                    self._left.clear()
                    await self._left.wait()
        return not self._count
