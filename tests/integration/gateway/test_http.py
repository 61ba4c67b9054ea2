"""The HTTP door as clients of OpenAI's API see it: through the real `openai` package, and plain HTTP beside it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import get_type_hints

from gateway.bounds import Bounds
from gateway.core.request import Generation, TextPrompt
from gateway.http_door.requests import ChatRequest, CompletionRequest
from gateway.tenancy import Tenancy
from octavo.errors import PoolExhausted
from octavo.records.sampling import BeamSearch
from tests.support import words
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.tenants import write_tenants

TEXT = "the quick brown fox jumps over the lazy dog and reads a book"
HELLO: Any = [{"role": "user", "content": "hello"}]
CALLING_TEMPLATE = (
    """{% for tool in tools or [] %}<tool_call>{"name": "{{ tool['function']['name'] }}", """
    """"arguments": {{ tool['function']['parameters'] | tojson }}}</tool_call>{% endfor %}"""
    "{% if tools %}{{ eos_token }}{% endif %}"
    "{% for message in messages %}{% for call in message['tool_calls'] or [] %}{{ call['id'] }}{% endfor %}{% endfor %}"
) + words.CHAT_TEMPLATE
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 1000}


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path, Bounds(max_running=8, max_waiting=16, max_attempts=1)) as running:
        yield running


@pytest.fixture
async def client(front: Gateway) -> AsyncGenerator[AsyncOpenAI]:
    async with openai_client(front) as running:
        yield running


@pytest.fixture
async def http(front: Gateway) -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=front.http) as running:
        yield running


def openai_client(front: Gateway, api_key: str = "anything") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{front.http}/v1", api_key=api_key, max_retries=0)


async def events_of(response: httpx2.Response) -> list[Any]:
    """The JSON of every server-sent event; the last one's is "[DONE]" where it was said."""
    lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


# ---- answers ---------------------------------------------------------------------------------------------------


async def test_a_completion_comes_whole_with_its_usage(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="words", prompt=TEXT, max_tokens=6, n=2)
    again = await client.completions.create(model="words", prompt=TEXT, max_tokens=6)

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.text for choice in answer.choices} == {again.choices[0].text}
    assert TEXT.startswith(again.choices[0].text)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.model, answer.object) == ("words", "text_completion")
    assert answer.usage is not None
    assert again.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 16


async def test_a_stream_joined_is_the_whole(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model="words", prompt=TEXT, max_tokens=9, n=3)
    texts, reasons, usages = [""] * 3, [""] * 3, []
    stream = await client.completions.create(
        model="words", prompt=TEXT, max_tokens=9, n=3, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason or ""

    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length"] * 3
    assert [usage for usage in usages[:-1] if usage] == []
    assert usages[-1] is not None
    assert whole.usage is not None
    assert usages[-1].completion_tokens == whole.usage.completion_tokens


async def test_a_chat_is_the_assistants_turn_streamed_or_not(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="words", messages=HELLO, max_tokens=7)
    stream = await client.chat.completions.create(model="words", messages=HELLO, max_completion_tokens=7, stream=True)
    chunks = [chunk async for chunk in stream]

    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_synchronous_client_gets_the_same(tmp_path: Path) -> None:
    async def serve_and_ask() -> tuple[Any, Any]:
        async with fake_fleet() as fleet:
            await fleet.add("a", words_pool())
            async with gateway(fleet, tmp_path) as front, openai_client(front) as client:
                expected = await client.chat.completions.create(model="words", messages=HELLO, max_tokens=7)
                return expected.choices[0].message, await asyncio.to_thread(ask, front.http)

    def ask(url: str) -> Any:
        with OpenAI(base_url=f"{url}/v1", api_key="anything", max_retries=0) as client:
            return client.chat.completions.create(model="words", messages=HELLO, max_tokens=7).choices[0].message

    expected, got = asyncio.run(serve_and_ask())
    assert got == expected


async def test_a_batch_of_prompts_has_its_choices_in_order(client: AsyncOpenAI) -> None:
    prompts = ["one fox", "two dogs", "three books", "four"]
    batch = await client.completions.create(model="words", prompt=prompts, max_tokens=3, n=2, echo=True)
    alone = [await client.completions.create(model="words", prompt=each, max_tokens=3) for each in prompts]

    assert [choice.index for choice in batch.choices] == list(range(8))
    assert [choice.text for choice in batch.choices[::2]] == [
        prompt + answer.choices[0].text for prompt, answer in zip(prompts, alone, strict=True)
    ]
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)


