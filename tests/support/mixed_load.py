"""A load of many kinds, each request of which has one right answer, and the ways in which it can be asked for.

Greedy, sampled by a seed, several samples, long ones, stop strings, conversations in turns; over gRPC and over HTTP,
streamed and whole, with priorities, and some that leave before the end. What was said before a request ended otherwise
must be the beginning of the right answer.
"""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from gateway.client import AsyncClient, Completion
from gateway.core.events import Delta, Finished, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TokenPrompt
from gateway.core.retries import MAY_PASS
from octavo.errors import OctavoError
from tests.support.cluster import greedy, prose


class Refused(Exception):
    """With a typed error, by its name."""


class GatewayLost(Exception):
    """It was killed, or has not been heard for too long."""


class CutShort(Exception):
    """The answer ended, and nobody said that it had."""


@dataclass
class Heard:
    """What has come of an answer, by sample."""

    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    carried_over: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


Answer = list[tuple[tuple[int, ...], str]]
"""(tokens, text) of each sample."""


def requests_of_the_load() -> tuple[list[Generation], list[Generation]]:
    """(those that stand alone, those whose answers make another request)."""
    plain = [_ask(40 * i, 20 + 7 * i, 24) for i in range(3)]
    sampled = [_ask(600 + 50 * i, 30, 24, temperature=0.9, seed=i) for i in range(2)]
    several = [_ask(900 + 50 * i, 40, 16, samples=2 + i, temperature=0.7, top_p=0.9, seed=9 + i) for i in range(2)]
    chat = Generation(prompt=ChatPrompt((ChatMessage("user", "Why is the sky blue?"),)), max_tokens=24)
    return [*plain[1:], _ask(300, 60, 96), *sampled[1:], *several], [plain[0], sampled[0], chat]


def _ask(start: int, length: int, max_tokens: int, **fields: Any) -> Generation:
    return Generation(prompt=TokenPrompt(tuple(prose(start, length))), max_tokens=max_tokens, ignore_eos=True, **fields)


def follow_up(request: Generation, answer: Answer) -> Generation:
    """Another request, which the answer to this one makes: the next turn, or the same with an end in the middle."""
    [(_, text), *_] = answer
    if isinstance(request.prompt, ChatPrompt):
        said = (ChatMessage("assistant", text), ChatMessage("user", "And why is it red in the evening?"))
        return replace(request, prompt=ChatPrompt((*request.prompt.messages, *said)))
    middle = len(text) // 2
    return replace(request, stop=(text[middle : middle + 5],))


def rehearse() -> None:
    """Let plain transformers say what it has to say before a fleet runs: it would hold up all else in this process."""
    for request in itertools.chain(*requests_of_the_load()):
        if isinstance(request.prompt, TokenPrompt) and request.temperature == 0:
            greedy(request.prompt.ids, request.max_tokens or 0)


async def learn(client: AsyncClient, timeout_seconds: float) -> list[tuple[Generation, Answer]]:
    """Ask a quiet fleet for everything, one after the other. Greedy answers are compared with plain transformers'."""
    learned: list[tuple[Generation, Answer]] = []

    async def ask(request: Generation) -> Answer:
        answer = answer_of(await client.complete(request, timeout_seconds=timeout_seconds))
        learned.append((request, answer))
        return answer

    alone, followed = requests_of_the_load()
    for request in (*alone, *followed):
        answer = await ask(request)
        if isinstance(request.prompt, TokenPrompt) and request.temperature == 0:
            assert [*answer[0][0]] == greedy(request.prompt.ids, request.max_tokens or 0), request
        if request in followed:
            after = follow_up(request, answer)
            [(tokens, text)] = await ask(after)
            for stop in after.stop:
                assert text == answer[0][1].partition(stop)[0], after
                assert tokens == answer[0][0][: len(tokens)], after
    return learned


def answer_of(completion: Completion) -> Answer:
    """What it says."""
    return [(sample.token_ids, sample.text) for sample in completion.samples]


def problem_with(heard: Heard, right: Answer, *, whole: bool) -> str | None:
    """What is wrong with what was heard; None if it is the right answer, or the beginning of it."""
    for sample, (tokens, text) in enumerate(right):
        told, said = tuple(heard.tokens[sample]), heard.texts[sample]
        if told != (tokens if whole else tokens[: len(told)]):
            return f"sample {sample}: tokens {told}, wanted {tokens}"
        if said != (text if whole else text[: len(said)]):
            return f"sample {sample}: text {said!r}, wanted {text!r}"
    if strange := set(heard.tokens) - set(range(len(right))):
        return f"samples {sorted(strange)}, of {len(right)}"
    return None


