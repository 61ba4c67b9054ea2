"""The gRPC front door: protobuf in, the dispatcher's events out as protobuf. No decision is made here."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, Prompt, TextPrompt, TokenPrompt
from gateway.core.routing import Candidate
from gateway.dispatcher import Dispatcher
from gateway.explainer import PromptExplainer
from gateway.tenancy import Tenancy
from octavo.errors import InvalidRequest, OctavoError
from octavo.records.serve import TokenLogprobs
from octavo.status import STATUS_OF, Context, shortened
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from octavo.wire.fleet import worker_to_wire
from octavo.wire.generate import index_state_to_wire
from octavo.wire.insight import explanation_to_wire
from octavo.wire.serve import beam_from_wire, finish_reason_to_wire

MAX_REPLY_BYTES = 4 << 20
"""Of an answer that is as long as its caller makes it: what gRPC's clients take where nobody tells them otherwise."""

PROMPT_LOGPROBS_A_MESSAGE = 8192
"""Tokens. Each takes up to 270 bytes, with 20 of the likeliest in its place."""

Reply = TypeVar("Reply", bound=Message)

SERVICE_NAME = gateway_v1.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceServicer(gateway_v1_grpc.InferenceServicer):
    """octavo.v1.Inference."""

    def __init__(self, dispatcher: Dispatcher, tenancy: Tenancy, explainer: PromptExplainer) -> None:
        """Answer those whom `tenancy` knows with what `dispatcher` and `explainer` say."""
        self._dispatcher = dispatcher
        self._tenancy = tenancy
        self._explainer = explainer

    async def Generate(
        self, request: gateway_v1.GenerateRequest, context: Context
    ) -> AsyncGenerator[gateway_v1.GenerateReply]:
        """Serve one request. gRPC cancels this task when the client leaves or its deadline passes."""
        account = self._tenancy.account(context.invocation_metadata())
        events = self._dispatcher.generate(generation_from_wire(request), context.time_remaining(), account)
        try:
            async with aclosing(events):
                async for event in events:
                    for part in parts_of(event):
                        yield event_to_wire(part)
        except TimeoutError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    async def GenerateBatch(
        self, request: gateway_v1.GenerateBatchRequest, context: Context
    ) -> AsyncGenerator[gateway_v1.GenerateBatchReply]:
        """Serve several requests side by side."""
        account = self._tenancy.account(context.invocation_metadata())
        requests = [generation_from_wire(each) for each in request.requests]
        events = self._dispatcher.generate_each(requests, context.time_remaining(), account)
        async with aclosing(events):
            async for at, event in events:
                if isinstance(event, Exception):
                    yield gateway_v1.GenerateBatchReply(index=at, failure=failure_to_wire(event))
                else:
                    for part in parts_of(event):
                        yield gateway_v1.GenerateBatchReply(index=at, reply=event_to_wire(part))

    async def Tokenize(self, request: gateway_v1.TokenizeRequest, context: Context) -> gateway_v1.TokenizeReply:
        """Text or a conversation as token ids."""
        self._tenancy.account(context.invocation_metadata())
        ids = await self._dispatcher.tokens(_prompt_from_wire(request), request.model)
        field = request.WhichOneof("prompt")
        return _that_fits(gateway_v1.TokenizeReply(ids=ids), f"prompt.{field}: {len(ids)} tokens")

    async def Detokenize(self, request: gateway_v1.DetokenizeRequest, context: Context) -> gateway_v1.DetokenizeReply:
        """Token ids as text."""
        self._tenancy.account(context.invocation_metadata())
        text = await self._dispatcher.text(request.ids, request.model, special_tokens=request.show_special_tokens)
        return _that_fits(gateway_v1.DetokenizeReply(text=text), f"ids: {len(request.ids)} tokens")

    async def ListModels(self, request: gateway_v1.ListModelsRequest, context: Context) -> gateway_v1.ListModelsReply:
        """The models that some worker serves now."""
        self._tenancy.account(context.invocation_metadata())
        return gateway_v1.ListModelsReply(
            models=[
                gateway_v1.Model(name=model.name, max_model_tokens=model.max_model_tokens, workers=model.workers)
                for model in self._dispatcher.models()
            ]
        )

    async def Explain(self, request: gateway_v1.ExplainRequest, context: Context) -> gateway_v1.ExplainReply:
        """What the workers have of a prompt, under the keys of whoever asks, and where it would go."""
        account = self._tenancy.account(context.invocation_metadata())
        job, workers, judged = await self._dispatcher.examine(generation_from_wire(request.request), account)
        wanted = job.submission
        found = await self._explainer.explain([info.worker_id for info in workers], wanted.prompt, wanted.scope)
        candidates = () if judged is None else judged.choice.candidates
        explained = {each.standing.info.worker_id: candidate_to_wire(each) for each in candidates}
        for worker, explanation in found.items():
            one = explained.setdefault(worker, gateway_v1.WorkerExplanation(worker_id=worker))
            one.cache.CopyFrom(explanation_to_wire(explanation))
        reply = gateway_v1.ExplainReply(prompt_tokens=len(wanted.prompt), workers=explained.values())
        if judged is not None:
            reply.chosen = judged.choice.chosen.standing.info.worker_id
            reply.index_state = index_state_to_wire(judged.index_state)
        return reply

    async def GetFleet(self, request: gateway_v1.GetFleetRequest, context: Context) -> gateway_v1.GetFleetReply:
        """The fleet and this gateway's own load."""
        self._tenancy.account(context.invocation_metadata())
        counters = self._dispatcher.counters
        return gateway_v1.GetFleetReply(
            workers=[worker_to_wire(worker) for worker in self._dispatcher.fleet],
            gateway=gateway_v1.GatewayLoad(
                running_requests=self._dispatcher.running,
                waiting_requests=self._dispatcher.waiting,
                requests=counters.requests,
                refused=counters.refused,
                predicted_cached_tokens=counters.predicted_cached_tokens,
                delivered_cached_tokens=counters.delivered_cached_tokens,
                index_state=index_state_to_wire(self._dispatcher.index_state),
                failed_lookups=self._dispatcher.failed_lookups,
                undelivered_cached_tokens=counters.undelivered_cached_tokens,
            ),
        )


