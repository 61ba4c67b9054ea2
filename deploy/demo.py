"""`octavo demo`: start a stack with two workers, pay it a scripted visit, and show what was remembered.

The visitors ask a tutor whose instructions (`tutor.md`) are the system prompt of every question: the first question
pays for reading them, the others find them read. Every number in the table is what the gateway reports to any client.
"""

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deploy.local import Cluster
from gateway.client import AsyncClient
from gateway.core.events import Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, Prompt, TextPrompt
from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed, as_curl, out
from octavo.commands.key import api_key
from octavo.commands.model import fetch_model, models_dir
from octavo.models import find

WORKERS = 2
_INSTRUCTIONS = Path(__file__).with_name("tutor.md")
_ANSWER_TOKENS = 24
_REQUEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request, and what came back."""

    title: str
    usage: Usage
    texts: tuple[str, ...]
    """One a sample."""

    @property
    def tokens_per_second(self) -> float:
        """Of all samples together, once the first token is out."""
        seconds = self.usage.total_seconds - self.usage.time_to_first_token_seconds
        return (self.usage.output_tokens - len(self.texts)) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The whole visit: the questions (the first of them cold), the follow-up, the samples."""

    questions: tuple[Visit, ...]
    follow_up: Visit
    samples: Visit

    @property
    def visits(self) -> tuple[Visit, ...]:
        """In the order in which they happened."""
        return (*self.questions, self.follow_up, self.samples)

    @property
    def cold_seconds(self) -> float:
        """Time to first token of the question that found nothing."""
        return self.questions[0].usage.time_to_first_token_seconds

    @property
    def warm_seconds(self) -> float:
        """The same, median of the questions that found the instructions."""
        return median(visit.usage.time_to_first_token_seconds for visit in self.questions[1:])


def demo(model: str) -> None:
    """Fetch the model, run the visit and print it; when this returns, nothing runs any more.

    Raises:
        CommandFailed: the model cannot be had, or the visit did not show what it is there to show.
        StartFailed, FileNotFoundError: the stack did not come up.
        OctavoError, TimeoutError, ConnectionError: a request failed.
    """
    fetch_model(model)
    asyncio.run(_run(model))


async def _run(model: str) -> None:
    began = time.monotonic()
    cluster = Cluster(workers=WORKERS, env={"OCTAVO_MODEL": model})
    with _doing(f"starting Redis, a cache manager, {WORKERS} workers and a gateway"):
        await cluster.start()
    try:
        took = time.monotonic() - began
        out.print(f"The stack serves {escape(model)} at {cluster.address}; it took {took:.1f} s to start.")
        out.print(f"OpenAI's API is at {cluster.http_url}/v1 meanwhile:\n")
        name = find(model, models_dir()).name
        question = as_curl(cluster.http_url, name, with_key=cluster.asks_for_keys, authorities=cluster.http_authorities)
        out.print(f"{question}\n", markup=False, soft_wrap=True)
        with _doing("visiting"):
            async with AsyncClient(cluster.address, api_key=api_key(), transport=transport()) as client:
                story = await visit(client)
    finally:
        with _doing("stopping"):
            await cluster.stop()
            await cluster.kill()
    out.print(as_table(story))
    out.print(Text(what_was_saved(story), style="bold"))
    check(story)
    out.print("\nAll of it has been stopped. Your turn: [bold]octavo up[/bold], then [bold]octavo chat[/bold].")


def _doing(what: str) -> AbstractContextManager[object]:
    """A spinner on a terminal, a line elsewhere."""
    if out.is_terminal:
        return out.status(f"{what} …")
    out.print(f"{what} …")
    return nullcontext()


# ---- the visit -----------------------------------------------------------------------------------------------

_QUESTIONS = {
    "question 1": "What is the capital of France?",
    "question 2": "What is the largest ocean?",
    "question 3": "Why does the moon shine?",
    "question 4": "What is the highest mountain in the world?",
}
_FOLLOW_UP = "And what is the capital of Italy?"
_SAMPLED = "Write the first sentence of a story about a lighthouse."