class Door:
    """One gateway, over gRPC and HTTP.

    Each way to ask fills `heard` and returns whether the answer was heard to its end: one leaves after so many events.

    Raises:
        Refused: the gateway said so, by its type.
        GatewayLost: the connection is gone.
        CutShort: there is less than a whole answer, and no error.
    """

    def __init__(self, grpc: AsyncClient, http: httpx2.AsyncClient, deadline_seconds: float) -> None:
        self._grpc = grpc
        self._http = http
        self._deadline_seconds = deadline_seconds
        self.ways: dict[str, Callable[[Generation, Heard, int | None], Coroutine[Any, Any, bool]]] = {
            "grpc": self._over_grpc,
            "http stream": self._over_http_streamed,
            "http whole": self._over_http_at_once,
        }

    async def _over_grpc(self, request: Generation, heard: Heard, leaves_after: int | None) -> bool:
        ended, told = 0, False
        try:
            # The deadline that hangs are found by is the caller's, a little before this one.
            replies = self._grpc.generate(request, timeout_seconds=self._deadline_seconds + 1)
            async with aclosing(replies) as events:
                count = 0
                async for event in events:
                    count += 1
                    match event:
                        case Delta():
                            heard.tokens[event.sample] += event.token_ids
                            heard.texts[event.sample] += event.text
                        case Finished():
                            ended += 1
                        case Usage():
                            told, heard.carried_over = True, event.carried_over
                        case _:
                            pass
                    if count == leaves_after:
                        return False
        except OctavoError as refusal:
            if not isinstance(refusal, MAY_PASS):
                raise
            raise Refused(type(refusal).__name__) from refusal
        except ConnectionError as error:
            raise GatewayLost from error
        if not told or ended != request.samples:
            raise CutShort(f"{ended} of {request.samples} samples ended, usage told: {told}")
        return True

    async def _over_http_streamed(self, request: Generation, heard: Heard, leaves_after: int | None) -> bool:
        path, body = _over_http(request)
        try:
            async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.is_error:
                    raise _refusal(json.loads(await answer.aread()))
                count = 0
                async with aclosing(_events(answer)) as events:
                    async for event in events:
                        if event is None:
                            return True
                        count += 1
                        for choice in event["choices"]:
                            _take(choice, choice.get("delta", choice), heard)
                        if count == leaves_after:
                            return False
        except httpx2.TransportError as error:
            raise GatewayLost from error
        raise CutShort("the stream ended without [DONE]")

    async def _over_http_at_once(self, request: Generation, heard: Heard, leaves_after: int | None) -> bool:
        """Events stand for tenths of seconds here: there is none before the end."""
        path, body = _over_http(request)
        try:
            async with asyncio.timeout(None if leaves_after is None else leaves_after / 10):
                answer = await self._http.post(path, json=body)
        except TimeoutError:
            return False
        except httpx2.TransportError as error:
            raise GatewayLost from error
        if answer.is_error:
            raise _refusal(answer.json())
        for choice in answer.json()["choices"]:
            _take(choice, choice.get("message", choice), heard)
        return True


_REASONS = {
    "rate_limit_exceeded": "Overloaded",
    "no_worker": "NoWorker",
    "draining": "Draining",
    "worker_lost": "WorkerLost",
}
"""OpenAI's codes of the errors that may pass."""


def _refusal(body: dict[str, Any]) -> Exception:
    """Raised where the gateway says that it cannot serve; AssertionError where nobody had asked for that."""
    reason = _REASONS.get(body["error"]["code"])
    return AssertionError(f"refused with {body['error']}") if reason is None else Refused(reason)


async def _events(answer: httpx2.Response) -> AsyncGenerator[dict[str, Any] | None]:
    """Of a stream; None is its end. Raises what an error in mid-stream says."""
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            yield None
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _refusal(event)
            yield event


def _take(choice: dict[str, Any], words: dict[str, Any], heard: Heard) -> None:
    heard.tokens[choice["index"]] += choice.get("token_ids") or ()
    heard.texts[choice["index"]] += words.get("content") or words.get("text") or ""


def _over_http(request: Generation) -> tuple[str, dict[str, Any]]:
    """(path, body)."""
    body: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "n": request.samples,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "stop": [*request.stop] or None,
        "ignore_eos": request.ignore_eos,
        "priority": request.priority,
        "return_token_ids": True,
    }
    if isinstance(request.prompt, ChatPrompt):
        return "/v1/chat/completions", body | {"messages": _messages(request.prompt.messages)}
    assert isinstance(request.prompt, TokenPrompt)
    return "/v1/completions", body | {"prompt": [*request.prompt.ids]}


def _messages(turns: Sequence[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]
