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
    ends them all; so does RuntimeError, where something is cancelled that a stream waits for.
    """
    ready: asyncio.Queue[tuple[int, Item | Failure] | Exception | None] = asyncio.Queue(READ_AHEAD)

    async def follow(at: int, stream: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(_read(stream)) as items:
                async for item in items:
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


async def _read(stream: AsyncGenerator[Item]) -> AsyncGenerator[Item]:
    """A stream, closed at its end, in a task of its own: whoever reads that would wait on if it ended as cancelled.

    Raises RuntimeError where the stream says that it was, and nobody has cancelled the task.
    """
    try:
        async with aclosing(stream):
            async for item in stream:
                yield item
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("what a stream waited for was cancelled, and not by its reader") from error
