"""The events of several requests as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.core.events import Event

_AHEAD = 64
"""Events that wait until somebody takes them; then the requests wait."""


async def together(requests: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[tuple[int, Event]]:
    """(number of the request, event) as they come. Closing it, or the first failure, ends all of them."""
    if len(requests) == 1:
        async with aclosing(requests[0]) as events:
            async for event in events:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(_AHEAD)
    tasks = [asyncio.create_task(_pass_on(number, events, ready)) for number, events in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    number: int, events: AsyncGenerator[Event], ready: "asyncio.Queue[tuple[int, Event] | Exception | None]"
) -> None:
    try:
        async with aclosing(events):
            async for event in events:
                await ready.put((number, event))
        await ready.put(None)
    except Exception as error:
        await ready.put(error)
