"""What cannot be served is refused with a status and a message that names field and numbers, and changes nothing."""

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gateway.bounds import Bounds
from gateway.core.events import Delta, Finished, Started, Usage
from gateway.core.request import Generation, Limits, TextPrompt, TokenPrompt
from octavo.errors import InvalidRequest
from octavo.v1 import gateway_pb2 as v1
from octavo.v1.types_pb2 import BeamSearch
from tests.support import words
from tests.support.fake_fleet import FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MEGABYTE = 1_000_000


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("small", words_pool(num_blocks=10))  # 160 positions
        await running.add("large", words_pool(num_blocks=20))  # 320 positions
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path, Bounds(limits=Limits(max_samples=64))) as running:
        yield running


def text(content: str = "hello", **fields: Any) -> v1.GenerateRequest:
    return v1.GenerateRequest(text=content, **fields)


def ids(*tokens: int, **fields: Any) -> v1.GenerateRequest:
    return v1.GenerateRequest(tokens=v1.TokenIds(ids=tokens), **fields)


def chat(*turns: tuple[str, str]) -> v1.GenerateRequest:
    return v1.GenerateRequest(chat=v1.Chat(messages=[v1.ChatMessage(role=role, content=said) for role, said in turns]))


BAD: dict[str, tuple[v1.GenerateRequest, str]] = {
    "no prompt": (v1.GenerateRequest(), "prompt: absent, wanted text, chat or tokens"),
    "empty text": (text(""), "prompt.text: empty, wanted at least one token"),
    "no tokens": (ids(), "prompt.tokens.ids: empty, wanted at least one token"),
    "no messages": (chat(), "prompt.chat.messages: 0 messages, wanted at least 1"),
    "no tools": (
        v1.GenerateRequest(chat=v1.Chat(messages=[v1.ChatMessage(role="user")], tools="{}")),
        "prompt.chat.tools: dict, wanted a list of objects",
    ),
    "no calls": (
        v1.GenerateRequest(chat=v1.Chat(messages=[v1.ChatMessage(role="user", tool_calls="[1]")])),
        "prompt.chat.messages[0].tool_calls[0]: int, wanted an object",
    ),
    "no role": (chat(("user", "a"), ("", "b")), "prompt.chat.messages[1].role: empty"),
    "a role that the template refuses": (chat(("nobody", "a")), "prompt.chat: the model's template refuses it: nobody"),
    "an unknown token": (ids(1, 2, 3, 70000), "prompt.tokens.ids[3]: 70000, vocabulary has 400"),
    "the first unknown token": (ids(5, words.VOCAB_SIZE), "prompt.tokens.ids[1]: 400, vocabulary has 400"),
    "a prompt longer than the model": (
        ids(*[5] * 1024),
        "prompt: 1024 tokens, the model takes 1024 with at least 1 of",
    ),
    "a prompt that fills the pool": (
        ids(*[5] * 320),
        "prompt + max_tokens: 320 + 1 = 321 tokens, the largest pool holds 320",
    ),
    "more output than the pool holds": (
        ids(*[5] * 20, max_tokens=301),
        "prompt + max_tokens: 20 + 301 = 321 tokens, the largest pool holds 320",
    ),
    "zero max_tokens": (text(max_tokens=0), "max_tokens: 0, wanted at least 1"),
    "negative max_tokens": (text(max_tokens=-7), "max_tokens: -7, wanted at least 1"),
    "negative n": (text(n=-1), "n: -1, wanted 1 to 64"),
    "retained in the past": (text(retain_seconds=-1), "retain_seconds: -1, wanted 0 to 604800"),
    "retained for a year": (text(retain_seconds=31_536_000), "retain_seconds: 31536000, wanted 0 to 604800"),
    "a stream told in no parts": (text(stream_interval=-1), "stream_interval: -1, wanted 1 to 1024"),
    "a stream told in huge parts": (text(stream_interval=1025), "stream_interval: 1025, wanted 1 to 1024"),
    "too many samples": (text(n=65), "n: 65, wanted 1 to 64"),
    "negative temperature": (text(temperature=-0.5), "temperature: -0.5, wanted at least 0 and finite"),
    "no temperature": (text(temperature=float("nan")), "temperature: nan, wanted at least 0 and finite"),
    "endless temperature": (text(temperature=float("inf")), "temperature: inf, wanted at least 0 and finite"),
    "top_p of 0": (text(top_p=0.0), "top_p: 0, wanted in (0, 1]"),
    "top_p above 1": (text(top_p=1.5), "top_p: 1.5, wanted in (0, 1]"),
    "top_p just above 1": (text(top_p=1.0000001), "top_p: 1.00000012, wanted in (0, 1]"),
    "top_p that is no number": (text(top_p=float("nan")), "top_p: nan, wanted in (0, 1]"),
    "negative top_k": (text(top_k=-3), "top_k: -3, wanted at least 0"),
    "min_p above 1": (text(min_p=1.5), "min_p: 1.5, wanted in [0, 1]"),
    "no repetition penalty": (text(repetition_penalty=0.0), "repetition_penalty: 0, wanted from 0.0625 to 16"),
    "too much presence": (text(presence_penalty=2.5), "presence_penalty: 2.5, wanted from -2 to 2"),
    "too much frequency": (text(frequency_penalty=-3.0), "frequency_penalty: -3, wanted from -2 to 2"),
    "too much bias": (text(logit_bias={7: -100.5}), "logit_bias[7]: -100.5, wanted from -100 to 100"),
    "too many biases": (text(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias: 1025 tokens, at most 1024"),
    "bias on an unknown token": (text(logit_bias={401: 1.0}), "logit_bias[0]: 401, vocabulary has 400"),
    "too many logprobs": (text(logprobs=21), "logprobs: 21, wanted from 0 to 20"),
    "too many prompt logprobs": (text(prompt_logprobs=21), "prompt_logprobs: 21, wanted from 0 to 20"),
    "an unknown stop token": (text(stop_token_ids=[3, 400]), "stop_token_ids[1]: 400, vocabulary has 400"),
    "too many stop tokens": (text(stop_token_ids=range(65)), "stop_token_ids: 65 ids, at most 64"),
    "negative min_tokens": (text(min_tokens=-1), "min_tokens: -1, wanted at least 0"),
    "min above max": (text(min_tokens=9, max_tokens=8), "min_tokens: 9, wanted at most max_tokens (8)"),
    "best of fewer than n": (text(n=3, best_of=2), "best_of: 2, wanted n (3) to 64"),
    "best of too many": (text(best_of=65), "best_of: 65, wanted n (1) to 64"),
    "no beams": (text(beam=BeamSearch(width=0)), "beam.width: 0, wanted from 1 to 64"),
    "too many beams": (text(beam=BeamSearch(width=65)), "beam.width: 65, wanted from 1 to 64"),
    "more samples than beams": (text(n=3, beam=BeamSearch(width=2)), "n: 3 with beam.width 2, wanted at most as many"),
    "an endless length penalty": (
        text(beam=BeamSearch(width=2, length_penalty=float("inf"))),
        "beam.length_penalty: inf, wanted from -8 to 8",
    ),
    "beams that draw": (text(temperature=0.5, beam=BeamSearch(width=2)), "temperature: 0.5 with beam, wanted 0"),
    "beams that hurry and wait": (
        text(beam=BeamSearch(width=2, early_stopping=True, exhaustive=True)),
        "beam.exhaustive: true with beam.early_stopping, wanted one of them at most",
    ),
    "a salt of a page": (text(cache_salt="é" * 513), "cache_salt: 1026 bytes, at most 1024"),
    "beams with logprobs": (text(logprobs=0, beam=BeamSearch(width=2)), "logprobs: 0 with beam, wanted none"),
    "the best of beams": (text(best_of=2, beam=BeamSearch(width=2)), "best_of: 2 with beam, wanted none"),
    "an empty stop string": (text(stop=["a", ""]), "stop[1]: 0 bytes, wanted 1 to 1024"),
    "a stop string without end": (text(stop=["é" * 513]), "stop[0]: 1026 bytes, wanted 1 to 1024"),
    "too many stop strings": (text(stop=["a"] * 17), "stop: 17 strings, at most 16"),
    "ten megabytes of text": (text("a" * 10 * MEGABYTE), "prompt.text: 10000000 bytes, at most 4194304"),
    "ten megabytes of chat": (
        chat(("user", "a" * 5 * MEGABYTE), ("user", "a" * 5 * MEGABYTE)),
        "prompt.chat: 10000008 bytes, at most 4194304",
    ),
    "ten megabytes of tokens": (ids(*[5] * 2_500_000), "prompt.tokens.ids: 10000000 bytes, at most 4194304"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_told_what_is_wrong_and_changes_nothing(
    fleet: FakeFleet, front: Gateway, name: str
) -> None:
    request, message = BAD[name]

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in front.stub.Generate(request, timeout=20):
            pass

    assert refused.value.code() is INVALID
    assert str(refused.value.details()).startswith(message)
    assert all(worker.submissions == [] and worker.streams == 0 for worker in fleet.workers)
    load = await front.load()
    assert (load.running_requests, load.waiting_requests, load.requests, load.refused) == (0, 0, 1, 1)


def oversized(kind: Descriptor) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, fields of a message of that kind, one of them longer than anybody needs), for each that can be long."""
    for field in kind.fields:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            yield field.name, {field.name: dict.fromkeys(range(20_000), 1)}
        elif entry is not None:
            for name, inner in oversized(entry):
                yield f"{field.name}.{name}", {field.name: [inner] if field.is_repeated else inner}
        elif field.type == FieldDescriptor.TYPE_STRING:
            yield field.name, {field.name: ["x" * 5 * MEGABYTE] if field.is_repeated else "x" * 5 * MEGABYTE}
        elif field.is_repeated:
            yield field.name, {field.name: [5] * 2 * MEGABYTE}


async def test_whatever_can_be_long_has_a_largest_size(fleet: FakeFleet, front: Gateway) -> None:
    """By the schema, so that a new field is refused here until it has one. A model is looked up and is not there."""
    prompts = {field.name for field in v1.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields}
    tried: list[str] = []
    for name, fields in oversized(v1.GenerateRequest.DESCRIPTOR):
        tried.append(name)
        request = v1.GenerateRequest(**fields if prompts & fields.keys() else {"text": "hello"} | fields)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in front.stub.Generate(request, timeout=20):
                pass
        wanted = grpc.StatusCode.NOT_FOUND if name == "model" else INVALID
        assert (refused.value.code(), name.partition(".")[0] in str(refused.value.details())) == (wanted, True), name

    assert len(tried) >= 12, tried
    assert all(worker.submissions == [] for worker in fleet.workers)


async def test_text_that_is_not_utf8_is_refused_by_name_and_place(fleet: FakeFleet, front: Gateway) -> None:
    generate: Any = front.channel.unary_stream("/octavo.v1.Inference/Generate")
    field = v1.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in generate(bytes([field << 3 | 2, 3, ord("a"), 0xFF, ord("b")]), timeout=20):
            pass

    assert (refused.value.code(), refused.value.details()) == (INVALID, "text: not UTF-8 at byte 1 of 3")
    assert all(worker.submissions == [] for worker in fleet.workers)


async def test_an_unknown_model_is_not_found_and_those_there_are_are_named(front: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in front.stub.Generate(text(model="gpt-17"), timeout=20):
            pass

    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert refused.value.details() == "model: 'gpt-17'; there are: words"


async def test_a_model_that_no_worker_serves_just_now_is_unavailable(tmp_path: Path) -> None:
    async with fake_fleet() as fleet:
        await fleet.add("stranger", words_pool(tokenizer_digest=b"?" * 32))
        await fleet.add("other", words_pool(model="verses"))
        async with gateway(fleet, tmp_path, Bounds(max_wait_seconds=0.05)) as front:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in front.stub.Generate(text(), timeout=20):
                    pass

    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert str(refused.value.details()).startswith("model: no worker serves 'words' now; there are: none; waited 0.")


async def test_the_impossible_is_refused_while_others_are_served(fleet: FakeFleet, front: Gateway) -> None:
    """S22: one request that can never fit, among small ones that wait for the workers."""
    for worker in fleet.workers:
        worker.gate.clear()
    small = [front.client.generate(Generation(prompt=TextPrompt("hello"), max_tokens=3)) for _ in range(4)]
    assert all([isinstance(await anext(events), Started) for events in small])

    with pytest.raises(InvalidRequest, match="20 \\+ 301 = 321 tokens, the largest pool holds 320"):
        await front.client.complete(Generation(prompt=TokenPrompt((5,) * 20), max_tokens=301))

    for worker in fleet.workers:
        worker.gate.set()
    for events in small:
        *deltas, finished, usage = [event async for event in events]
        assert sum(len(event.token_ids) for event in deltas if isinstance(event, Delta)) == 3
        assert isinstance(finished, Finished)
        assert isinstance(usage, Usage)
