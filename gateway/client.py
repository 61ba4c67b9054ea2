"""The Python client: ask a gateway for text, whole or as it grows.

    async with AsyncClient("127.0.0.1:8500") as client:
        answer = await client.complete("The capital of France is")
        print(answer.text, answer.usage.cached_tokens)

A string is short for `Generation(prompt=TextPrompt(string))`. Errors come back as the classes of `octavo.errors` that
the gateway raised; besides them, TimeoutError when the deadline passed and ConnectionError when there is no gateway.
A call that is refused for the moment, or finds no gateway, is made again (`gateway.core.retries`).

    with Client("127.0.0.1:8500") as client:                       # the same without asyncio
        for event in client.generate(Generation(prompt=TextPrompt("Once"), temperature=0.8, max_tokens=50)):
            if isinstance(event, Delta):
                print(event.text, end="")
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TextPrompt, TokenPrompt
from gateway.core.retries import MAY_PASS, SOME, Retries
from octavo.errors import InvalidRequest, OctavoError
from octavo.ids import WorkerId
from octavo.records import FinishReason, TokenLogprobs
from octavo.service import open_blocking_channel, open_channel
from octavo.status import error_from, error_named
from octavo.tenants import credentials
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from octavo.wire.generate import index_state_from_wire
from octavo.wire.serve import beam_to_wire, finish_reason_from_wire


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that some worker serves now."""

    name: str
    max_model_tokens: int
    """Longest sequence, prompt and output together, that the largest of its workers takes."""
    workers: int


Ended = OctavoError | TimeoutError
"""What a request of a batch ended with instead of its usage."""

_DEADLINE_EXCEEDED = 4
"""gRPC's number."""


class _Tries:
    """Of one call: how many there may still be, and how much time is left."""

    def __init__(self, retries: Retries, timeout_seconds: float | None) -> None:
        self._retries = retries
        self._ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._made = 0

    @property
    def seconds_left(self) -> float | None:
        """None: as many as it takes."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def pause_after(self, failure: Exception) -> float:
        """Seconds until the next try. Raises the failure where none may follow."""
        self._made += 1
        asked = failure.retry_after_seconds if isinstance(failure, OctavoError) else None
        pause = self._retries.pause(self._made, random.random(), asked)
        left = self.seconds_left
        if pause is None or (left is not None and pause >= left):
            raise failure
        return pause


class AsyncClient:
    """A connection to one gateway, for asyncio. Any number of requests may share it."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        transport: Transport = PLAINTEXT,
        retries: Retries = SOME,
    ) -> None:
        """Talk to the gateway at `address` (host:port); it is reached at the first request.

        Args:
            address: host:port.
            api_key: shown with every request, where the gateway knows its tenants by their keys.
            transport: has the authorities that are believed where the gateway is served over TLS.
            retries: how often a call is made again that was refused for the moment, or found no gateway, before any
                part of its answer came, always within its `timeout_seconds`; `NEVER` for not at all.

        Raises:
            Unauthenticated: no key has such characters.
        """
        self._address = address
        self._metadata = credentials(api_key)
        self._retries = retries
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
        replies = self._read(self._stub.Generate, generation_to_wire(request), timeout_seconds)
        async with aclosing(replies):
            async for reply in replies:
                yield event_from_wire(reply)

    async def complete(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Completion:
        """The whole answer. Raises what `generate` raises."""
        events = self.generate(_read_whole(request), timeout_seconds=timeout_seconds)
        return _completion([event async for event in events])

    async def generate_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[tuple[int, Event | Ended]]:
        """Several requests in one call: (which, its next event) as they come, of each in the order of `generate`.

        A request that fails has the error as its last item, is not asked again, and leaves the others alone. When the
        time is up, each that has not ended has a TimeoutError, or the call raises one.

        Raises:
            InvalidRequest: there are more requests than the gateway takes in one call, or none.
            OctavoError, TimeoutError, ConnectionError: the call failed as a whole, as with `generate`.
        """
        replies = self._read(self._stub.GenerateBatch, _batch_to_wire(requests), timeout_seconds)
        async with aclosing(replies):
            async for reply in replies:
                yield reply.index, _outcome_from_wire(reply)

    async def complete_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> tuple[Completion | Ended, ...]:
        """The whole answers, in the order of the requests; of one that failed its error. Raises as `generate_batch`."""
        events = self.generate_batch([*map(_read_whole, requests)], timeout_seconds=timeout_seconds)
        return _completions(len(requests), [event async for event in events])

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt | str, *, model: str = "", timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """The token ids of a text or a conversation. Raises what `generate` raises."""
        reply = await self._ask(self._stub.Tokenize, _tokenize_to_wire(prompt, model), timeout_seconds)
        return tuple(reply.ids)

    async def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        show_special_tokens: bool = False,
        timeout_seconds: float | None = None,
    ) -> str:
        """The text of token ids, special tokens left out unless asked for. Raises what `generate` raises."""
        message = _detokenize_to_wire(ids, model, show_special_tokens=show_special_tokens)
        return (await self._ask(self._stub.Detokenize, message, timeout_seconds)).text

    async def models(self, *, timeout_seconds: float | None = None) -> tuple[Model, ...]:
        """The models that some worker serves now, by name. Raises what `generate` raises."""
        reply = await self._ask(self._stub.ListModels, gateway_v1.ListModelsRequest(), timeout_seconds)
        return tuple(map(_model_from_wire, reply.models))

    async def _read(
        self, method: Callable[..., Any], message: Any, timeout_seconds: float | None
    ) -> AsyncGenerator[Any]:
        """The replies of a call, made again while it fails for the moment and nothing has come."""
        tries = _Tries(self._retries, timeout_seconds)
        while True:
            begun = False
            try:
                with _failures_of(self._address):
                    call = method(message, timeout=tries.seconds_left, metadata=self._metadata)
                    try:
                        async for reply in call:
                            begun = True
                            yield reply
                        return
                    finally:
                        call.cancel()
            except MAY_PASS as failure:
                if begun:
                    raise
                pause = tries.pause_after(failure)
            await asyncio.sleep(pause)

    async def _ask(self, method: Callable[..., Any], message: Any, timeout_seconds: float | None) -> Any:
        """The reply of a call, made again while it fails for the moment."""
        tries = _Tries(self._retries, timeout_seconds)
        while True:
            try:
                with _failures_of(self._address):
                    return await method(message, timeout=tries.seconds_left, metadata=self._metadata)
            except MAY_PASS as failure:
                pause = tries.pause_after(failure)
            await asyncio.sleep(pause)