async def visit(client: AsyncClient) -> Story:
    """All requests, one after the other."""
    await _warm_up(client)
    questions = [await _ask(client, title, _chat(question)) for title, question in _QUESTIONS.items()]
    first_question, first = next(iter(_QUESTIONS.values())), questions[0]
    history = [ChatMessage("assistant", first.texts[0]), ChatMessage("user", _FOLLOW_UP)]
    follow_up = await _ask(client, "follow-up to 1", _chat(first_question, *history))
    sampled = ChatPrompt((ChatMessage("user", _SAMPLED),))
    samples = await _ask(client, "four samples", sampled, samples=4, temperature=0.8, seed=7)
    return Story(questions=tuple(questions), follow_up=follow_up, samples=samples)


def _chat(question: str, *more: ChatMessage) -> ChatPrompt:
    instructions = _INSTRUCTIONS.read_text(encoding="utf-8").strip()
    return ChatPrompt((ChatMessage("system", instructions), ChatMessage("user", question), *more))


async def _warm_up(client: AsyncClient) -> None:
    """One token from every worker: what a process does at its very first step is no part of what is compared."""
    hello = Generation(prompt=TextPrompt("Hello"), max_tokens=1)
    async with asyncio.timeout(_REQUEST_SECONDS):
        await asyncio.gather(*(client.complete(hello) for _ in range(WORKERS)))


async def _ask(
    client: AsyncClient,
    title: str,
    prompt: Prompt,
    *,
    samples: int = 1,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Visit:
    request = Generation(prompt=prompt, max_tokens=_ANSWER_TOKENS, samples=samples, temperature=temperature, seed=seed)
    async with asyncio.timeout(_REQUEST_SECONDS):
        answer = await client.complete(request)
    return Visit(title=title, usage=answer.usage, texts=answer.texts)


# ---- what it showed ------------------------------------------------------------------------------------------


def check(story: Story) -> None:
    """Raises CommandFailed where the visit did not show what it is there to show."""
    if story.questions[0].usage.cached_tokens:
        raise CommandFailed("the first question found something remembered, in a stack that had just started")
    for warm in (*story.questions[1:], story.follow_up):
        if warm.usage.cached_tokens == 0:
            raise CommandFailed(f"{warm.title} found nothing remembered")
    if not all(text for visit in story.visits for text in visit.texts):
        raise CommandFailed("an answer is empty")


def as_table(story: Story) -> Table:
    """A row a request; the samples of one request under each other."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=True)
    for header in ("request", "worker"):
        table.add_column(header, no_wrap=True)
    for header in ("prompt", "cached", "first token", "tokens/s"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)  # what the others leave
    for row in story.visits:
        usage = row.usage
        table.add_row(
            row.title,
            usage.worker_id,
            f"{usage.prompt_tokens:,}",
            Text(f"{usage.cached_tokens:,}", style="green" if usage.cached_tokens else "dim"),
            f"{usage.time_to_first_token_seconds:.2f} s",
            f"{row.tokens_per_second:.0f}",
            _one_line(row.texts[0]),
        )
        for text in row.texts[1:]:
            table.add_row("", "", "", "", "", "", _one_line(text))
    return table


def _one_line(text: str) -> Text:
    return Text(" ".join(text.split()), style="italic")


def what_was_saved(story: Story) -> str:
    """The point of it all in one sentence."""
    prompt = sum(visit.usage.prompt_tokens for visit in story.visits)
    cached = sum(visit.usage.cached_tokens for visit in story.visits)
    ratio = story.cold_seconds / story.warm_seconds
    return (
        f"Of {prompt:,} prompt tokens {cached:,} ({cached / prompt:.0%}) were remembered and not computed: "
        f"the first token came after {story.cold_seconds:.2f} s where nothing was remembered, "
        f"and after {story.warm_seconds:.2f} s where the instructions were ({ratio:.1f} times sooner)."
    )