def _that_fits(reply: Reply, asked: str) -> Reply:
    """The reply. Raises InvalidRequest, which begins with what was asked, where a client could not read it."""
    size = reply.ByteSize()
    if size > MAX_REPLY_BYTES:
        raise InvalidRequest(f"{asked}, an answer of {size} bytes, at most {MAX_REPLY_BYTES}; ask for it in parts")
    return reply


def failure_to_wire(error: OctavoError | TimeoutError) -> gateway_v1.Failure:
    """What a request of a batch ended with, in the words that a call of its own would have ended with."""
    if isinstance(error, TimeoutError):
        return gateway_v1.Failure(code=_number(grpc.StatusCode.DEADLINE_EXCEEDED), message=str(error))
    reason = type(error).__name__
    return gateway_v1.Failure(
        code=_number(STATUS_OF[type(error)]),
        reason=reason,
        message=shortened(str(error)),
        retry_after_seconds=error.retry_after_seconds,
    )


def _number(code: grpc.StatusCode) -> int:
    """The number that gRPC has for a status."""
    return cast("tuple[int, str]", code.value)[0]


def candidate_to_wire(candidate: Candidate) -> gateway_v1.WorkerExplanation:
    """What a worker was judged by."""
    cost = candidate.cost
    return gateway_v1.WorkerExplanation(
        worker_id=candidate.standing.info.worker_id,
        predicted_cached_tokens=candidate.cached_tokens,
        cost=gateway_v1.RoutingCost(
            prefill=cost.prefill_tokens,
            queued=cost.queued_tokens,
            others=cost.others_tokens,
            decode=cost.decode_tokens,
            memory=cost.memory_tokens,
            total=cost.total,
        ),
    )


