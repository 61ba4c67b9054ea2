"""Errors <-> gRPC status: one table, the server's side and the client's side of it.

The class name travels as trailing metadata `octavo-reason`, so a client gets the very class that the server raised,
and `retry-after-ms` with it where asking again may help.
Anything that is not an `OctavoError` is a bug: it is logged once with its traceback and leaves as INTERNAL.
A message that does not parse never reaches a servicer: it becomes `InvalidRequest`, which names the field at fault
where that can be told.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from octavo import errors
from octavo.transport import same_kind

log = logging.getLogger("octavo.status")

REASON_KEY = "octavo-reason"

RETRY_AFTER_KEY = "retry-after-ms"
"""Milliseconds after which it may be worth asking again; there where the error says so."""

MAX_MESSAGE_CHARACTERS = 500
"""Of an error. It travels in a trailer that gRPC drops, and the status with it, from 8 KiB on; a character may take 12
bytes there. Messages show what the caller sent, which may be megabytes."""

_FIELDS_LOOKED_AT = 10_000
"""Of a message that does not parse. One of megabytes may have millions, and nobody else is answered meanwhile."""

Context = Any
"""grpc.aio.ServicerContext, which is generic for type checkers and not when it runs."""

STATUS_OF: dict[type[errors.OctavoError], grpc.StatusCode] = {
    errors.OctavoError: grpc.StatusCode.INTERNAL,  # a peer's failure, or a class that this version does not know
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnknownSequence: grpc.StatusCode.NOT_FOUND,
    errors.UnknownWorker: grpc.StatusCode.NOT_FOUND,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.NoWorker: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PoolExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Superseded: grpc.StatusCode.ABORTED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
}
_CLASS_OF = {cls.__name__: cls for cls in STATUS_OF}


def error_named(reason: str, message: str) -> errors.OctavoError:
    """The error of that class name; a name this version does not know becomes a plain `OctavoError`."""
    return _CLASS_OF.get(reason, errors.OctavoError)(message)


def error_from(error: grpc.RpcError) -> errors.OctavoError | None:
    """The error that a server raised, or None where the RPC failed for another reason (a lost peer, a deadline)."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return None
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    trailers = {key: str(value) for key, value in metadata}
    if REASON_KEY not in trailers:
        return None
    raised = error_named(trailers[REASON_KEY], error.details() or "")
    milliseconds = trailers.get(RETRY_AFTER_KEY, "")
    if milliseconds.isascii() and milliseconds.isdigit():
        raised.retry_after_seconds = int(milliseconds) / 1000
    return raised


@contextlib.contextmanager
def translated() -> Generator[None]:
    """Turn an RPC's failure back into the error that the server raised; other failures pass unchanged."""
    try:
        yield
    except grpc.RpcError as failure:
        if (error := error_from(failure)) is not None:
            raise error from failure
        raise


# ---- the server's side ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands in for a message that did not parse."""

    problem: str


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call with the status of whatever its servicer raised."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of the call, whichever of the four kinds it is."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return handler
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        end_with_status = _streaming if handler.response_streaming else _answering
        # A stream's messages are parsed within its handler, where an error ends the call as any other does.
        parse = _parse_or_refuse if handler.request_streaming else _parse_or_describe
        return same_kind(handler)(
            end_with_status(behavior, handler_call_details.method),
            parse(handler.request_deserializer),
            handler.response_serializer,
        )


