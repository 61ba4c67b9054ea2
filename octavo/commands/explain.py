"""`octavo explain`: what each worker remembers of a prompt, why no more, and what it would cost there.

Nothing is computed.
"""

import grpc

from gateway.client import generation_to_wire
from gateway.core.request import ChatMessage, ChatPrompt, Generation
from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed, out
from octavo.commands.key import api_key
from octavo.records import HitEnd, PromptExplanation
from octavo.service import open_blocking_channel
from octavo.status import translated
from octavo.tenants import credentials
from octavo.v1 import gateway_pb2, gateway_pb2_grpc
from octavo.wire.insight import explanation_from_wire

_TIMEOUT_SECONDS = 10.0


def explain(address: str, prompt: str, system: str | None, model: str) -> None:
    """Print a line for each worker of the model: of a question as `octavo chat` would ask it.

    Raises:
        CommandFailed: nobody answers at `address`, or no cache manager does.
        OctavoError: the gateway would refuse the question.
    """
    said = [ChatMessage("system", system)] if system else []
    request = Generation(prompt=ChatPrompt((*said, ChatMessage("user", prompt))), model=model)
    reply = _ask(address, request)
    if not reply.workers:
        raise CommandFailed("no cache manager tells what its workers hold")
    for worker in sorted(reply.workers, key=lambda worker: worker.worker_id):
        if worker.HasField("cache"):
            out.print(f"{worker.worker_id}: {in_words(explanation_from_wire(worker.cache), reply.prompt_tokens)}")
        if worker.HasField("cost"):
            out.print(f"{worker.worker_id}: {cost_in_words(worker)}")
    if reply.chosen:
        out.print(f"It would go to {reply.chosen}, where it costs the least; of equals one is taken at random.")


def _ask(address: str, request: Generation) -> gateway_pb2.ExplainReply:
    message = gateway_pb2.ExplainRequest(request=generation_to_wire(request))
    with open_blocking_channel(address, transport()) as channel:
        gateway = gateway_pb2_grpc.InferenceStub(channel)
        try:
            with translated():
                return gateway.Explain(message, timeout=_TIMEOUT_SECONDS, metadata=credentials(api_key()))
        except grpc.RpcError as error:
            raise CommandFailed(f"nothing answers at {address}; `octavo up` starts it") from error


def cost_in_words(worker: gateway_pb2.WorkerExplanation) -> str:
    """The terms that the gateway would choose by."""
    cost = worker.cost
    return (
        f"{cost.total:,.0f} tokens of work: {cost.prefill:,.0f} to compute, {cost.queued:,.0f} queued before it, "
        f"{cost.others:,.0f} for what that costs others, {cost.decode:,.0f} for decoding, {cost.memory:,.0f} for memory"
        f"; {worker.predicted_cached_tokens:,} expected to be remembered."
    )


def in_words(found: PromptExplanation, prompt_tokens: int) -> str:
    """One sentence or two."""
    at = found.position
    match found.end:
        case HitEnd.LAST_TOKEN:
            why = "All is remembered but the last token, which is always computed."
        case HitEnd.DIFFERS:
            why = f"At position {at} block {found.block} goes on with another token."
        case HitEnd.NOT_PUBLISHED:
            why = f"From position {at} on no full block is remembered: none was computed, or it was evicted or reset."
        case HitEnd.BEING_COMPUTED:
            why = f"Another request computes the block at position {at}: this one would wait for it."
    left = at - found.reused_tokens
    few = f" The {left} tokens before are too few to copy a block for, or no block is free." if left else ""
    return f"{found.reused_tokens:,} of {prompt_tokens:,} tokens would be reused. {why}{few}"
