"""Errors over real gRPC, for all four kinds of call: the class that a servicer raises is the one a client gets."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from octavo import errors
from octavo.errors import InvalidRequest, OctavoError
from octavo.status import (
    MAX_MESSAGE_CHARACTERS,
    REASON_KEY,
    STATUS_OF,
    StatusInterceptor,
    error_from,
    error_named,
    translated,
)
from octavo.v1 import cache_manager_pb2 as v1

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
MESSAGE = "wanted 3 blocks, 1 available"


def subclasses(cls: type[OctavoError]) -> Iterator[type[OctavoError]]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def raise_named(name: str) -> None:
    """What the servicer below does: any error of ours by its name, or one of Python's.

    CancelledError is what a servicer gets that waits for something which is cancelled; nobody cancels the call.
    """
    if name.startswith("echo "):
        raise InvalidRequest(name)
    if name in vars(errors):
        raise error_named(name, MESSAGE)
    bugs = {"KeyError": KeyError, "AssertionError": AssertionError, "CancelledError": asyncio.CancelledError}
    raise bugs[name]("a secret of the server")


async def unary_unary(request: v1.AuditRequest, _: Any) -> v1.AuditReply:
    raise_named(request.worker_id)
    return v1.AuditReply()


async def unary_stream(request: v1.AuditRequest, _: Any) -> AsyncGenerator[v1.AuditReply]:
    yield v1.AuditReply()
    raise_named(request.worker_id)


async def stream_unary(requests: AsyncIterator[v1.AuditRequest], _: Any) -> v1.AuditReply:
    async for request in requests:
        raise_named(request.worker_id)
    return v1.AuditReply()


async def stream_stream(requests: AsyncIterator[v1.AuditRequest], _: Any) -> AsyncGenerator[v1.AuditReply]:
    async for request in requests:
        yield v1.AuditReply()
        raise_named(request.worker_id)


async def never(request: v1.AuditRequest, _: Any) -> v1.AuditReply:
    await asyncio.Event().wait()
    return v1.AuditReply()


async def late(request: v1.AuditRequest, context: Any) -> v1.AuditReply:
    """Is told at its client's deadline, and says why it failed then."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if request.worker_id == "by itself":
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, MESSAGE)
        raise_named(request.worker_id)
    return v1.AuditReply()


def handler(kind: str, behavior: Callable[..., Any], message: Any = v1.AuditRequest) -> Any:
    build = getattr(grpc, f"{kind}_rpc_method_handler")
    return build(behavior, request_deserializer=message.FromString, response_serializer=v1.AuditReply.SerializeToString)


@pytest.fixture
async def channel() -> AsyncGenerator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[StatusInterceptor()])
    behaviors = {"unary_unary": unary_unary, "unary_stream": unary_stream}
    behaviors |= {"stream_unary": stream_unary, "stream_stream": stream_stream}
    methods = {kind: handler(kind, behavior) for kind, behavior in behaviors.items()}
    methods["nested"] = handler("unary_unary", unary_unary, v1.AttendRequest)
    methods["never"] = handler("unary_unary", never)
    methods["late"] = handler("unary_unary", late)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def call(channel: grpc.aio.Channel, kind: str, raw: bytes, *, method: str | None = None) -> None:
    """One call with the bytes of one message, read to its end."""
    made = getattr(channel, kind)(f"/test/{method or kind}")

    async def requests() -> AsyncGenerator[bytes]:
        yield raw

    result = made(requests() if kind.startswith("stream") else raw, timeout=20)
    if kind.endswith("stream"):
        async for _ in result:
            pass
    else:
        await result


def asking_for(name: str) -> bytes:
    return v1.AuditRequest(worker_id=name).SerializeToString()


