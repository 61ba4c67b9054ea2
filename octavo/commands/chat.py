"""`octavo chat`: one question, or a conversation whose earlier turns the workers remember.

Answers are read by asyncio, whose runner makes Ctrl-C the cancellation of what runs: a KeyboardInterrupt amid
gRPC's blocking calls would leave its locks as they were at that moment, and the command could hang or fail.
"""

from asyncio import Runner
from collections.abc import Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib import import_module

from gateway.client import AsyncClient
from gateway.core.events import Delta, Finished, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation
from octavo.commands.connection import transport
from octavo.commands.console import err, out
from octavo.commands.key import api_key
from octavo.commands.problems import speaking_to
from octavo.records.sampling import BeamSearch
from octavo.records.serve import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How every answer of a conversation is asked for; None leaves it to the gateway."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    beams: int = 0
    """0: no search."""
    seed: int | None = None
    retain_seconds: int = 0


def chat(address: str, prompt: str | None, system: str | None, manner: Manner) -> None:
    """Answer `prompt`, or talk until the end of the input where there is none.

    Raises:
        CommandFailed: nobody answers at `address`.
        OctavoError: the gateway refused the request.
    """
    said = [ChatMessage("system", system)] if system else []
    with speaking_to(address), Runner() as runner, _client(runner, address) as client:
        if prompt is None:
            _converse(runner, client, said, manner)
        else:
            runner.run(_answer(client, [*said, ChatMessage("user", prompt)], manner, heard=[]))


@contextmanager
def _client(runner: Runner, address: str) -> Generator[AsyncClient]:
    """A client that lives on the runner's event loop, and is closed in the end."""

    async def opened() -> AsyncClient:
        return AsyncClient(address, api_key=api_key(), transport=transport())

    client = runner.run(opened())
    try:
        yield client
    finally:
        runner.run(client.close())


def _converse(runner: Runner, client: AsyncClient, said: list[ChatMessage], manner: Manner) -> None:
    """Ask, answer, remember. Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at a question, ends the conversation."""
    import_module("readline")  # line editing and history for input()

    err.print("A conversation; Ctrl-D ends it.", style="dim")
    while (question := _question()) is not None:
        said.append(ChatMessage("user", question))
        heard: list[str] = []
        try:
            runner.run(_answer(client, said, manner, heard))
        except KeyboardInterrupt:
            print(" …")
        said.append(ChatMessage("assistant", "".join(heard)))


def _question() -> str | None:
    """What the user types, or None when there is nothing more to come."""
    prompt = "\n> " if out.is_terminal else ""
    try:
        while not (question := input(prompt).strip()):
            pass
        return question
    except (EOFError, KeyboardInterrupt):
        print()
        return None


async def _answer(client: AsyncClient, said: Sequence[ChatMessage], manner: Manner, heard: list[str]) -> None:
    """Print the next turn as it comes, and add its pieces to `heard`."""
    request = Generation(
        prompt=ChatPrompt(tuple(said)),
        model=manner.model,
        max_tokens=manner.max_tokens,
        temperature=manner.temperature,
        top_k=manner.top_k,
        top_p=manner.top_p,
        min_p=manner.min_p,
        repetition_penalty=manner.repetition_penalty,
        beam=BeamSearch(width=manner.beams) if manner.beams else None,
        seed=manner.seed,
        retain_seconds=manner.retain_seconds,
    )
    reason = FinishReason.STOP
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                heard.append(event.text)
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                reason = event.reason
            elif isinstance(event, Usage):
                print()
                _tell_cost(event, reason)


def _tell_cost(usage: Usage, reason: FinishReason) -> None:
    """What it took, for a person at a terminal; a pipe gets the answer alone."""
    if not (out.is_terminal and err.is_terminal):
        return
    seconds = usage.total_seconds - usage.time_to_first_token_seconds
    speed = f", {(usage.output_tokens - 1) / seconds:.0f} tokens/s" if usage.output_tokens > 1 and seconds > 0 else ""
    end = f"; cut off after {usage.output_tokens} tokens" if reason is FinishReason.LENGTH else ""
    err.print(
        f"{usage.worker_id}: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens remembered, "
        f"first token after {usage.time_to_first_token_seconds:.2f} s{speed}{end}",
        style="dim",
    )