class Client:
    """A connection to one gateway, without asyncio. Any number of threads may share it."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        transport: Transport = PLAINTEXT,
        retries: Retries = SOME,
    ) -> None:
        """See AsyncClient."""
        self._address = address
        self._metadata = credentials(api_key)
        self._retries = retries
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
        with closing(self._read(self._stub.Generate, generation_to_wire(request), timeout_seconds)) as replies:
            for reply in replies:
                yield event_from_wire(reply)

    def complete(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Completion:
        """The whole answer. Raises what `generate` raises."""
        return _completion(self.generate(_read_whole(request), timeout_seconds=timeout_seconds))

    def generate_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> Generator[tuple[int, Event | Ended]]:
        """See AsyncClient.generate_batch."""
        with closing(self._read(self._stub.GenerateBatch, _batch_to_wire(requests), timeout_seconds)) as replies:
            for reply in replies:
                yield reply.index, _outcome_from_wire(reply)

    def complete_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> tuple[Completion | Ended, ...]:
        """See AsyncClient.complete_batch."""
        events = self.generate_batch([*map(_read_whole, requests)], timeout_seconds=timeout_seconds)
        return _completions(len(requests), events)

    def tokenize(
        self, prompt: TextPrompt | ChatPrompt | str, *, model: str = "", timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """See AsyncClient.tokenize."""
        return tuple(self._ask(self._stub.Tokenize, _tokenize_to_wire(prompt, model), timeout_seconds).ids)

    def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        show_special_tokens: bool = False,
        timeout_seconds: float | None = None,
    ) -> str:
        """See AsyncClient.detokenize."""
        message = _detokenize_to_wire(ids, model, show_special_tokens=show_special_tokens)
        return self._ask(self._stub.Detokenize, message, timeout_seconds).text

    def models(self, *, timeout_seconds: float | None = None) -> tuple[Model, ...]:
        """See AsyncClient.models."""
        reply = self._ask(self._stub.ListModels, gateway_v1.ListModelsRequest(), timeout_seconds)
        return tuple(map(_model_from_wire, reply.models))

    def _read(self, method: Callable[..., Any], message: Any, timeout_seconds: float | None) -> Generator[Any]:
        """See AsyncClient._read."""
        tries = _Tries(self._retries, timeout_seconds)
        while True:
            begun = False
            try:
                with _failures_of(self._address):
                    call = method(message, timeout=tries.seconds_left, metadata=self._metadata)
                    try:
                        for reply in call:
                            begun = True
                            yield reply
                        return
                    finally:
                        call.cancel()
            except MAY_PASS as failure:
                if begun:
                    raise
                pause = tries.pause_after(failure)
            time.sleep(pause)

    def _ask(self, method: Callable[..., Any], message: Any, timeout_seconds: float | None) -> Any:
        """See AsyncClient._ask."""
        tries = _Tries(self._retries, timeout_seconds)
        while True:
            try:
                with _failures_of(self._address):
                    return method(message, timeout=tries.seconds_left, metadata=self._metadata)
            except MAY_PASS as failure:
                pause = tries.pause_after(failure)
            time.sleep(pause)


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
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:  # a server that ends cancels what is left
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


def _completions(requests: int, outcomes: Iterable[tuple[int, Event | Ended]]) -> tuple[Completion | Ended, ...]:
    """What each request of a batch came to."""
    events: list[list[Event]] = [[] for _ in range(requests)]
    failed: dict[int, Ended] = {}
    for at, outcome in outcomes:
        if isinstance(outcome, Exception):
            failed[at] = outcome
        else:
            events[at].append(outcome)
    return tuple(failed.get(at) or _completion(heard) for at, heard in enumerate(events))


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
    with _sendable():
        return _message_of(_generation(request))


def _generation(request: Generation | str) -> Generation:
    return Generation(prompt=TextPrompt(request)) if isinstance(request, str) else request


def _read_whole(request: Generation | str) -> Generation:
    return _generation(request).read_whole()


@contextmanager
def _sendable() -> Generator[None]:
    """Tell what a message cannot hold as the gateway would tell it."""
    try:
        yield
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
        priority=request.priority,
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
        stream_interval=request.stream_interval or 0,
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


def _batch_to_wire(requests: Sequence[Generation | str]) -> gateway_v1.GenerateBatchRequest:
    return gateway_v1.GenerateBatchRequest(requests=map(generation_to_wire, requests))


def _tokenize_to_wire(prompt: TextPrompt | ChatPrompt | str, model: str) -> gateway_v1.TokenizeRequest:
    with _sendable():
        match prompt:
            case ChatPrompt(messages, tools):
                chat = gateway_v1.Chat(messages=map(_turn_to_wire, messages), tools=tools)
                return gateway_v1.TokenizeRequest(model=model, chat=chat)
            case TextPrompt(text) | str(text):
                return gateway_v1.TokenizeRequest(model=model, text=text)


def _detokenize_to_wire(ids: Sequence[int], model: str, *, show_special_tokens: bool) -> gateway_v1.DetokenizeRequest:
    with _sendable():
        return gateway_v1.DetokenizeRequest(model=model, ids=ids, show_special_tokens=show_special_tokens)


def _outcome_from_wire(reply: gateway_v1.GenerateBatchReply) -> Event | Ended:
    """What a reply tells of a request of a batch."""
    if reply.HasField("reply"):
        return event_from_wire(reply.reply)
    failure = reply.failure
    if not failure.reason and failure.code == _DEADLINE_EXCEEDED:
        return TimeoutError(failure.message)
    error = error_named(failure.reason, failure.message)
    if failure.HasField("retry_after_seconds"):
        error.retry_after_seconds = failure.retry_after_seconds
    return error


def _model_from_wire(model: gateway_v1.Model) -> Model:
    return Model(name=model.name, max_model_tokens=model.max_model_tokens, workers=model.workers)


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
