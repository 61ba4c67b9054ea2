"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")
Failure = TypeVar("Failure", bound=Exception)

READ_AHEAD = 64
"""Items of all streams together that wait for the reader; the streams stand still meanwhile."""


async def merged(
    streams: Sequence[AsyncGenerator[Item]], failures: tuple[type[Failure], ...]
) -> AsyncGenerator[tuple[int, Item | Failure]]:
    """Yield (place of the stream, its next item) as items come; closing this closes every stream.

    A stream that raises one of `failures` ends with it as its last item, and the others go on. Any other exception
    ends them all.
    """
    ready: asyncio.Queue[tuple[int, Item | Failure] | Exception | None] = asyncio.Queue(READ_AHEAD)

    async def follow(at: int, stream: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await ready.put((at, item))
        except failures as failure:
            await ready.put((at, failure))
        except Exception as error:
            await ready.put(error)
        await ready.put(None)

    tasks = [asyncio.create_task(follow(at, stream)) for at, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            match await ready.get():
                case None:
                    left -= 1
                case Exception() as error:
                    raise error
                case found:
                    yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
