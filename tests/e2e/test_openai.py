"""OpenAI's API before a real fleet with a real model: the `openai` package, and schemathesis in search of a 5xx."""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import schemathesis
from hypothesis import Phase, given, settings
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.cluster import Books, Client, greedy, prose, smollm2, tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.model]

EXAMPLES = 75 if os.environ.get("CI") else 12
SHORT = {"max_tokens", "max_completion_tokens", "n", "best_of"}
"""Fields that make a valid request a long one."""

CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Stack:
    """A cluster that runs on an event loop of its own, as one on another machine would."""

    url: str
    loop: asyncio.AbstractEventLoop
    inside: Client

    def at_rest(self) -> Books:
        return asyncio.run_coroutine_threadsafe(self.inside.at_rest(), self.loop).result(60)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    started, stop = threading.Event(), asyncio.Event()
    found: list[Stack] = []

    async def serve() -> None:
        async with smollm2(workers=1) as client:
            found.append(Stack(client.cluster.http_url, asyncio.get_running_loop(), client))
            started.set()
            await stop.wait()

    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(asyncio.run, serve())
        serving.add_done_callback(lambda _: started.set())
        started.wait()
        if serving.done():
            serving.result()
        yield found[0]
        found[0].loop.call_soon_threadsafe(stop.set)
        serving.result()


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as running:
        yield running


# ---- the openai package ----------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_plain_transformers_and_a_second_look_is_cached(client: OpenAI, stack: Stack) -> None:
    prompt, expected = prose(0, 50), greedy(prose(0, 50), 8)
    cold, warm = (
        client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        for _ in range(2)
    )

    assert cold.choices[0].text == warm.choices[0].text == tokenizer().decode(expected)
    assert cold.usage is not None
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert warm.usage.prompt_tokens_details.cached_tokens == 48
    assert stack.at_rest()


def test_a_chat_is_the_same_streamed_or_whole(client: OpenAI) -> None:
    ask: Any = {"model": "smollm2", "messages": CHAT, "max_tokens": 10, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_tell_why_greedy_text_is_what_it_is(client: OpenAI) -> None:
    """S49, over HTTP."""
    prompt = "The capital of France is"
    echoed, again = (
        client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=3, temperature=0, logprobs=2, echo=True
        ).choices[0]
        for _ in range(2)
    )
    alone = client.completions.create(model="smollm2", prompt=prompt, max_tokens=0, logprobs=2, echo=True).choices[0]
    chat = client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]

    scored: Any = alone.logprobs
    told: Any = echoed.logprobs
    warm: Any = again.logprobs
    assert warm.tokens == told.tokens
    assert warm.token_logprobs[1:] == pytest.approx(told.token_logprobs[1:], abs=1e-4)
    assert "".join(told.tokens) == echoed.text
    assert (alone.text, scored.tokens) == (prompt, told.tokens[:-3])
    assert scored.token_logprobs[1:] == pytest.approx(told.token_logprobs[1:-3], abs=1e-4)
    assert echoed.text.startswith(prompt)
    assert told.token_logprobs[0] is None
    for logprob, top in zip(told.token_logprobs[-3:], told.top_logprobs[-3:], strict=True):
        assert logprob == max(top.values())
    assert chat.logprobs is not None
    entries = chat.logprobs.content or []
    assert [entry.token for entry in entries] == [entry.top_logprobs[0].token for entry in entries]
    assert "".join(entry.token for entry in entries) == chat.message.content


async def test_many_asynchronous_clients_share_one_stack(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client:

        async def ask(seed: int) -> str | None:
            answer = await client.chat.completions.create(
                model="smollm2", messages=CHAT, max_tokens=6, temperature=1, seed=seed, n=2
            )
            return "|".join(choice.message.content or "" for choice in answer.choices)

        together = await asyncio.gather(*map(ask, range(4)))
        again = [await ask(seed) for seed in range(4)]

    assert again == together
    assert len(set(together)) > 1


def test_what_is_wrong_is_told_as_openai_tells_it(client: OpenAI, stack: Stack) -> None:
    before = stack.at_rest()
    with pytest.raises(NotFoundError) as unknown:
        client.models.retrieve("gpt-17")
    with pytest.raises(BadRequestError) as too_long:
        client.completions.create(model="smollm2", prompt=[7] * 9000)

    assert unknown.value.code == "model_not_found"
    assert "8192" in too_long.value.message
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert stack.at_rest() == before


# ---- whatever else one may send --------------------------------------------------------------------------------

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_that_can_be_sent_is_answered_by_a_5xx(stack: Stack, mode: GenerationMode) -> None:
    """What the OpenAPI description allows, and what it does not; every answer is one that it describes."""
    schema = schemathesis.openapi.from_url(f"{stack.url}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    answers = [
        statuses_of(operation, mode, "smollm2")
        for operation in operations
        if operation.body or mode is GenerationMode.POSITIVE
    ]

    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/chat/completions", "/tokenize"}
    assert all(answers)
    if mode is GenerationMode.POSITIVE:
        assert sum(200 in statuses for statuses in answers) > len(answers) / 2
    assert stack.at_rest()


def statuses_of(operation: Any, mode: GenerationMode, model: str) -> set[int]:
    """How an operation answers, of a model that is there where what it gets is meant to be right."""
    statuses: set[int] = set()

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode))
    def probe(case: Any) -> None:
        if isinstance(case.body, dict):
            if operation.path.startswith("/v1/"):
                case.body.setdefault("max_tokens", 2)
            case.body |= {name: 2 for name, value in case.body.items() if name in SHORT and is_more(value)}
            if is_more(case.body.get("timeout_seconds"), 0):
                case.body["timeout_seconds"] = 60  # who leaves no time is answered 504, as is right
            if mode is GenerationMode.POSITIVE:
                case.body["model"] = model
        answer = case.call(timeout=60)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    probe()
    return statuses


def is_more(value: object, least: int = 2) -> bool:
    return isinstance(value, int | float) and value > least
