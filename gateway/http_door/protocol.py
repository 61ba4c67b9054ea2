"""uvicorn's HTTP/1.1, with the bounds that it lacks.

uvicorn keeps what it gets of a request's head (its first line and its headers) for as long as it comes, and waits for
it without end; so it does with the trailers behind a body that comes in chunks. Here both have a size and a time, and
what is none or too much is told as every other refusal is.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http_door.errors import problem_of_status

HEAD_BYTES = 1 << 16
"""Four times what nginx takes. One that comes in a single piece with its end is read even if it is longer."""

HEAD_SECONDS = 30.0
"""From the connection's beginning, or the first byte."""


class BoundedHttp(HttpToolsProtocol):
    """One connection.

    Invariant: a timer runs whenever a head is awaited and no request is there: this one from the connection's
    beginning and from a head's first byte on, uvicorn's own between an answer and the next head.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **kwargs)
        self._in_head = True
        """Or in trailers, or in the length of a chunk."""
        self._head_bytes = 0
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, but not in a head that is too long."""
        if self._in_head:  # else it may be the rest of a body, all but a little of it
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._await_head()
        if self._head_bytes > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: more than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """A body follows, or the end of the request."""
        self._end_head()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """If it is the last chunk's, trailers follow."""
        self._in_head = True

    def on_body(self, body: bytes) -> None:
        """A piece."""
        self._end_head()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What follows is another request's head."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """For bytes that are no HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _await_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_SECONDS, self.shutdown)  # which lets an answer be finished

    def _end_head(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Close, and say why unless that would stand within another answer: there is no request to be answered yet."""
        if getattr(self.cycle, "response_complete", True):  # there is no cycle before the first request
            body = to_json(problem_of_status(status, message).body)
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
