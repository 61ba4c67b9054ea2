"""OpenAI's API before a real fleet with a real model: the `openai` package, and schemathesis in search of a 5xx."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.support.cluster import Books, Client, greedy, prose, smollm2, tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.model]

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