async def test_token_ids_go_in_and_come_out(client: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True, "top_k": -1}
    batch: Any = [[5, 6, 7], [8, 9]]
    whole = await client.completions.create(model="words", prompt=batch, max_tokens=4, extra_body=extra)
    answer = await http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4, "stream": True} | extra)
    parts = [event["choices"][0] for event in (await events_of(answer))[:-1]]

    told: Any = whole.choices
    assert [(choice.prompt_token_ids, choice.token_ids) for choice in told] == [
        ([5, 6, 7], [5, 6, 7, 5]),
        ([8, 9], [8, 9, 8, 9]),
    ]
    assert parts[0]["prompt_token_ids"] == [5, 6, 7]
    assert [token for part in parts for token in part.get("token_ids", [])] == [5, 6, 7, 5]


async def test_an_echo_of_no_tokens_is_the_prompt_alone_streamed_or_not(
    client: AsyncOpenAI, http: httpx2.AsyncClient, front: Gateway
) -> None:
    """S49, its form: what scores texts asks for a prompt's logprobs and no output. The fake workers have none."""
    body = {"prompt": [TEXT, "hello"], "max_tokens": 0, "echo": True, "n": 2, "return_token_ids": True}
    whole = (await http.post("/v1/completions", json=body)).json()
    stream = await client.completions.create(
        model="words", prompt=[TEXT, "hello"], max_tokens=0, echo=True, n=2, stream=True
    )
    parts = [chunk.choices[0] async for chunk in stream]

    assert [choice["text"] for choice in whole["choices"]] == [TEXT, TEXT, "hello", "hello"]
    assert all((choice["token_ids"], choice["finish_reason"]) == ([], "length") for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 0
    told = {at: "".join(part.text for part in parts if part.index == at) for at in range(4)}
    assert told == {0: TEXT, 1: TEXT, 2: "hello", 3: "hello"}
    assert front.at_rest()


async def test_a_stop_string_ends_a_choice_and_is_not_part_of_it(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="words", prompt=TEXT, max_tokens=100, stop=" brown")

    assert answer.choices[0].text == "the quick"
    assert answer.choices[0].finish_reason == "stop"


async def test_usage_so_far_grows_with_every_event(http: httpx2.AsyncClient) -> None:
    body = ENDLESS | {"max_tokens": 5, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    events = (await events_of(await http.post("/v1/completions", json=body)))[:-1]

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}


async def test_tools_reach_the_template_and_what_the_model_calls_comes_back_as_calls(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    """The fake worker says its prompt, which begins with a call of each tool; then the conversation goes on."""
    described: Any = [{"type": "function", "function": {"name": name, "parameters": {"of": name}}} for name in "ab"]
    ask: Any = {"model": "words", "messages": HELLO, "tools": described, "max_tokens": 300}
    async with gateway(fleet, tmp_path, chat_template=CALLING_TEMPLATE) as front, openai_client(front) as client:
        whole = await client.chat.completions.create(**ask)
        async with client.chat.completions.stream(**ask) as events:
            streamed = await events.get_final_completion()
        untold = await client.chat.completions.create(**ask, tool_choice="none")
        turn: Any = whole.choices[0].message.model_dump(exclude_none=True)
        answers: Any = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in turn["tool_calls"]]
        await client.chat.completions.create(**ask | {"messages": [*HELLO, turn, *answers]})

    for choice in (whole.choices[0], streamed.choices[0]):
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("a", {"of": "a"}),
            ("b", {"of": "b"}),
        ]
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
    assert untold.choices[0].message.tool_calls is None
    prompts = [words.tokenizer().decode(sent.prompt) for sent in fleet.workers[0].submissions]
    assert ["<tool_call>" in prompt for prompt in prompts] == [True, True, False, True]
    assert prompts[-1].count("sunny") == 2
    assert turn["tool_calls"][0]["id"] in prompts[-1]


async def test_parts_of_a_message_are_lines_and_developers_are_systems(client: AsyncOpenAI, fleet: FakeFleet) -> None:
    parts: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    plain: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one\ntwo"}]
    for messages in (parts, plain):
        await client.chat.completions.create(model="words", messages=messages, max_tokens=1)

    (worker,) = fleet.workers
    assert worker.submissions[0].prompt == worker.submissions[1].prompt


