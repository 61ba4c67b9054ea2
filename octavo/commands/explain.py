"""`octavo explain`: what each worker remembers of a prompt, why no more, and what it would cost there.

Nothing is computed.
"""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gateway.client import Client, WorkerExplanation
from gateway.core.request import ChatMessage, ChatPrompt, Generation
from gateway.core.retries import NEVER
from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed, out
from octavo.commands.key import api_key
from octavo.commands.problems import speaking_to
from octavo.commands.stats import index_in_words
from octavo.records.insight import HitEnd, PromptExplanation

_TIMEOUT_SECONDS = 10.0


def explain(address: str, prompt: str, system: str | None, model: str) -> None:
    """Print what each worker of the model has, and would cost: of a question as `octavo chat` would ask it.

    Raises:
        CommandFailed: nobody answers at `address`, or no cache manager does.
        OctavoError: the gateway would refuse the question.
    """
    said = [ChatMessage("system", system)] if system else []
    request = Generation(prompt=ChatPrompt((*said, ChatMessage("user", prompt))), model=model)
    with (
        speaking_to(address),
        Client(address, api_key=api_key(), transport=transport(), retries=NEVER) as client,
    ):
        explained = client.explain(request, timeout_seconds=_TIMEOUT_SECONDS)
    if not explained.workers:
        raise CommandFailed("no cache manager tells what its workers hold")
    workers = sorted(explained.workers, key=lambda worker: worker.worker_id)
    for worker in workers:
        if worker.cache is not None:
            out.print(f"{worker.worker_id}: {in_words(worker.cache, explained.prompt_tokens)}")
    if explained.chosen is None:
        out.print("No worker would take it now.")
        return
    out.print(costs(workers, explained.chosen))
    out.print(f"It would go to {explained.chosen}, where that is least; of equals one is taken at random.")
    out.print(index_in_words(explained.index_state))


def costs(workers: Iterable[WorkerExplanation], chosen: str) -> Table:
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
        if (cost := worker.cost) is not None:
            own = (cost.prefill_tokens, cost.queued_tokens)
            terms = (*own, cost.others_tokens, cost.decode_tokens, cost.memory_tokens, cost.total)
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
    few = f" The {left} tokens before it are too few to copy a block for, or no block is free." if left else ""
    return f"{found.reused_tokens:,} of {prompt_tokens:,} tokens would be reused. {why}{few}"
