"""`octavo explain`: what each worker remembers of a prompt, why no more, and what it would cost there.

Nothing is computed.
"""

from collections.abc import Iterable

import grpc
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gateway.client import generation_to_wire
from gateway.core.request import ChatMessage, ChatPrompt, Generation
from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed, out
from octavo.commands.key import api_key
from octavo.commands.stats import index_in_words
from octavo.records import HitEnd, PromptExplanation
from octavo.service import open_blocking_channel
from octavo.status import translated
from octavo.tenants import credentials
from octavo.v1 import gateway_pb2, gateway_pb2_grpc
from octavo.wire.insight import explanation_from_wire

_TIMEOUT_SECONDS = 10.0


def explain(address: str, prompt: str, system: str | None, model: str) -> None:
    """Print what each worker of the model has, and would cost: of a question as `octavo chat` would ask it.

    Raises:
        CommandFailed: nobody answers at `address`, or no cache manager does.
        OctavoError: the gateway would refuse the question.
    """
    said = [ChatMessage("system", system)] if system else []
    request = Generation(prompt=ChatPrompt((*said, ChatMessage("user", prompt))), model=model)
    reply = _ask(address, request)
    if not reply.workers:
        raise CommandFailed("no cache manager tells what its workers hold")
    workers = sorted(reply.workers, key=lambda worker: worker.worker_id)
    for worker in workers:
        if worker.HasField("cache"):
            out.print(f"{worker.worker_id}: {in_words(explanation_from_wire(worker.cache), reply.prompt_tokens)}")
    if not reply.chosen:
        out.print("No worker would take it now.")
        return
    out.print(costs(workers, reply.chosen))
    out.print(f"It would go to {reply.chosen}, where that is least; of equals one is taken at random.")
    out.print(index_in_words(reply.index_state))


def _ask(address: str, request: Generation) -> gateway_pb2.ExplainReply:
    message = gateway_pb2.ExplainRequest(request=generation_to_wire(request))
    with open_blocking_channel(address, transport()) as channel:
        gateway = gateway_pb2_grpc.InferenceStub(channel)
        try:
            with translated():
                return gateway.Explain(message, timeout=_TIMEOUT_SECONDS, metadata=credentials(api_key()))
        except grpc.RpcError as error:
            raise CommandFailed(f"nothing answers at {address}; `octavo up` starts it") from error


def costs(workers: Iterable[gateway_pb2.WorkerExplanation], chosen: str) -> Table:
    """The terms that the gateway would choose by: a row for each worker that it judged, fit for 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left")
    table.title = "What it would cost there, in tokens of work"
    table.caption = (
        "remembered: of the prompt, when its turn comes, as far as the gateway knows. compute: the rest of it. "
        "queued: prompts before it. others: what they lose if it is computed here though another worker has it. "
        "decode: a share of what runs there. memory: what does not fit, and a share of what would be pushed out."
    )
    table.add_column("worker", no_wrap=True)
    for header in ("remembered", "compute", "queued", "others", "decode", "memory", "in all"):
        table.add_column(header, justify="right", no_wrap=True)
    for worker in workers:
        if worker.HasField("cost"):
            cost = worker.cost
            terms = (cost.prefill, cost.queued, cost.others, cost.decode, cost.memory, cost.total)
            table.add_row(
                Text(worker.worker_id),
                f"{worker.predicted_cached_tokens:,}",
                *(f"{term:,.0f}" for term in terms),
                style="bold" if worker.worker_id == chosen else None,
            )
    return table


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
