"""Several requests in one call, and text to tokens and back, through a real gateway."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from gateway import servicer
from gateway.bounds import Bounds
from gateway.client import Client, Completion, Model
from gateway.core.events import Finished, Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, Limits, TextPrompt
from octavo.errors import InvalidRequest, QueueFull, UnknownModel
from octavo.records.serve import FinishReason, Prefilled, SampleFinished, StepReport, Tokens
from octavo.v1 import gateway_pb2
from tests.support import words
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool

TEXT = "An octavo is a book, 本を読む: "


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path, Bounds(limits=Limits(max_prompt_bytes=2000, max_batch_requests=8))) as running:
        yield running


def asking(text: str, **fields: int) -> Generation:
    return Generation(prompt=TextPrompt(text), **{"max_tokens": 5} | fields)


# ---- batches -------------------------------------------------------------------------------------------------


async def test_a_bad_request_of_a_batch_fails_alone(front: Gateway) -> None:
    good, bad, other = await front.client.complete_batch([asking("one two"), asking("x", samples=-1), "three"])
    alone = await front.client.complete(asking("one two"))

    assert isinstance(good, Completion)
    assert good.samples == alone.samples
    assert isinstance(bad, InvalidRequest)
    assert str(bad) == "n: -1, wanted 1 to 64"
    assert isinstance(other, Completion)
    assert front.at_rest()


async def test_replies_of_each_request_come_in_the_order_of_a_call_of_its_own(front: Gateway) -> None:
    heard: list[list[type]] = [[], []]
    async for at, event in front.client.generate_batch([asking(TEXT), asking("ab", samples=2)]):
        heard[at].append(type(event))
    for kinds, samples in zip(heard, (1, 2), strict=True):
        assert (kinds[0], kinds[-1]) == (Started, Usage)
        assert kinds.count(Finished) == samples


async def test_no_request_waits_for_another_of_its_batch(fleet: FakeFleet, front: Gateway) -> None:
    """The worker says nothing of the first before the second has ended."""
    [worker] = fleet.workers
    worker.gate.clear()
    ended: list[int] = []

    async def hear() -> None:
        batch = [asking(TEXT, max_tokens=200), asking("ab", max_tokens=1)]
        async for at, event in front.client.generate_batch(batch):
            if isinstance(event, Usage):
                ended.append(at)
                worker.gate.set()

    hearing = asyncio.create_task(hear())
    await worker.until(lambda worker: len(worker.running) == 2)
    [second] = [each.request for each in worker.submissions if each.max_tokens == 1]
    end = SampleFinished(second, 0, FinishReason.LENGTH)
    worker.say(StepReport(tokens=(Tokens(second, 0, (5,)),), prefilled=(Prefilled(second, 0),), finished=(end,)))
    await hearing
    assert ended == [1, 0]


@pytest.mark.parametrize("count", [0, 9])
async def test_a_batch_of_none_or_too_many_is_refused_as_a_whole(front: Gateway, count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"requests: {count}, wanted 1 to 8"):
        await front.client.complete_batch(["x"] * count)


async def test_a_client_that_leaves_a_batch_ends_all_of_it(fleet: FakeFleet, front: Gateway) -> None:
    [worker] = fleet.workers
    worker.gate.clear()
    async with aclosing(front.client.generate_batch([asking("a"), asking("b"), asking("c")])) as events:
        async for _ in events:
            await worker.until(lambda worker: len(worker.running) == 3)
            break
    await worker.until(lambda worker: len(worker.cancelled) == 3)
    while not front.at_rest():
        await front.load()


async def test_the_deadline_of_a_batch_ends_each_of_its_requests(fleet: FakeFleet, front: Gateway) -> None:
    [worker] = fleet.workers
    worker.gate.clear()
    try:
        outcomes = await front.client.complete_batch([asking("a"), asking("b")], timeout_seconds=0.2)
    except TimeoutError:
        pass  # the client's own clock was the first
    else:
        assert [type(outcome) for outcome in outcomes] == [TimeoutError, TimeoutError]
    while not front.at_rest():
        await front.load()


async def test_a_batch_takes_as_many_places_as_it_has_requests(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_running=1, max_waiting=1)) as front:
        fleet.workers[0].gate.clear()  # nobody ends before the last has come
        batch = asyncio.create_task(front.client.complete_batch([asking("a"), asking("b"), asking("c")]))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await front.load()).refused:
                pass
        fleet.workers[0].gate.set()
        outcomes = await batch
    [full] = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert full.retry_after_seconds
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Completion", "Completion", "QueueFull"]


# ---- tokens --------------------------------------------------------------------------------------------------


async def test_text_and_chat_become_the_tokens_that_a_worker_gets(fleet: FakeFleet, front: Gateway) -> None:
    chat = ChatPrompt((ChatMessage("user", "本?"),))
    for prompt in (TextPrompt(TEXT), chat):
        await front.client.complete(Generation(prompt=prompt, max_tokens=1))
        assert await front.client.tokenize(prompt) == fleet.workers[0].submissions[-1].prompt
    assert await front.client.tokenize(TEXT, model="words") == await front.client.tokenize(TextPrompt(TEXT))


async def test_tokens_become_text_again_with_special_ones_if_asked_for(front: Gateway) -> None:
    ids = await front.client.tokenize(TEXT)
    assert await front.client.detokenize(ids) == TEXT
    assert await front.client.detokenize([*ids, words.EOS_TOKEN]) == TEXT
    assert await front.client.detokenize([words.EOS_TOKEN], show_special_tokens=True) == "<|im_end|>"


async def test_what_a_padded_model_may_say_beyond_its_tokenizer_has_no_text(fleet: FakeFleet, front: Gateway) -> None:
    padded = replace(fleet.workers[0].info.pool, vocab_size=words.VOCAB_SIZE + 8)
    await fleet.add("padded", padded)
    await front.until_fleet(lambda names: "padded" in names)

    ids = await front.client.tokenize(TEXT)
    assert await front.client.detokenize([*ids, words.VOCAB_SIZE + 7]) == TEXT
    with pytest.raises(InvalidRequest, match=r"ids\[0\]: 408, vocabulary has 408"):
        await front.client.detokenize([words.VOCAB_SIZE + 8])


async def test_what_cannot_be_tokenised_is_refused_by_its_field(front: Gateway) -> None:
    client = front.client
    with pytest.raises(InvalidRequest, match=r"prompt\.text: 2001 bytes, at most 2000"):
        await client.tokenize("x" * 2001)
    with pytest.raises(InvalidRequest, match=r"prompt\.chat\.messages: 0 messages"):
        await client.tokenize(ChatPrompt(()))
    with pytest.raises(InvalidRequest, match="ids: 2004 bytes, at most 2000"):
        await client.detokenize([1] * 501)
    with pytest.raises(InvalidRequest, match="ids: empty"):
        await client.detokenize([])
    with pytest.raises(UnknownModel, match="model: 'other'"):
        await client.detokenize([1], model="other")
    with pytest.raises(InvalidRequest, match=r"ids\[1\]: 400, vocabulary has 400"):
        await client.detokenize([1, words.VOCAB_SIZE])
    with pytest.raises(InvalidRequest, match="ids: cannot be sent"):
        await client.detokenize([-1])


async def test_the_plain_client_says_the_same(front: Gateway) -> None:
    def ask() -> tuple[object, ...]:
        with Client(front.address) as client:
            ids = client.tokenize(TEXT)
            return (
                ids,
                client.detokenize(ids),
                client.models(),
                client.complete_batch([asking("a"), asking("b", samples=-1)]),
            )

    ids, text, models, (good, bad) = await asyncio.to_thread(ask)  # type: ignore[misc]
    assert ids == await front.client.tokenize(TEXT)
    assert text == TEXT
    assert models == (Model(name="words", max_model_tokens=words.MAX_MODEL_TOKENS, workers=1),)
    assert good.samples == (await front.client.complete(asking("a"))).samples
    assert isinstance(bad, InvalidRequest)


async def test_an_answer_that_plain_clients_could_not_read_is_refused_with_both_numbers(
    front: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await front.client.tokenize(TEXT)
    whole = gateway_pb2.TokenizeReply(ids=ids).ByteSize()
    assert servicer.MAX_REPLY_BYTES == 4 << 20, "gRPC's own limit"
    monkeypatch.setattr(servicer, "MAX_REPLY_BYTES", whole)
    assert await front.client.tokenize(TEXT) == ids

    monkeypatch.setattr(servicer, "MAX_REPLY_BYTES", whole - 1)
    why = f"prompt.text: {len(ids)} tokens, an answer of {whole} bytes, at most {whole - 1}; ask for it in parts"
    with pytest.raises(InvalidRequest, match=f"^{why}$"):
        await front.client.tokenize(TEXT)
    monkeypatch.setattr(servicer, "MAX_REPLY_BYTES", 9)
    with pytest.raises(InvalidRequest, match=r"^ids: 1 tokens, an answer of 12 bytes, at most 9; ask for it in parts$"):
        await front.client.detokenize([words.EOS_TOKEN], show_special_tokens=True)