def test_every_error_has_its_status() -> None:
    assert set(STATUS_OF) == {OctavoError, *subclasses(OctavoError)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", STATUS_OF, ids=lambda cls: cls.__name__)
async def test_the_class_and_the_message_arrive(channel: grpc.aio.Channel, kind: str, error: type[OctavoError]) -> None:
    with pytest.raises(error) as raised, translated():
        await call(channel, kind, asking_for(error.__name__))
    assert (type(raised.value), str(raised.value)) == (error, MESSAGE)
    status = raised.value.__cause__
    assert isinstance(status, grpc.aio.AioRpcError)
    assert status.code() is STATUS_OF[error]
    assert (REASON_KEY, error.__name__) in tuple(status.trailing_metadata())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bug", ["KeyError", "AssertionError", "CancelledError"])
async def test_a_bug_is_internal_and_logged_once_with_its_traceback(
    channel: grpc.aio.Channel, kind: str, bug: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised, translated():
        await call(channel, kind, asking_for(bug))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert raised.value.details() == f"{bug} in /test/{kind}; see the server's log"
    (line,) = [entry for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert (line.getMessage(), vars(line)["method"]) == ("call_failed", f"/test/{kind}")
    assert line.exc_info is not None
    assert line.exc_info[0] is not None
    assert line.exc_info[0].__name__ == bug


@pytest.mark.parametrize("kind", KINDS)
async def test_a_text_that_is_not_utf8_is_refused_by_its_field(channel: grpc.aio.Channel, kind: str) -> None:
    broken = asking_for("wxyz").replace(b"wxyz", b"wx\xff\xfe")
    with pytest.raises(InvalidRequest, match=r"^worker_id: not UTF-8 at byte 2 of 4$"), translated():
        await call(channel, kind, broken)


async def test_the_field_s_name_is_the_path_to_it(channel: grpc.aio.Channel) -> None:
    message = v1.AttendRequest(register=v1.Register(worker_id="w"))
    message.register.pool.model = "wxyz"
    broken = message.SerializeToString().replace(b"wxyz", b"\xffxyz")
    with pytest.raises(InvalidRequest, match=r"^register\.pool\.model: not UTF-8 at byte 0 of 4$"), translated():
        await call(channel, "unary_unary", broken, method="nested")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("character", ["x", "é", "\U0001f600"])
async def test_a_message_of_any_length_arrives_with_its_status(
    channel: grpc.aio.Channel, kind: str, character: str
) -> None:
    """gRPC would put RESOURCE_EXHAUSTED and words of its own in the place of a status with so long a message."""
    message = f"echo {character * 1_000_000} end"
    with pytest.raises(InvalidRequest) as raised, translated():
        await call(channel, kind, asking_for(message))
    told = str(raised.value)
    assert len(told) == MAX_MESSAGE_CHARACTERS
    assert (told[:9], told[-5:]) == (message[:9], message[-5:])
    assert "1000009 characters in all" in told


async def test_a_broken_text_is_found_behind_fields_of_every_kind(channel: grpc.aio.Channel) -> None:
    """A varint, 8 bytes, 4 bytes and a string that this version of the schema does not know."""
    unknown = b"\x78\xff\x01" + b"\x79" + b"8" * 8 + b"\x7d" + b"4" * 4 + b"\x7a\x02ab"
    with pytest.raises(InvalidRequest, match=r"^worker_id: not UTF-8 at byte 0 of 1$"), translated():
        await call(channel, "unary_unary", unknown + b"\x0a\x01\xff")


@pytest.mark.parametrize("filler", [b"\x78\x01", b"\x0a\x00"], ids=["unknown fields", "known fields"])
async def test_nobody_counts_the_fields_of_a_message_without_end(channel: grpc.aio.Channel, filler: bytes) -> None:
    """Its fault stands where looking for it would hold everybody else up."""
    raw = filler * 1_000_000 + b"\x0a\x01\xff"
    with (
        pytest.raises(InvalidRequest, match=rf"message of {len(raw)} bytes does not parse$"),
        translated(),
    ):
        await call(channel, "unary_unary", raw)


@pytest.mark.parametrize("raw", [b"\xff" * 1_000_000, b"\x0b" * 1_000, b"\x0a", b"\x08\x80", b"\x09\x00"])
async def test_bytes_that_make_no_fields_are_refused(channel: grpc.aio.Channel, raw: bytes) -> None:
    with (
        pytest.raises(InvalidRequest, match=rf"message of {len(raw)} bytes does not parse$"),
        translated(),
    ):
        await call(channel, "unary_unary", raw)


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_are_no_message_are_refused_with_their_size(channel: grpc.aio.Channel, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"AuditRequest: message of 3 bytes does not parse$"), translated():
        await call(channel, kind, b"\x0a\x7fw")


async def test_a_deadline_stays_what_it_is(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised, translated():
        await channel.unary_unary("/test/never")(asking_for("w"), timeout=0.01)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("name", ["NoWorker", "by itself"])
async def test_what_comes_as_the_client_leaves_is_no_trouble(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary("/test/late")(asking_for(name), timeout=0.01)
    with pytest.raises(InvalidRequest), translated():  # whatever that one did is over when the next is answered
        await call(channel, "unary_unary", asking_for("echo after it"))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_stream_to_whom_has_just_left_ends_as_one_that_was_cancelled() -> None:
    """Where gRPC cannot send any more and has not yet heard why: once in some thousand calls that run out of time."""

    class Gone:
        async def write(self, _: v1.AuditReply) -> None:
            raise grpc.aio.InternalError

    async def served(_: grpc.HandlerCallDetails) -> Any:
        return handler("unary_stream", unary_stream)

    details: Any = SimpleNamespace(method="/test/unary_stream")
    stream = (await StatusInterceptor().intercept_service(served, details)).unary_stream
    with pytest.raises(asyncio.CancelledError):
        await stream(v1.AuditRequest(worker_id="KeyError"), Gone())


async def test_an_unknown_method_stays_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised, translated():
        await call(channel, "unary_unary", b"", method="nothing")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_peer_that_is_not_there_is_no_error_of_ours() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised, translated():
            await call(channel, "unary_unary", b"")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_an_error_that_this_version_does_not_know_is_still_ours() -> None:
    error = error_named("FromTheFuture", "why")
    assert (type(error), str(error)) == (OctavoError, "why")


def test_an_rpc_error_without_a_call_says_nothing() -> None:
    assert error_from(grpc.RpcError()) is None
