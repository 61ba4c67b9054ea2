"""What a connection to the HTTP door may send before there is a request, and between requests."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http_door import protocol
from gateway.http_door.server import HttpServer
from tests.support.fake_fleet import PATIENCE_SECONDS

BODY = b"x" * (4 * protocol.HEAD_BYTES)
WITH_BODY = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
IN_CHUNKS = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + 40 * (
    b"1000\r\n" + 4096 * b"x" + b"\r\n"
)
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
GOOD = b"HTTP/1.1 200 OK"


async def count_body(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    answer = str(size).encode()
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


@pytest.fixture
async def port() -> AsyncGenerator[int]:
    server = HttpServer("127.0.0.1:0", count_body)
    serving = asyncio.create_task(server.serve())
    yield server.port
    await server.stop(0)
    await serving


@asynccontextmanager
async def connection(port: int) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def refusal_of(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    """(status line, error), and then the end."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)["error"]


async def answer_from(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """(status line, size of the body that was sent)."""
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
    return head.partition(b"\r\n")[0], int(await reader.readexactly(int(length.partition(b": ")[2])))


@pytest.mark.parametrize(
    "beginning",
    [b"GET /", b"GET / HTTP/1.1\r\nx: ", IN_CHUNKS + b"0\r\nx: ", WITH_BODY + b"GET / HTTP/1.1\r\nx: "],
    ids=["a path", "a header", "a trailer", "a header behind a body"],
)
async def test_what_is_said_before_a_request_is_whole_has_a_size(beginning: bytes, port: int) -> None:
    async with connection(port) as (reader, writer):
        writer.write(beginning)
        with suppress(ConnectionError):  # it is refused before all of it was sent
            for _ in range(64):
                writer.write(b"x" * protocol.HEAD_BYTES)
                await writer.drain()
            await reader.read()
        assert reader.at_eof() or reader.exception() is not None


async def test_a_head_that_is_too_long_is_refused_by_its_size(port: int) -> None:
    async with connection(port) as (reader, writer):
        writer.write(REQUEST[:-2] + b"x: ")
        await writer.drain()
        writer.write(b"x" * (protocol.HEAD_BYTES + 1))
        status, error = await refusal_of(reader)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert error["message"] == "headers: more than 65536 bytes"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HTT", REQUEST[:-2]])
async def test_a_head_that_does_not_become_whole_ends_with_its_connection(
    sent: bytes, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.01)
    async with connection(port) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""


async def test_what_is_no_http_is_told_so_as_all_else(port: int) -> None:
    async with connection(port) as (reader, writer):
        writer.write(b"\x16\x03\x01 no such thing\r\n\r\n")
        status, error = await refusal_of(reader)
    assert status == b"HTTP/1.1 400 Bad Request"
    assert error == {
        "message": "Invalid HTTP request received.",
        "type": "invalid_request_error",
        "param": None,
        "code": "bad_request",
    }


async def test_bodies_of_any_size_and_many_requests_are_no_head(port: int) -> None:
    async with connection(port) as (reader, writer):
        for request, size in 3 * ((WITH_BODY, len(BODY)), (IN_CHUNKS + b"0\r\n\r\n", 40 * 4096), (REQUEST, 0)):
            writer.write(request)
            assert await answer_from(reader) == (GOOD, size)
        writer.write(REQUEST * 5000)  # all at once: together they are longer than one head may be
        for _ in range(5000):
            assert await answer_from(reader) == (GOOD, 0)