def generation_from_wire(message: gateway_v1.GenerateRequest) -> Generation:
    """The request as a value; nothing is judged yet."""
    return Generation(
        prompt=_prompt_from_wire(message),
        model=message.model,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        samples=message.n or 1,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        cache_salt=message.cache_salt,
        retain_seconds=message.retain_seconds,
        priority=message.priority,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        best_of=message.best_of or None,
        beam=beam_from_wire(message.beam) if message.HasField("beam") else None,
        stream_interval=message.stream_interval or None,
    )


def _prompt_from_wire(message: gateway_v1.GenerateRequest | gateway_v1.TokenizeRequest) -> Prompt | None:
    if message.HasField("text"):
        return TextPrompt(message.text)
    if message.HasField("chat"):
        return ChatPrompt(tuple(map(_turn_from_wire, message.chat.messages)), message.chat.tools)
    if isinstance(message, gateway_v1.GenerateRequest) and message.HasField("tokens"):
        return TokenPrompt(tuple(message.tokens.ids))
    return None


def _turn_from_wire(turn: gateway_v1.ChatMessage) -> ChatMessage:
    return ChatMessage(turn.role, turn.content, turn.tool_calls, turn.tool_call_id, turn.name)


def parts_of(event: Event) -> Sequence[Event]:
    """As what an event travels: a long prompt's logprobs in messages that plain clients take."""
    if not isinstance(event, PromptLogprobs) or len(event.tokens) <= PROMPT_LOGPROBS_A_MESSAGE:
        return (event,)
    starts = range(0, len(event.tokens), PROMPT_LOGPROBS_A_MESSAGE)
    return [PromptLogprobs(event.tokens[at : at + PROMPT_LOGPROBS_A_MESSAGE]) for at in starts]


def event_to_wire(event: Event) -> gateway_v1.GenerateReply:
    """An event as the message that tells a client of it."""
    match event:
        case Delta():
            return _delta_to_wire(event)
        case Started():
            return gateway_v1.GenerateReply(
                started=gateway_v1.Started(
                    request_id=event.request_id,
                    worker_id=event.worker_id,
                    prompt_tokens=event.prompt_tokens,
                    predicted_cached_tokens=event.predicted_cached_tokens,
                    index_state=index_state_to_wire(event.index_state),
                )
            )
        case PromptLogprobs(tokens):
            return gateway_v1.GenerateReply(
                prompt_logprobs=gateway_v1.PromptLogprobs(tokens=map(_logprobs_to_wire, tokens))
            )
        case Finished(sample, reason, cumulative_logprob):
            return gateway_v1.GenerateReply(
                finished=gateway_v1.Finished(
                    sample=sample, reason=finish_reason_to_wire(reason), cumulative_logprob=cumulative_logprob
                )
            )
        case Usage():
            return gateway_v1.GenerateReply(
                usage=gateway_v1.Usage(
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=event.cached_tokens,
                    output_tokens=event.output_tokens,
                    worker_id=event.worker_id,
                    time_to_first_token_seconds=event.time_to_first_token_seconds,
                    total_seconds=event.total_seconds,
                    carried_over=event.carried_over,
                    predicted_cached_tokens=event.predicted_cached_tokens,
                )
            )


def _delta_to_wire(event: Delta) -> gateway_v1.GenerateReply:
    """Written in place, in half the time that a message takes which is made of others: one a token."""
    reply = gateway_v1.GenerateReply()
    delta = reply.delta
    delta.sample = event.sample
    delta.text = event.text
    delta.token_ids.extend(event.token_ids)
    if event.logprobs:
        delta.logprobs.extend(map(_logprobs_to_wire, event.logprobs))
    return reply


def _logprobs_to_wire(token: TokenLogprobs) -> gateway_v1.TokenLogprobs:
    return gateway_v1.TokenLogprobs(
        logprob=token.logprob,
        top=[gateway_v1.TokenLogprob(token_id=likely, logprob=logprob) for likely, logprob in token.top],
    )