async def test_what_is_not_said_is_what_openai_takes_it_to_be(client: AsyncOpenAI, fleet: FakeFleet) -> None:
    await client.completions.create(model="words", prompt=TEXT, seed=-1)

    (worker,) = fleet.workers
    (sent,) = worker.submissions
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.top_k) == (1.0, 1.0, 0)
    assert (sent.max_tokens, sent.samples, sent.sampling.seed) == (16, 1, (1 << 64) - 1)


async def test_every_form_of_sampling_reaches_the_worker(http: httpx2.AsyncClient, fleet: FakeFleet) -> None:
    knobs = {"min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2, "top_k": 7}
    more = {"logit_bias": {"9": -3.5, "5": 100}, "stop_token_ids": [11], "min_tokens": 2, "best_of": 3, "n": 2}
    search = {"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.5, "early_stopping": True}
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 3, "cache_salt": "s"}
    for path, body in (
        ("completions", {"prompt": [5, 6], "max_tokens": 2, "echo": True, "logprobs": 4} | knobs | more),
        ("completions", {"prompt": [5, 6], "max_tokens": 2} | search),
        ("completions", {"prompt": [5, 6], "max_tokens": 2} | search | {"early_stopping": "never"}),
        ("chat/completions", {"max_tokens": 2, "timeout_seconds": 30, "retain_seconds": 60, "priority": -7} | chat),
    ):
        await http.post(f"/v1/{path}", json=body)

    drawn, searched, exhausted, chatted = fleet.workers[0].submissions
    sampling = drawn.sampling
    assert {name: getattr(sampling, name) for name in knobs} == knobs
    assert sampling.logit_bias == ((5, 100.0), (9, -3.5))
    assert drawn.stop_tokens == {11, words.EOS_TOKEN}
    assert (drawn.min_tokens, drawn.samples, drawn.logprobs, drawn.prompt_logprobs) == (2, 3, 4, 4)
    assert searched.beam == BeamSearch(width=4, length_penalty=0.5, early_stopping=True)
    assert (searched.sampling.temperature, searched.samples) == (0.0, 2)
    assert exhausted.beam == BeamSearch(width=4, length_penalty=0.5, exhaustive=True)
    assert (chatted.logprobs, chatted.prompt_logprobs, chatted.retain_seconds) == (5, 3, 60)
    assert chatted.scope.salt
    assert chatted.priority == -7


async def test_text_becomes_tokens_and_tokens_text(http: httpx2.AsyncClient, client: AsyncOpenAI) -> None:
    text = (await http.post("/tokenize", json={"prompt": TEXT})).json()
    chat = (await http.post("/tokenize", json={"messages": HELLO})).json()
    back = (await http.post("/detokenize", json={"tokens": text["tokens"]})).json()
    whole = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    answer = await client.chat.completions.create(model="words", messages=HELLO, max_tokens=1)

    assert back == {"prompt": TEXT}
    assert text["count"] == len(text["tokens"])
    assert text["max_model_len"] == words.MAX_MODEL_TOKENS
    assert whole["prompt"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage is not None
    assert chat["count"] == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": ""}, "prompt"),
        ("detokenize", {"tokens": [1 << 40]}, "tokens[0]"),
        ("detokenize", {"tokens": [1, words.VOCAB_SIZE]}, "tokens[1]"),
        ("detokenize", {"tokens": []}, "tokens"),
    ],
)
async def test_what_is_no_text_and_no_tokens_is_refused(
    path: str, body: dict[str, Any], param: str, http: httpx2.AsyncClient
) -> None:
    answer = await http.post(f"/{path}", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_the_models_are_listed_and_found_by_name(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data

    assert model == await client.models.retrieve("words")
    assert model.id == "words"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("someone/else")


# ---- refusals --------------------------------------------------------------------------------------------------

TOO_MUCH = "x" * (1 << 20)
REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "an unknown field": ("completions", {"prompt": "x", "temprature": 1}, 400, "temprature", "no such field"),
    "no prompt": ("completions", {}, 400, "prompt", "required"),
    "an empty prompt": ("completions", {"prompt": ""}, 400, "prompt", "empty"),
    "no prompts": ("completions", {"prompt": []}, 400, "prompt", "at least 1"),
    "a prompt of no kind": ("completions", {"prompt": [1, -5]}, 400, "prompt[0][1]", "0"),
    "a token that is none": ("completions", {"prompt": [400]}, 400, "prompt[0]", "vocabulary has 400"),
    "a number as text": ("completions", {"prompt": "x", "top_k": "5"}, 400, "top_k", "integer"),
    "no tokens": ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    "more than the model takes": ("completions", {"prompt": "x", "max_tokens": 5000}, 400, None, "1024"),
    "a huge number": ("completions", {"prompt": "x", "temperature": 1e300}, 400, "temperature", "32 bits"),
    "a huge whole number": ("completions", {"prompt": "x", "n": 1 << 40}, 400, "n", "2147483647"),
    "too many samples": ("completions", {"prompt": "x", "n": 65}, 400, "n", "64"),
    "a number for the one truth that is served": (
        "chat/completions",
        {"messages": HELLO, "parallel_tool_calls": 1},
        400,
        "parallel_tool_calls",
        "constrained decoding",
    ),
    "a suffix": ("completions", {"prompt": "x", "suffix": "end"}, 400, "suffix", "'end'"),
    "stream options alone": ("completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options", "stream"),
    "an unknown model": ("completions", {"prompt": "x", "model": "gpt-17"}, 404, "model", "words"),
    "an image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        400,
        "messages[0].content[0].type",
        "text only",
    ),
    "no messages": ("chat/completions", {"messages": []}, 400, "messages", "at least 1"),
    "a role that the template refuses": (
        "chat/completions",
        {"messages": [{"role": "nobody", "content": "x"}]},
        400,
        "messages",
        "nobody may not speak",
    ),
    "a bias out of range": ("completions", {"prompt": "x", "logit_bias": {"7": 101}}, 400, "logit_bias[7]", "100"),
    "a bias of no token": ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias.x", "pattern"),
    "a bias with leading zeros": (
        "completions",
        {"prompt": "x", "logit_bias": {"5": 1, "05": 2}},
        400,
        "logit_bias",
        "pattern",
    ),
    "a best of too few": (
        "completions",
        {"prompt": "x", "n": 3, "best_of": 2},
        400,
        "best_of",
        "n (3)",
    ),
    "a search that draws": (
        "completions",
        {"prompt": "x", "use_beam_search": True, "temperature": 0.5},
        400,
        "temperature",
        "temperature: 0.5 with use_beam_search, wanted 0",
    ),
    "logprobs of a search": (
        "chat/completions",
        {"messages": HELLO, "use_beam_search": True, "logprobs": True},
        400,
        "logprobs",
        "logprobs: 0 with use_beam_search, wanted none: of a search only each text's cumulative_logprob is told",
    ),
    "more choices than a search keeps": (
        "completions",
        {"prompt": "x", "use_beam_search": True, "best_of": 2, "n": 3},
        400,
        "n",
        "n: 3 with best_of 2, wanted at most as many",
    ),
    "a search for too much": (
        "completions",
        {"prompt": "x", "use_beam_search": True, "best_of": 65},
        400,
        "best_of",
        "64",
    ),
    "a search that is none": ("completions", {"prompt": "x", "length_penalty": 2}, 400, "length_penalty", "use_beam"),
    "a stream told in no parts": (
        "completions",
        {"prompt": "x", "stream": True, "stream_interval": 0},
        400,
        "stream_interval",
        "wanted 1 to 1024",
    ),
    "a prompt's logprobs in a stream": (
        "completions",
        {"prompt": "x", "prompt_logprobs": 1, "stream": True},
        400,
        "prompt_logprobs",
        "stream",
    ),
    "likeliest tokens without logprobs": (
        "chat/completions",
        {"messages": HELLO, "top_logprobs": 2},
        400,
        "top_logprobs",
        "without logprobs",
    ),
    "a tool that must be called": (
        "chat/completions",
        {"messages": HELLO, "tool_choice": "required"},
        400,
        "tool_choice",
        "constrained decoding",
    ),
    "a tool that is no function": (
        "chat/completions",
        {"messages": HELLO, "tools": [{"type": "browser", "function": {"name": "x"}}]},
        400,
        "tools[0].type",
        "functions",
    ),
    "tools that the model knows nothing of": (
        "chat/completions",
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "x"}}]},
        400,
        "tools",
        "takes none",
    ),
    "a salt of a page": ("completions", {"prompt": "x", "cache_salt": "s" * 1025}, 400, "cache_salt", "at most 1024"),
    "a form for the answer": (
        "chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_object"}},
        400,
        "response_format.type",
        "constrained decoding",
    ),
    "no output under the newer name": (
        "chat/completions",
        {"messages": HELLO, "max_completion_tokens": -1},
        400,
        "max_completion_tokens",
        "max_completion_tokens: -1, wanted at least 1",
    ),
    "less than is wanted at least, under the newer name": (
        "chat/completions",
        {"messages": HELLO, "max_completion_tokens": 2, "min_tokens": 3},
        400,
        "min_tokens",
        "min_tokens: 3, wanted at most max_completion_tokens (2)",
    ),
    "more than a pool holds, under the newer name": (
        "chat/completions",
        {"messages": HELLO, "max_completion_tokens": 1 << 30, "max_tokens": 1},
        400,
        None,
        "prompt + max_completion_tokens: ",
    ),
    "no output under the older name": (
        "chat/completions",
        {"messages": HELLO, "max_tokens": 0},
        400,
        "max_tokens",
        "max_tokens: 0, wanted at least 1",
    ),
    "a very long name": ("completions", {"prompt": "x", "model": "m" * 900_000}, 404, "model", "characters in all"),
    "more than a body may hold": ("completions", {"prompt": TOO_MUCH}, 413, None, "1048576"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[FakeFleet, Gateway]]:
    """For requests that change nothing, one after the other."""
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        async with gateway(running, tmp_path_factory.mktemp("house")) as front:
            yield running, front


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_served_is_refused_by_its_field(name: str, house: tuple[FakeFleet, Gateway]) -> None:
    path, body, status, param, said = REFUSED[name]
    fleet, front = house
    async with httpx2.AsyncClient(base_url=front.http) as http:
        answer = await http.post(f"/v1/{path}", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert said in error["message"]
    assert len(answer.content) < 1000
    assert front.at_rest()
    assert not fleet.workers[0].submissions


@pytest.mark.parametrize("body", [b'{"prompt":"\\ud800"}', b'{"prompt": NaN}', b"{", b"[" * 100_000, b"", b"[]"])
async def test_a_body_that_is_no_json_object_is_refused(body: bytes, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body: ")


@pytest.mark.parametrize("sent", ["application/x-www-form-urlencoded", "text/plain", None])
async def test_a_body_that_is_not_said_to_be_json_is_refused_by_its_header(
    sent: str | None, http: httpx2.AsyncClient
) -> None:
    headers = {} if sent is None else {"content-type": sent}
    answer = await http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)

    assert answer.status_code == 415
    found = "absent" if sent is None else repr(sent)
    assert answer.json()["error"]["message"] == f"content-type: {found}, wanted application/json"


@pytest.mark.parametrize("sent", ["application/json; charset=utf-8", "Application/JSON"])
async def test_json_is_json_however_it_is_written(sent: str, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": sent})
    assert answer.status_code == 200


async def test_a_temperature_that_openai_would_refuse_is_served_at_both_doors(
    http: httpx2.AsyncClient, front: Gateway, fleet: FakeFleet
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "x", "temperature": 2.5, "max_tokens": 1})
    await front.client.complete(Generation(prompt=TextPrompt("x"), temperature=2.5, max_tokens=1))

    assert answer.status_code == 200
    assert [sent.sampling.temperature for sent in fleet.workers[0].submissions] == [2.5, 2.5]


async def test_paths_and_methods_that_are_not_there_are_refused_alike(http: httpx2.AsyncClient) -> None:
    answers = [await http.get("/v1/nothing"), await http.get("/v1/completions")]

    assert [answer.status_code for answer in answers] == [404, 405]
    assert all(answer.json()["error"]["type"] == "invalid_request_error" for answer in answers)
    assert answers[1].headers["allow"] == "POST"


async def test_head_is_answered_as_get_is_without_a_body(http: httpx2.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing", "/v1/completions"):
        get, head = await http.get(path), await http.head(path)

        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-length"] == str(len(get.content))


async def test_every_answer_has_an_id_of_its_own(http: httpx2.AsyncClient) -> None:
    answers = [
        await http.get("/v1/nothing"),
        await http.get("/health"),
        await http.post("/v1/completions", json={"prompt": "x"}),
    ]

    assert len({answer.headers["x-request-id"] for answer in answers}) == 3
    assert answers[2].json()["id"] == f"cmpl-{answers[2].headers['x-request-id']}"


@pytest.mark.parametrize(
    ("cls", "known"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openais_is_known_here(cls: Any, known: Any) -> None:
    """Served, taken without effect, or refused with a reason of its own."""
    assert get_type_hints(known).keys() <= cls.model_fields.keys()


async def test_a_full_house_says_when_to_come_again(fleet: FakeFleet, client: AsyncOpenAI) -> None:
    fleet.workers[0].refuses_with = PoolExhausted("wanted 3 blocks, 1 available")
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model="words", prompt="x")

    assert refused.value.code == "rate_limit_exceeded"
    assert int(refused.value.response.headers["retry-after"]) >= 1


async def test_a_model_without_a_worker_is_unavailable_for_now(tmp_path: Path) -> None:
    soon = Bounds(max_wait_seconds=0.05)
    async with fake_fleet() as fleet, gateway(fleet, tmp_path, soon) as front, openai_client(front) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="words", prompt="x")

    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.code == "no_worker"


async def test_a_deadline_that_passes_is_a_timeout(fleet: FakeFleet, client: AsyncOpenAI, front: Gateway) -> None:
    fleet.workers[0].gate.clear()
    with pytest.raises(openai.InternalServerError) as refused:
        await client.completions.create(model="words", prompt="x", extra_body={"timeout_seconds": 0.05})

    assert (refused.value.status_code, refused.value.code) == (504, "deadline_exceeded")
    await fleet.workers[0].until(lambda worker: not worker.running)


async def test_an_error_in_mid_stream_is_the_streams_last_event(fleet: FakeFleet, client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model="words", prompt=[5, 6, 7], max_tokens=1000, stream=True)
    await anext(aiter(stream))
    await fleet.workers[0].die()

    with pytest.raises(openai.APIError, match="worker"):
        async for _ in stream:
            pass


# ---- a client that leaves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8, 9]]])
async def test_a_client_that_leaves_stops_the_worker_once(
    stream: bool, prompt: Any, fleet: FakeFleet, front: Gateway, http: httpx2.AsyncClient
) -> None:
    """S15, over HTTP: once for each prompt."""
    (worker,) = fleet.workers
    body = {"prompt": prompt, "max_tokens": 1000, "stream": stream}
    prompts = len(prompt) if isinstance(prompt[0], list) else 1
    if not stream:
        worker.gate.clear()
    asking = asyncio.create_task(left_early(http, body))
    await worker.until(lambda worker: len(worker.submissions) == prompts)
    if not stream:
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    await worker.until(lambda worker: not worker.running)
    await until_at_rest(front)
    assert sorted(worker.cancelled) == list(range(1, prompts + 1))


async def left_early(http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
    """Ask, and leave after the first event."""
    async with http.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
        async for _ in answer.aiter_bytes():
            return


async def test_a_request_that_ends_by_itself_is_not_cancelled(fleet: FakeFleet, http: httpx2.AsyncClient) -> None:
    """S15: none after normal ends, whichever way it was told, and whether the connection is used again or not."""
    for stream in (True, False, True, False):
        await http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 3, "stream": stream})
    await http.aclose()

    assert fleet.workers[0].cancelled == []


async def until_at_rest(front: Gateway) -> None:
    """Return when the gateway counts nothing any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not front.at_rest():
            await front.load()


# ---- tenants and operators -------------------------------------------------------------------------------------


async def test_with_a_tenants_file_a_key_is_wanted(fleet: FakeFleet, tmp_path: Path) -> None:
    tenancy = Tenancy(write_tenants(tmp_path / "tenants.toml", acme="sesame"))
    async with gateway(fleet, tmp_path, tenancy=tenancy) as front, httpx2.AsyncClient(base_url=front.http) as http:
        async with openai_client(front, "sesame") as client:
            answer = await client.completions.create(model="words", prompt="x", max_tokens=2)
        async with openai_client(front, "abracadabra") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.completions.create(model="words", prompt="x", max_tokens=2)
        keyless = [
            await http.get("/v1/models"),
            await http.get("/metrics"),
            await http.post("/v1/chat/completions", content=b"no JSON"),
        ]
        open_to_all = [await http.get(path) for path in ("/health", "/version", "/openapi.json")]

    assert answer.choices
    assert refused.value.code == "invalid_api_key"
    assert [each.status_code for each in keyless] == [401] * 3
    assert [each.status_code for each in open_to_all] == [200] * 3
    assert len(fleet.workers[0].submissions) == 1


async def test_the_metrics_are_those_of_the_gateway(http: httpx2.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": "x"})
    families = text_string_to_metric_families((await http.get("/metrics")).text)

    counted = {sample.name: sample.value for family in families for sample in family.samples}
    assert counted["octavo_requests_total"] == 1
    assert counted["process_cpu_seconds_total"] > 0
