"""A client that leaves takes its work along: before the answer begins, while it streams, and while it is awaited."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves. The request's body has been read.

    Raises:
        ClientLeft: it did.
        RuntimeError: something cancelled `work` from within, which is a bug and no client's leaving.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        if task.cancelled():
            raise RuntimeError("what the request waited for was cancelled, and not by us")
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, one a piece; `source` is closed when the client has all of them, or has left."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes], source: AsyncGenerator[Any]) -> None:
        """Send `pieces`, which are made from what `source` gives."""
        super().__init__(pieces, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; Starlette cancels the stream when the client leaves."""
        async with aclosing(self._source):
            await super().__call__(scope, receive, send)
