"""Values <-> the messages of octavo.v1.Inference, the client's side."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.client.values import Ended, Explanation, FleetState, GatewayLoad, Model, WorkerExplanation
from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TextPrompt, TokenPrompt
from gateway.core.routing import Cost
from octavo.errors import InvalidRequest
from octavo.ids import WorkerId
from octavo.records.serve import TokenLogprobs
from octavo.status import error_named
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.wire.fleet import worker_from_wire
from octavo.wire.generate import index_state_from_wire
from octavo.wire.insight import explanation_from_wire as prompt_explanation_from_wire
from octavo.wire.serve import beam_to_wire, finish_reason_from_wire

_DEADLINE_EXCEEDED = 4
"""gRPC's number."""


def generation_to_wire(request: Generation | str) -> gateway_v1.GenerateRequest:
    """The request as a message; what is None stays unset.

    Raises:
        InvalidRequest: a number is out of its field's range, a text holds half a character, or the prompt is no Prompt.
    """
    return _message_of(_generation(request))


def _generation(request: Generation | str) -> Generation:
    return Generation(prompt=TextPrompt(request)) if isinstance(request, str) else request


def read_whole(request: Generation | str) -> Generation:
    """A request whose answer nobody reads before it is whole."""
    return _generation(request).read_whole()


@contextmanager
def _sendable(field: str) -> Generator[None]:
    """Tell what a message cannot hold as the gateway would tell it."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"{field}: cannot be sent: {error}") from error


def _message_of(request: Generation) -> gateway_v1.GenerateRequest:
    message = _filled(
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
    with _sendable("prompt"):
        match request.prompt:
            case TextPrompt(text):
                message.text = text
            case ChatPrompt(messages, tools):
                message.chat.CopyFrom(gateway_v1.Chat(messages=map(_turn_to_wire, messages), tools=tools))
            case TokenPrompt(ids):
                message.tokens.CopyFrom(gateway_v1.TokenIds(ids=ids))
            case None:
                pass
            case _:  # from a caller whose types nobody checks
                given = type(request.prompt).__name__
                raise InvalidRequest(f"prompt: of type {given}, wanted TextPrompt, ChatPrompt or TokenPrompt")
    return message


def _filled(**fields: Any) -> gateway_v1.GenerateRequest:
    """A message with these fields; an error names the first that it cannot hold, which protobuf does not tell."""
    try:
        return gateway_v1.GenerateRequest(**fields)
    except ValueError:
        for name, value in fields.items():
            with _sendable(name):
                gateway_v1.GenerateRequest(**{name: value})
        raise


def _turn_to_wire(turn: ChatMessage) -> gateway_v1.ChatMessage:
    return gateway_v1.ChatMessage(
        role=turn.role,
        content=turn.content,
        tool_calls=turn.tool_calls,
        tool_call_id=turn.tool_call_id,
        name=turn.name,
    )


def batch_to_wire(requests: Sequence[Generation | str]) -> gateway_v1.GenerateBatchRequest:
    """Several requests as one message. Raises InvalidRequest."""
    return gateway_v1.GenerateBatchRequest(requests=map(generation_to_wire, requests))


def tokenize_to_wire(prompt: TextPrompt | ChatPrompt | str, model: str) -> gateway_v1.TokenizeRequest:
    """Raises InvalidRequest: the text holds half a character."""
    with _sendable("prompt"):
        match prompt:
            case ChatPrompt(messages, tools):
                chat = gateway_v1.Chat(messages=map(_turn_to_wire, messages), tools=tools)
                return gateway_v1.TokenizeRequest(model=model, chat=chat)
            case TextPrompt(text) | str(text):
                return gateway_v1.TokenizeRequest(model=model, text=text)


def detokenize_to_wire(ids: Sequence[int], model: str, *, show_special_tokens: bool) -> gateway_v1.DetokenizeRequest:
    """Raises InvalidRequest: an id is out of range."""
    with _sendable("ids"):
        return gateway_v1.DetokenizeRequest(model=model, ids=ids, show_special_tokens=show_special_tokens)


def outcome_from_wire(reply: gateway_v1.GenerateBatchReply) -> Event | Ended:
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


def model_from_wire(model: gateway_v1.Model) -> Model:
    """A model as a value."""
    return Model(name=model.name, max_model_tokens=model.max_model_tokens, workers=model.workers)


def explain_to_wire(request: Generation | str) -> gateway_v1.ExplainRequest:
    """Raises InvalidRequest, as `generation_to_wire`."""
    return gateway_v1.ExplainRequest(request=generation_to_wire(request))


def explanation_from_wire(reply: gateway_v1.ExplainReply) -> Explanation:
    """What the workers have of a prompt, as a value."""
    return Explanation(
        prompt_tokens=reply.prompt_tokens,
        workers=tuple(map(_worker_explanation_from_wire, reply.workers)),
        chosen=WorkerId(reply.chosen) if reply.chosen else None,
        index_state=index_state_from_wire(reply.index_state),
    )


def _worker_explanation_from_wire(worker: gateway_v1.WorkerExplanation) -> WorkerExplanation:
    return WorkerExplanation(
        worker_id=WorkerId(worker.worker_id),
        cache=prompt_explanation_from_wire(worker.cache) if worker.HasField("cache") else None,
        predicted_cached_tokens=worker.predicted_cached_tokens,
        cost=_cost_from_wire(worker.cost) if worker.HasField("cost") else None,
    )


def _cost_from_wire(cost: gateway_v1.RoutingCost) -> Cost:
    return Cost(
        prefill_tokens=cost.prefill,
        queued_tokens=cost.queued,
        others_tokens=cost.others,
        decode_tokens=cost.decode,
        memory_tokens=cost.memory,
    )


def fleet_from_wire(reply: gateway_v1.GetFleetReply) -> FleetState:
    """The fleet as a value."""
    load = reply.gateway
    return FleetState(
        workers=tuple(map(worker_from_wire, reply.workers)),
        gateway=GatewayLoad(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            requests=load.requests,
            refused=load.refused,
            predicted_cached_tokens=load.predicted_cached_tokens,
            delivered_cached_tokens=load.delivered_cached_tokens,
            index_state=index_state_from_wire(load.index_state),
            failed_lookups=load.failed_lookups,
            undelivered_cached_tokens=load.undelivered_cached_tokens,
        ),
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
                predicted_cached_tokens=reply.usage.predicted_cached_tokens,
            )
        case None:
            raise ValueError("the gateway sent a reply of a kind that this client does not know")


def _logprobs_from_wire(tokens: Iterable[gateway_v1.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token.logprob, tuple((likely.token_id, likely.logprob) for likely in token.top))
        for token in tokens
    )
