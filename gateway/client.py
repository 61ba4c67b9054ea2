"""The Python client: ask a gateway for text, whole or as it grows.

    async with AsyncClient("127.0.0.1:8500") as client:
        answer = await client.complete("The capital of France is")
        print(answer.text, answer.usage.cached_tokens)

A string is short for `Generation(prompt=TextPrompt(string))`. Errors come back as the classes of `octavo.errors` that
the gateway raised; besides them, TimeoutError when the deadline passed and ConnectionError when there is no gateway.
`Client` does the same without asyncio.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TextPrompt, TokenPrompt
from octavo.errors import InvalidRequest
from octavo.ids import WorkerId
from octavo.records import FinishReason, TokenLogprobs
from octavo.service import open_blocking_channel, open_channel
from octavo.status import error_from
from octavo.tenants import credentials
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from octavo.wire import beam_to_wire, finish_reason_from_wire, index_state_from_wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, where they were asked for."""
    cumulative_logprob: float | None = None
    """Of its tokens together, where logprobs, best_of or beam were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request's outputs and its bill."""

    samples: tuple[Sample, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's second token and those behind it, where they were asked for."""

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.samples[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """One a sample."""
        return tuple(sample.text for sample in self.samples)


class AsyncClient:
    """A connection to one gateway, for asyncio. Any number of requests may share it."""

    def __init__(self, address: str, *, api_key: str | None = None, transport: Transport = PLAINTEXT) -> None:
        """Talk to the gateway at `address` (host:port); it is reached at the first request.

        `api_key` is shown with every request, where the gateway knows its tenants by their keys. `transport` has the
        authorities that are believed where the gateway is served over TLS.

        Raises:
            Unauthenticated: no key has such characters.
        """
        self._address = address
        self._metadata = credentials(api_key)
        self._channel = open_channel(address, transport)
        self._stub = gateway_v1_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs, and close the connection."""
        await self._channel.close()

    async def generate(
        self, request: Generation | str, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event]:
        """Started, PromptLogprobs if asked for, Deltas and one Finished per sample, then Usage, each as it is said.

        Leaving the loop early needs `contextlib.aclosing` around the generator to cancel the request at once.

        Raises:
            OctavoError: as the gateway raised it, InvalidRequest for example.
            TimeoutError: the answer was not whole after `timeout_seconds`.
            ConnectionError: the gateway cannot be reached, or went away.
        """
        with _failures_of(self._address):
            call = self._stub.Generate(generation_to_wire(request), timeout=timeout_seconds, metadata=self._metadata)
            try:
                async for reply in call:
                    yield event_from_wire(reply)
            finally:
                call.cancel()

    async def complete(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Completion:
        """The whole answer. Raises what `generate` raises."""
        return _completion([event async for event in self.generate(request, timeout_seconds=timeout_seconds)])


class Client:
    """A connection to one gateway, without asyncio. Any number of threads may share it."""

    def __init__(self, address: str, *, api_key: str | None = None, transport: Transport = PLAINTEXT) -> None:
        """See AsyncClient."""
        self._address = address
        self._metadata = credentials(api_key)
        self._channel = open_blocking_channel(address, transport)
        self._stub = gateway_v1_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs, and close the connection."""
        self._channel.close()

    def generate(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Generator[Event]:
        """See AsyncClient.generate; leaving the loop early cancels the request when the generator is closed."""
        with _failures_of(self._address):
            call = self._stub.Generate(generation_to_wire(request), timeout=timeout_seconds, metadata=self._metadata)
            try:
                for reply in call:
                    yield event_from_wire(reply)
            finally:
                call.cancel()

    def complete(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Completion:
        """The whole answer. Raises what `generate` raises."""
        return _completion(self.generate(request, timeout_seconds=timeout_seconds))


@contextmanager
def _failures_of(address: str) -> Generator[None]:
    """Turn an RPC's failure into the gateway's own error, or into the built-in one that says what happened."""
    try:
        yield
    except grpc.RpcError as failure:
        if (error := error_from(failure)) is not None:
            raise error from failure
        match failure.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"gateway {address}: {failure.details()}") from failure
            case grpc.StatusCode.UNAVAILABLE:
                raise ConnectionError(f"gateway {address}: {failure.details()}") from failure
            case _:
                raise


def _completion(events: Iterable[Event]) -> Completion:
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    ends: dict[int, Finished] = {}
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage | None = None
    for event in events:
        match event:
            case PromptLogprobs():
                prompt_logprobs = event.tokens
            case Delta():
                deltas[event.sample].append(event)
            case Finished():
                ends[event.sample] = event
            case Usage():
                usage = event
            case Started():
                pass
    assert usage is not None, "the gateway ended a request without its usage"
    samples = tuple(_sample(deltas[at], ends[at]) for at in sorted(ends))
    return Completion(samples=samples, usage=usage, prompt_logprobs=prompt_logprobs)


def _sample(deltas: list[Delta], end: Finished) -> Sample:
    return Sample(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=end.reason,
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        cumulative_logprob=end.cumulative_logprob,
    )


# ---- values <-> protobuf -------------------------------------------------------------------------------------


def generation_to_wire(request: Generation | str) -> gateway_v1.GenerateRequest:
    """The request as a message; what is None stays unset.

    Raises:
        InvalidRequest: a number is out of its field's range, or a text holds half a character.
    """
    if isinstance(request, str):
        request = Generation(prompt=TextPrompt(request))
    try:
        return _message_of(request)
    except ValueError as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error


def _message_of(request: Generation) -> gateway_v1.GenerateRequest:
    message = gateway_v1.GenerateRequest(
        model=request.model,
        max_tokens=request.max_tokens,
        n=request.samples,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        cache_salt=request.cache_salt,
        retain_seconds=request.retain_seconds,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        best_of=request.best_of or 0,
        beam=beam_to_wire(request.beam),
    )
    match request.prompt:
        case TextPrompt(text):
            message.text = text
        case ChatPrompt(messages, tools):
            message.chat.CopyFrom(gateway_v1.Chat(messages=map(_turn_to_wire, messages), tools=tools))
        case TokenPrompt(ids):
            message.tokens.CopyFrom(gateway_v1.TokenIds(ids=ids))
        case None:
            pass
    return message


def _turn_to_wire(turn: ChatMessage) -> gateway_v1.ChatMessage:
    return gateway_v1.ChatMessage(
        role=turn.role,
        content=turn.content,
        tool_calls=turn.tool_calls,
        tool_call_id=turn.tool_call_id,
        name=turn.name,
    )


def event_from_wire(reply: gateway_v1.GenerateReply) -> Event:
    """A reply as a value."""
    match reply.WhichOneof("kind"):
        case "started":
            return Started(
                request_id=reply.started.request_id,
                worker_id=WorkerId(reply.started.worker_id),
                prompt_tokens=reply.started.prompt_tokens,
                predicted_cached_tokens=reply.started.predicted_cached_tokens,
                index_state=index_state_from_wire(reply.started.index_state),
            )
        case "prompt_logprobs":
            return PromptLogprobs(_logprobs_from_wire(reply.prompt_logprobs.tokens))
        case "delta":
            return Delta(
                reply.delta.sample,
                reply.delta.text,
                tuple(reply.delta.token_ids),
                _logprobs_from_wire(reply.delta.logprobs),
            )
        case "finished":
            return Finished(
                reply.finished.sample,
                finish_reason_from_wire(reply.finished.reason),
                reply.finished.cumulative_logprob if reply.finished.HasField("cumulative_logprob") else None,
            )
        case "usage":
            return Usage(
                prompt_tokens=reply.usage.prompt_tokens,
                cached_tokens=reply.usage.cached_tokens,
                output_tokens=reply.usage.output_tokens,
                worker_id=WorkerId(reply.usage.worker_id),
                time_to_first_token_seconds=reply.usage.time_to_first_token_seconds,
                total_seconds=reply.usage.total_seconds,
                carried_over=reply.usage.carried_over,
            )
        case None:
            raise ValueError("the gateway sent a reply of a kind that this client does not know")


def _logprobs_from_wire(tokens: Iterable[gateway_v1.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token.logprob, tuple((likely.token_id, likely.logprob) for likely in token.top))
        for token in tokens
    )
