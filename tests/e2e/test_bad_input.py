"""Every request that cannot be served is told why, and changes nothing."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from octavo.v1 import cache_manager_pb2, gateway_pb2, types_pb2
from octavo.wire.flat import pack
from tests.support.cluster import Client, greedy, prose, request_of, smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
STALE = grpc.StatusCode.FAILED_PRECONDITION
POOL_TOKENS = 364 * 16
MODEL_TOKENS = 8192
VOCABULARY = 49152


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with smollm2(workers=1) as running:
        await running.ask(prose(0, 40), max_tokens=4)
        yield running


REFUSED: dict[str, tuple[gateway_pb2.GenerateRequest, grpc.StatusCode, list[str]]] = {
    "no prompt": (request_of(None), INVALID, ["prompt"]),
    "an empty text": (request_of(""), INVALID, ["prompt.text"]),
    "no token ids": (gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenIds()), INVALID, ["prompt.tokens.ids"]),
    "an empty chat": (gateway_pb2.GenerateRequest(chat=gateway_pb2.Chat()), INVALID, ["prompt.chat.messages"]),
    "an unknown token": (
        request_of([5, VOCABULARY]),
        INVALID,
        ["prompt.tokens.ids[1]", str(VOCABULARY)],
    ),
    "a prompt longer than the model": (request_of([7] * 9000), INVALID, ["prompt", "9000", str(MODEL_TOKENS)]),
    "a prompt and output larger than the pool": (
        request_of([7] * 5000, max_tokens=1000),
        INVALID,
        ["max_tokens", "5000", "1000", str(POOL_TOKENS)],
    ),
    "negative max tokens": (request_of("hello", max_tokens=-3), INVALID, ["max_tokens", "-3"]),
    "zero max tokens": (request_of("hello", max_tokens=0), INVALID, ["max_tokens", "0"]),
    "a negative temperature": (request_of("hello", temperature=-0.5), INVALID, ["temperature", "-0.5"]),
    "a temperature that is no number": (request_of("hello", temperature=float("nan")), INVALID, ["temperature", "nan"]),
    "top_p of zero": (request_of("hello", top_p=0.0), INVALID, ["top_p", "0", "(0, 1]"]),
    "top_p above one": (request_of("hello", top_p=1.5), INVALID, ["top_p", "1.5", "(0, 1]"]),
    "negative top_k": (request_of("hello", top_k=-1), INVALID, ["top_k", "-1"]),
    "negative samples": (request_of("hello", n=-2), INVALID, ["n", "-2"]),
    "an empty stop string": (request_of("hello", stop=[""]), INVALID, ["stop[0]"]),
    "an unknown model": (
        request_of("hello", model="gpt-17"),
        grpc.StatusCode.NOT_FOUND,
        ["model", "gpt-17", "smollm2"],
    ),
    "ten megabytes": (request_of("a" * 10_000_000), INVALID, ["prompt.text", "10000000"]),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_cannot_be_served_changes_nothing(client: Client, name: str) -> None:
    request, status, said = REFUSED[name]
    before = await client.at_rest()

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in client.gateway.Generate(request, timeout=30):
            pass

    assert refused.value.code() is status
    for part in said:
        assert part in str(refused.value.details())
    assert await client.at_rest() == before


async def test_text_that_is_not_utf8_is_refused_by_name_and_place(client: Client) -> None:
    before = await client.at_rest()
    text = gateway_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
    raw = bytes([text << 3 | 2, 3, ord("a"), 0xFF, ord("b")])
    generate: Any = client.channel.unary_stream("/octavo.v1.Inference/Generate")

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in generate(raw, timeout=30):
            pass

    assert refused.value.code() is INVALID
    assert str(refused.value.details()).startswith("text: not UTF-8 at byte 1")
    assert await client.at_rest() == before


# ---- a worker that is not what it says -----------------------------------------------------------------------


def registration() -> cache_manager_pb2.AttendRequest:
    """Of a worker of another model, so that no request of this one is sent to it; nobody listens at its address."""
    pool = types_pb2.PoolSpec(
        model="another",
        model_digest=b"m" * 32,
        tokenizer_digest=b"t" * 32,
        dtype="float32",
        kv_dtype="float32",
        block_size=16,
        num_blocks=8,
        max_model_tokens=128,
        vocab_size=100,
    )
    register = cache_manager_pb2.Register(worker_id="stranger", incarnation=1, address="127.0.0.1:9", pool=pool)
    return cache_manager_pb2.AttendRequest(register=register)


async def attend(client: Client, *, register: bool, epoch_offset: int, **exchange: Any) -> None:
    """Speak to the cache manager as a worker: perhaps register, then send one exchange and wait for its answer."""
    call = client.manager.Attend(timeout=30)
    epoch = 1
    if register:
        await call.write(registration())
        reply = await call.read()
        epoch = reply.registered.epoch
    message = cache_manager_pb2.Exchange(epoch=epoch + epoch_offset, step=1, **exchange)
    await call.write(cache_manager_pb2.AttendRequest(exchange=message))
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param({"register": False, "epoch_offset": 0}, STALE, "registered", id="an unknown worker's exchange"),
        pytest.param({"register": True, "epoch_offset": -1}, STALE, "epoch", id="a stale epoch"),
        pytest.param(
            {"register": True, "epoch_offset": 0, "finished": pack([77])},
            grpc.StatusCode.NOT_FOUND,
            "77",
            id="the end of an unknown sequence",
        ),
    ],
)
async def test_a_worker_that_says_nonsense_is_refused(
    client: Client, words: dict[str, Any], status: grpc.StatusCode, said: str
) -> None:
    before = await client.at_rest()

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await attend(client, **words)

    assert refused.value.code() is status
    assert said in str(refused.value.details())
    [audit] = await client.audits()
    assert audit.violation == ""
    assert audit.num_blocks == before.num_blocks


async def test_after_all_that_the_next_request_is_right(client: Client) -> None:
    prompt = prose(300, 30)

    answer = await client.ask(prompt, model="smollm2", max_tokens=6)

    assert answer.tokens[0] == greedy(prompt, 6)