def _answering(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def answer(request: Any, context: Context) -> Any:
        try:
            reply = behavior(_well_formed(request), context)
            return await reply if inspect.isawaitable(reply) else reply
        except asyncio.CancelledError as error:
            await _abort_unasked(context, error, method)
        except Exception as error:
            await _abort(context, error, method)

    return answer


def _streaming(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(behavior):  # writes by itself
        return _answering(behavior, method)

    async def stream(request: Any, context: Context) -> None:
        try:
            async with contextlib.aclosing(behavior(_well_formed(request), context)) as replies:
                async for reply in replies:
                    await context.write(reply)
        except asyncio.CancelledError as error:
            await _abort_unasked(context, error, method)
        except Exception as error:
            await _abort(context, error, method)

    return stream


async def _abort_unasked(context: Context, error: asyncio.CancelledError, method: str) -> None:
    """End a call that was cancelled: gRPC cancels its task when the client leaves, and then nobody is told anything.

    Where it did not, something that the servicer waited for was cancelled under it. gRPC would end the call without a
    status, and a client that has cancelled nothing would see CANCELLED; it is a bug of ours as any other.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    await _abort(context, error, method)


async def _abort(context: Context, error: BaseException, method: str) -> None:
    """End the call with the error's status. Always raises."""
    try:
        await _tell(context, error, method)
    except grpc.aio.InternalError as gone:  # the client's deadline passed in this moment: nobody is left to be told
        raise asyncio.CancelledError from gone


async def _tell(context: Context, error: BaseException, method: str) -> None:
    """As `_abort`, while there is a client."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError | grpc.aio.InternalError):
        raise error
    if isinstance(error, errors.OctavoError):
        await context.abort(STATUS_OF[type(error)], shortened(str(error)), _trailers_of(error))
    log.error("call_failed", exc_info=error, extra={"method": method})
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__} in {method}; see the server's log")


def _trailers_of(error: errors.OctavoError) -> tuple[tuple[str, str], ...]:
    """What a client needs to raise the same error."""
    reason = (REASON_KEY, type(error).__name__)
    seconds = error.retry_after_seconds
    return (reason,) if seconds is None else (reason, (RETRY_AFTER_KEY, str(ceil(1000 * seconds))))


def shortened(message: str) -> str:
    """A message that a trailer can carry: of a longer one, its beginning and its end."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    gap = f" … {len(message)} characters in all … "
    kept = MAX_MESSAGE_CHARACTERS - len(gap)
    return message[: kept - kept // 2] + gap + message[-(kept // 2) :]


def _well_formed(request: Any) -> Any:
    """A call's one request, or the stream of them."""
    if isinstance(request, _Malformed):
        raise errors.InvalidRequest(request.problem)
    return request


def _parse_or_refuse(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None
    message = getattr(parse, "__self__", None)

    def parse_or_refuse(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError as error:
            raise errors.InvalidRequest(_problem(raw, message)) from error

    return parse_or_refuse


def _parse_or_describe(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """For a call's one request, which gRPC parses before the handler is called, where no error of ours may come up."""
    refusing = _parse_or_refuse(parse)
    if refusing is None:
        return None

    def parse_or_describe(raw: bytes) -> Any:
        try:
            return refusing(raw)
        except errors.InvalidRequest as refusal:
            return _Malformed(str(refusal))

    return parse_or_describe


def _problem(raw: bytes, message: Any) -> str:
    """What is wrong with bytes that do not parse as `message` (its class, if known)."""
    if message is None:
        return f"message of {len(raw)} bytes does not parse"
    descriptor: Descriptor = message.DESCRIPTOR
    field = _broken_text(raw, descriptor, "", iter(range(_FIELDS_LOOKED_AT)))
    return field or f"{descriptor.full_name}: message of {len(raw)} bytes does not parse"


def _broken_text(raw: bytes, descriptor: Descriptor, path: str, turns: Iterator[int]) -> str | None:
    """The first string field that is not UTF-8, as "path: why", or None if none is found in so many turns."""
    for number, content in _fields(raw):
        if next(turns, None) is None:
            return None
        field: FieldDescriptor | None = descriptor.fields_by_number.get(number)
        if field is None or content is None:
            continue
        name = f"{path}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                content.decode()
            except UnicodeDecodeError as error:
                return f"{name}: not UTF-8 at byte {error.start} of {len(content)}"
        elif (part := field.message_type) is not None and (problem := _broken_text(content, part, f"{name}.", turns)):
            return problem
    return None


def _fields(raw: bytes) -> Iterator[tuple[int, bytes | None]]:
    """(number, content) of a message's fields, as far as they can be told apart; a number's content is None."""
    at = 0
    with contextlib.suppress(IndexError):  # the message ends within a number
        while at < len(raw):
            tag, at = _varint(raw, at)
            content = None
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(raw, at)
                    content, at = raw[at : at + size], at + size
                case 5:
                    at += 4
                case _:  # a group, which proto3 has not
                    return
            if at <= len(raw):
                yield tag >> 3, content


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises IndexError when there is none that ends in time."""
    value = shift = 0
    while raw[at] & 0x80:
        value |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift >= 70:
            raise IndexError("a number of more than ten bytes")
    return value | raw[at] << shift, at + 1
