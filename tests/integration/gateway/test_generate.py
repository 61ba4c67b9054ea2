"""What a client gets for a request, through a real gateway and workers that answer a prompt with the prompt."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.bounds import Bounds
from gateway.client import AsyncClient, Client
from gateway.client.messages import generation_to_wire
from gateway.core.events import Delta, Event, Finished, Started, Usage
from gateway.core.in_flight import PromptBlocks
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TextPrompt, TokenPrompt
from gateway.metrics import GatewayMetrics
from gateway.prefix_lookup import Hits, RedisLookup
from octavo.errors import Draining, InvalidRequest, QueueFull
from octavo.hashing import block_hashes
from octavo.records.fleet import WorkerInfo
from octavo.records.generate import IndexState
from octavo.records.scope import PLAIN, Scope
from octavo.records.serve import FinishReason
from octavo.redis_client import open_client
from octavo.v1 import gateway_pb2 as v1
from tests.support import words
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.memory_lookup import MemoryLookup
from tests.support.redis_server import redis_server

BLOCK = 16
TEXT = "An octavo is a book, 本を読む: "


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        await running.add("b", words_pool())
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path) as running:
        yield running


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(words.tokenizer().encode(text).ids)


# ---- prompts and outputs -------------------------------------------------------------------------------------


async def test_text_comes_back_as_it_grows_and_the_bill_at_the_end(front: Gateway) -> None:
    prompt = tokens_of(TEXT)
    request = Generation(prompt=TextPrompt(TEXT), max_tokens=len(prompt))

    events = [event async for event in front.client.generate(request)]

    started, *deltas, finished, usage = events
    assert isinstance(started, Started)
    assert (started.prompt_tokens, started.predicted_cached_tokens) == (len(prompt), 0)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == TEXT
    assert tuple(token for delta in deltas if isinstance(delta, Delta) for token in delta.token_ids) == prompt
    assert finished == Finished(0, FinishReason.LENGTH)
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (len(prompt), 0, len(prompt))
    assert usage.worker_id == started.worker_id
    assert 0 < usage.time_to_first_token_seconds <= usage.total_seconds


async def test_a_chat_reaches_the_worker_through_the_models_template(fleet: FakeFleet, front: Gateway) -> None:
    await front.client.complete(Generation(prompt=ChatPrompt((ChatMessage("user", "本?"),)), max_tokens=1))

    [sent] = [submission for worker in fleet.workers for submission in worker.submissions]
    rendered = words.tokenizer().decode(list(sent.prompt), skip_special_tokens=False)
    assert rendered == "<|im_start|>user\n本?<|im_end|>\n<|im_start|>assistant\n"


async def test_token_ids_reach_the_worker_as_they_are_with_every_wish(fleet: FakeFleet, front: Gateway) -> None:
    await front.client.complete(
        Generation(
            prompt=TokenPrompt((5, 6, 7)), max_tokens=4, samples=2, temperature=0.5, top_k=9, top_p=0.25, seed=2**64 - 1
        )
    )

    [sent] = [submission for worker in fleet.workers for submission in worker.submissions]
    assert (sent.prompt, sent.max_tokens, sent.samples) == ((5, 6, 7), 4, 2)
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 9, 0.25, 2**64 - 1)
    assert sent.stop_tokens == {words.EOS_TOKEN}


async def test_a_request_without_a_seed_gets_one_of_its_own(fleet: FakeFleet, front: Gateway) -> None:
    for _ in range(2):
        await front.client.complete(Generation(prompt=TokenPrompt((5,)), max_tokens=1, temperature=1.0))

    first, second = [submission for worker in fleet.workers for submission in worker.submissions]
    assert first.sampling.seed != second.sampling.seed


async def test_max_tokens_unset_is_the_default_or_what_the_pool_leaves(fleet: FakeFleet, front: Gateway) -> None:
    short = await front.client.complete(Generation(prompt=TokenPrompt((5,))))
    long = await front.client.complete(Generation(prompt=TokenPrompt((5,) * 1000)))
    assert (short.usage.output_tokens, long.usage.output_tokens) == (256, 24)


async def test_samples_grow_side_by_side_and_the_prompt_is_billed_once(front: Gateway) -> None:
    """S26, the gateway's part."""
    answer = await front.client.complete(Generation(prompt=TextPrompt(TEXT), samples=4, max_tokens=5))

    assert len(answer.samples) == 4
    assert len({sample.token_ids for sample in answer.samples}) == 1
    assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (len(tokens_of(TEXT)), 20)


@pytest.mark.parametrize("ignored", [False, True])
async def test_the_models_own_end_ends_a_sample_unless_it_is_ignored(front: Gateway, ignored: bool) -> None:
    request = Generation(prompt=TokenPrompt((5, 6, words.EOS_TOKEN, 7)), max_tokens=4, ignore_eos=ignored)
    [sample] = (await front.client.complete(request)).samples
    assert sample.finish_reason is (FinishReason.LENGTH if ignored else FinishReason.STOP)
    assert len(sample.token_ids) == (4 if ignored else 2)


async def test_a_stop_string_over_token_borders_ends_the_text_and_the_work(fleet: FakeFleet, front: Gateway) -> None:
    """S2: the text ends before the stop string, and the worker is told to stop."""
    request = Generation(prompt=TextPrompt(TEXT), max_tokens=500, stop=("を読", "never"))
    answer = await front.client.complete(request)

    assert answer.text == "An octavo is a book, 本"
    assert answer.samples[0].finish_reason is FinishReason.STOP
    assert answer.usage.output_tokens == len(answer.samples[0].token_ids) < len(tokens_of(TEXT))
    [busy] = [worker for worker in fleet.workers if worker.submissions]
    await busy.until(lambda worker: worker.cancelled == [1] and not worker.running)


async def test_a_sample_that_met_a_stop_string_is_ended_at_the_worker_before_the_others(
    fleet: FakeFleet, front: Gateway
) -> None:
    request = Generation(prompt=TextPrompt(TEXT), max_tokens=500, samples=3, stop=("を読",))
    await front.client.complete(request)

    [busy] = [worker for worker in fleet.workers if worker.submissions]
    await busy.until(lambda worker: worker.cancelled == [1] and not worker.running)
    assert busy.cancelled_samples == [(1, 0), (1, 1)]


async def test_many_requests_at_once_each_get_their_own_words(front: Gateway) -> None:
    texts = [f"{at} {TEXT}" for at in range(40)]
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(
                front.client.complete(Generation(prompt=TextPrompt(text), max_tokens=len(tokens_of(text))))
            )
            for text in texts
        ]
    assert [answer.result().text for answer in answers] == texts


# ---- routing -------------------------------------------------------------------------------------------------


async def test_prompts_behind_one_prefix_follow_its_holder_and_a_stranger_goes_elsewhere(
    front: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "octavo.gateway")
    system = tuple(5 + at % 300 for at in range(512))
    answers = [
        await front.client.complete(Generation(prompt=TokenPrompt((*system, 10 + at, 11, 12)), max_tokens=2))
        for at in range(6)
    ]
    stranger = await front.client.complete(Generation(prompt=TokenPrompt((400 - 1,) * 200), max_tokens=2))

    holder = answers[0].usage.worker_id
    assert [answer.usage.cached_tokens for answer in answers] == [0, *[512] * 5]
    assert [answer.usage.predicted_cached_tokens for answer in answers] == [0, *[512] * 5]
    ended: list[Any] = [record for record in caplog.records if record.getMessage() == "request_ended"]
    assert [(one.predicted_cached_tokens, one.cached_tokens) for one in ended] == [(0, 0), *[(512, 512)] * 5, (0, 0)]
    assert {answer.usage.worker_id for answer in answers} == {holder}
    assert stranger.usage.worker_id != holder
    load = await front.load()
    assert (load.predicted_cached_tokens, load.delivered_cached_tokens) == (5 * 512, 5 * 512)


async def test_a_burst_behind_one_cold_prefix_is_sent_to_one_worker(fleet: FakeFleet, front: Gateway) -> None:
    """S37: no worker has said anything yet of what it computes."""
    for worker in fleet.workers:
        worker.gate.clear()
    prompts = [(*range(6 * BLOCK), *[100 + at] * 8) for at in range(8)]

    async with asyncio.TaskGroup() as asking:
        for prompt in prompts:
            asking.create_task(front.client.complete(Generation(prompt=TokenPrompt(prompt), max_tokens=2)))
        await _until_load(front, running=8, waiting=0)
        for worker in fleet.workers:
            worker.gate.set()

    assert sorted(len(worker.submissions) for worker in fleet.workers) == [0, 8]


@pytest.mark.redis
async def test_a_second_gateway_sends_a_burst_where_the_first_one_has_sent_it(fleet: FakeFleet, tmp_path: Path) -> None:
    """S37, through two gateways: no worker has said or published anything yet of what it computes."""
    for name in ("c", "d"):
        await fleet.add(name, words_pool())
    for worker in fleet.workers:
        worker.gate.clear()
    prompts = [tuple(range(at, at + 6 * BLOCK + 5)) for at in range(5, 10)]

    async with redis_server() as server, AsyncExitStack() as stack, asyncio.TaskGroup() as asking:
        lookups = [RedisLookup(open_client(server.url), PATIENCE_SECONDS) for _ in "12"]
        for each in lookups:
            stack.push_async_callback(each.close)
        first, second = [
            await stack.enter_async_context(gateway(fleet, tmp_path / str(at), lookup=each))
            for at, each in enumerate(lookups)
        ]
        for prompt in prompts:
            request = Generation(prompt=TokenPrompt(prompt), max_tokens=2)
            asking.create_task(first.client.complete(request))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not (await lookups[1].hits(PromptBlocks(prompt, PLAIN), second.dispatcher.fleet)).claimed:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            asking.create_task(second.client.complete(request))
            await _until_sent(fleet, prompt, 2)
        at_worker = [[sent.prompt for sent in worker.submissions] for worker in fleet.workers]
        for worker in fleet.workers:
            worker.gate.set()

    for prompt in prompts:
        assert sorted(sent.count(prompt) for sent in at_worker) == [0, 0, 0, 2]


async def _until_sent(fleet: FakeFleet, prompt: tuple[int, ...], times: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum(sent.prompt == prompt for worker in fleet.workers for sent in worker.submissions) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_prompts_of_different_salts_share_nothing(fleet: FakeFleet, front: Gateway) -> None:
    """S51."""
    prompt = TokenPrompt(tuple(range(5, 5 + 4 * BLOCK)))
    cached = [
        (await front.client.complete(Generation(prompt=prompt, max_tokens=1, cache_salt=salt))).usage.cached_tokens
        for salt in ("x", "x", "y", "", "")
    ]
    assert cached == [0, 3 * BLOCK, 0, 0, 3 * BLOCK]
    assert {len(sent.scope.salt) for worker in fleet.workers for sent in worker.submissions} == {0, 32}


class LateIndex(MemoryLookup):
    """Answers from the moment it is asked, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        found = await super().hits(prompt, workers)
        self.asked.set()
        await self.may_answer.wait()
        return found


@pytest.mark.parametrize(
    ("meanwhile", "credited", "dropped"),
    [
        ({}, 3 * BLOCK, 0),
        ({"epoch": 2, "incarnation": 2}, 0, 1),
        ({"cache_epoch": 1}, 0, 1),
    ],
    ids=["as it was", "another process", "reset"],
)
async def test_what_a_worker_held_before_it_was_replaced_is_dropped_computed_again_and_counted(
    tmp_path: Path, meanwhile: dict[str, int], credited: int, dropped: int
) -> None:
    """S41: the index answers, late, about books that have been replaced since it was asked."""
    request = Generation(prompt=TokenPrompt(tuple(range(5, 5 + 4 * BLOCK))), max_tokens=4)
    async with fake_fleet() as fleet:
        fleet.index = index = LateIndex()
        worker = await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path) as front:
            before = await front.client.complete(request)
            index.asked.clear()
            index.may_answer.clear()
            asking = asyncio.create_task(_events(front, request))
            await index.asked.wait()
            if meanwhile:
                worker.forget()
                worker.info = replace(worker.info, **meanwhile)
                fleet.manager.tell(worker.info)
                await front.until_fleet(lambda _: front.dispatcher.fleet == (worker.info,))
            index.may_answer.set()
            started, *deltas, _, usage = await asking

            assert isinstance(started, Started)
            assert isinstance(usage, Usage)
            assert (started.predicted_cached_tokens, usage.cached_tokens) == (credited, credited)
            assert usage.predicted_cached_tokens == credited
            text = [token for delta in deltas if isinstance(delta, Delta) for token in delta.token_ids]
            assert tuple(text) == before.samples[0].token_ids
            [told] = [
                sample.value
                for family in GatewayMetrics(front.dispatcher).collect()
                for sample in family.samples
                if sample.name == "octavo_outdated_hits_total"
            ]
            assert told == dropped


async def _events(front: Gateway, request: Generation) -> list[Event]:
    return await _all(front.client.generate(request))


async def _all(events: AsyncGenerator[Event]) -> list[Event]:
    return [event async for event in events]


async def test_only_workers_with_room_for_a_request_are_chosen(tmp_path: Path) -> None:
    async with fake_fleet() as fleet:
        small = await fleet.add("small", words_pool(num_blocks=4))
        large = await fleet.add("large", words_pool(num_blocks=32))
        async with gateway(fleet, tmp_path) as front:
            for _ in range(6):
                await front.client.complete(Generation(prompt=TokenPrompt((5,) * 60), max_tokens=5))
    assert (len(small.submissions), len(large.submissions)) == (0, 6)


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has(
    fleet: FakeFleet, front: Gateway, tmp_path: Path
) -> None:
    a, b = fleet.workers
    a.gate.clear()
    b.gate.clear()
    running = [
        asyncio.create_task(front.client.complete(Generation(prompt=TokenPrompt((5,)), max_tokens=2))) for _ in "ab"
    ]
    for worker in fleet.workers:
        await worker.until(lambda worker: len(worker.submissions) == 1)
    fleet.drain(a)
    await front.until_fleet(lambda _: any(worker.draining for worker in front.dispatcher.fleet))
    a.gate.set()
    b.gate.set()
    for _ in range(4):
        await front.client.complete(Generation(prompt=TokenPrompt((5,)), max_tokens=1))

    assert [(await task).usage.output_tokens for task in running] == [2, 2]
    assert (len(a.submissions), len(b.submissions)) == (1, 5)

    fleet.drain(b)
    async with gateway(fleet, tmp_path / "brief", Bounds(max_wait_seconds=0.01)) as brief:
        await brief.until_fleet(lambda _: all(worker.draining for worker in brief.dispatcher.fleet))
        with pytest.raises(Draining, match="all 2 workers of words"):
            await brief.client.complete("x")


# ---- the door ------------------------------------------------------------------------------------------------


async def test_beyond_the_queue_requests_are_refused_and_those_in_it_are_served_in_turn(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_running=1, max_waiting=1)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        request = Generation(prompt=TokenPrompt((5,)), max_tokens=1)
        first = asyncio.create_task(front.client.complete(request))
        await _until_load(front, running=1, waiting=0)
        second = asyncio.create_task(front.client.complete(request))
        await _until_load(front, running=1, waiting=1)

        with pytest.raises(QueueFull, match="1 requests run and 1 wait, at most 1 and 1"):
            await front.client.complete(request)
        for worker in fleet.workers:
            worker.gate.set()

        assert [(await task).usage.output_tokens for task in (first, second)] == [1, 1]


async def test_waiting_for_a_place_has_a_bound(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_running=1, max_waiting=1, max_wait_seconds=0.01)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        first = front.stub.Generate(v1.GenerateRequest(text="x", max_tokens=1), timeout=20)
        await first.read()

        with pytest.raises(QueueFull, match=r"waited \d+\.\d s while 1 requests ran"):
            await front.client.complete("x")
        first.cancel()


@pytest.mark.parametrize("max_running", [1, 2])
async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(
    fleet: FakeFleet, tmp_path: Path, max_running: int
) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_running=max_running)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        first = front.stub.Generate(v1.GenerateRequest(text="x", max_tokens=1), timeout=20)
        await first.read()

        with pytest.raises(TimeoutError):
            await front.client.complete("x", timeout_seconds=0.2)
        first.cancel()
        await _until_load(front, running=0, waiting=0)
        assert front.at_rest()


async def test_a_request_without_a_deadline_has_the_gateways(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_request_seconds=0.5)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        with pytest.raises(TimeoutError, match=r"no end after 0\.5 s"):
            await front.client.complete("x")
        assert front.at_rest()


async def test_a_gateway_that_drains_refuses_and_finishes_what_it_has(fleet: FakeFleet, front: Gateway) -> None:
    for worker in fleet.workers:
        worker.gate.clear()
    running = asyncio.create_task(front.client.complete(Generation(prompt=TokenPrompt((5,)), max_tokens=3)))
    await _until_load(front, running=1, waiting=0)
    draining = asyncio.create_task(front.dispatcher.drain(PATIENCE_SECONDS))

    with pytest.raises(Draining):
        await front.client.complete("x")
    for worker in fleet.workers:
        worker.gate.set()
    assert (await running).usage.output_tokens == 3
    await draining
    assert front.at_rest()


async def test_a_drain_waits_for_a_request_whose_text_is_still_read(front: Gateway) -> None:
    reading = asyncio.create_task(_all(front.dispatcher.generate(Generation(prompt=TextPrompt("x")), None)))
    await asyncio.sleep(0)  # it has come, and is at the tokenizer's thread

    await front.dispatcher.drain(PATIENCE_SECONDS)

    assert reading.done()
    assert isinstance((await reading)[-1], Usage)


async def test_a_request_that_comes_to_a_door_that_is_closed_is_told_so_at_once(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    """Its text was read until there was no more time, and whoever had the only place has not left yet."""
    endless = Generation(prompt=TokenPrompt((5,)), max_tokens=1000)
    async with (
        gateway(fleet, tmp_path, Bounds(max_running=1)) as front,
        aclosing(front.dispatcher.generate(endless, None)) as first,
    ):
        await anext(first)
        second = asyncio.create_task(_all(front.dispatcher.generate(Generation(prompt=TextPrompt("x")), None)))
        await asyncio.sleep(0)
        draining = asyncio.create_task(front.dispatcher.drain(0.0, PATIENCE_SECONDS))

        with pytest.raises(Draining, match="were not enough"):
            await second
        assert front.dispatcher.running == 1
        await first.aclose()
        await draining
        assert front.at_rest()


async def test_what_a_draining_gateway_cannot_end_in_time_is_refused_with_its_type(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    """S57, the gateway's part: one that runs and one that waits for a place; the worker hears that nobody listens."""
    async with gateway(fleet, tmp_path, Bounds(max_running=1)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        requests = [asyncio.create_task(front.client.complete("x")) for _ in range(2)]
        await _until_load(front, running=1, waiting=1)

        await front.dispatcher.drain(0.01)

        for request in requests:
            with pytest.raises(Draining, match=r"0\.01 s were not enough"):
                await request
        for worker in fleet.workers:
            await worker.until(lambda worker: not worker.running)
        assert front.at_rest()


async def test_a_gateway_that_drains_has_told_every_client_before_it_stops(
    fleet: FakeFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S57: nobody of many sees a bare CANCELLED or UNAVAILABLE, as a server leaves that stops in mid-call. Nor does an
    operator read that workers were lost."""
    caplog.set_level("INFO", "octavo.gateway")
    async with gateway(fleet, tmp_path, Bounds(max_running=128)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        requests = [asyncio.create_task(front.client.complete("x")) for _ in range(96)]
        await _until_load(front, running=96, waiting=0)

        await front.dispatcher.drain(0.0, PATIENCE_SECONDS)
        left = front.dispatcher.running

        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert left == 0
        assert {type(end) for end in ends} == {Draining}
        assert "worker_lost_under_request" not in caplog.messages


# ---- what else can be asked, and the clients -----------------------------------------------------------------


async def test_the_models_are_those_that_some_worker_serves(fleet: FakeFleet, front: Gateway) -> None:
    await fleet.add("poet", words_pool(model="verses"))
    await front.until_fleet(lambda names: len(names) == 3)

    reply = await front.stub.ListModels(v1.ListModelsRequest(), timeout=10)

    assert [(model.name, model.max_model_tokens, model.workers) for model in reply.models] == [
        ("words", words.MAX_MODEL_TOKENS, 2)
    ]


async def test_the_fleet_is_shown_as_the_manager_described_it(fleet: FakeFleet, front: Gateway) -> None:
    state = await front.client.fleet(timeout_seconds=10)
    workers = {worker.worker_id: worker for worker in state.workers}
    assert workers == {worker.info.worker_id: worker.info for worker in fleet.workers}


async def test_the_clients_tell_what_the_gateway_has_in_hand(fleet: FakeFleet, front: Gateway) -> None:
    for worker in fleet.workers:
        worker.gate.clear()
    async with aclosing(front.client.generate(Generation(prompt=TokenPrompt((5, 6)), max_tokens=1))) as events:
        assert isinstance(await anext(events), Started)  # and no more, since the worker stands still
        state = await front.client.fleet()
        with Client(front.address) as client:
            same = await asyncio.to_thread(client.fleet)

    assert state == same
    assert (state.gateway.running_requests, state.gateway.waiting_requests, state.gateway.requests) == (1, 0, 1)
    assert (state.gateway.refused, state.gateway.index_state) == (0, IndexState.EXACT)


@pytest.mark.parametrize("request_", ["the quick brown fox", Generation(prompt=TokenPrompt((5, 6)), cache_salt="s")])
async def test_both_clients_explain_a_request_and_nothing_runs(
    fleet: FakeFleet, front: Gateway, request_: Generation | str
) -> None:
    told = await front.client.explain(request_)
    with Client(front.address) as client:
        same = await asyncio.to_thread(client.explain, request_)

    assert {worker.worker_id for worker in told.workers} == {"a", "b"}
    assert told.chosen in {"a", "b"}
    assert told.index_state is IndexState.EXACT
    assert (same.prompt_tokens, same.workers) == (told.prompt_tokens, told.workers)
    assert not any(worker.submissions for worker in fleet.workers)


async def test_the_synchronous_client_gives_the_same_events(front: Gateway) -> None:
    def ask() -> tuple[list[object], str]:
        with Client(front.address) as client:
            request = Generation(prompt=TextPrompt(TEXT), max_tokens=5, seed=1)
            return list(client.generate(request)), client.complete(request).text

    events, text = await asyncio.to_thread(ask)
    answer = await front.client.complete(Generation(prompt=TextPrompt(TEXT), max_tokens=5))

    assert [type(event) for event in events if not isinstance(event, Delta)] == [Started, Finished, Usage]
    assert text == answer.text


async def test_clients_get_the_very_error_that_the_gateway_raised(front: Gateway) -> None:
    request = Generation(prompt=TextPrompt("x"), top_p=2.0)
    with pytest.raises(InvalidRequest, match="top_p: 2"):
        await front.client.complete(request)

    def ask() -> None:
        with Client(front.address) as client:
            client.complete(request)

    with pytest.raises(InvalidRequest, match="top_p: 2"):
        await asyncio.to_thread(ask)


async def test_a_gateway_that_is_not_there_is_a_connection_error() -> None:
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(ConnectionError, match=r"gateway 127\.0\.0\.1:9"):
            await client.complete("x")


async def _until_load(front: Gateway, *, running: int, waiting: int) -> None:
    """Ask until it is so; the test's own bound ends it."""
    while True:
        load = await front.load()
        if (load.running_requests, load.waiting_requests) == (running, waiting):
            return


def test_the_status_of_a_full_queue_is_resource_exhausted() -> None:
    from octavo.status import STATUS_OF

    assert STATUS_OF[QueueFull] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_explain_names_every_term_and_the_worker_that_the_request_then_goes_to(
    fleet: FakeFleet, front: Gateway
) -> None:
    prompt = tuple(range(2, 2 + 4 * BLOCK))
    [holder] = [info for info in front.dispatcher.fleet if info.worker_id == "b"]
    hashes = block_hashes(holder.chain_root(Scope()).hash(), prompt, BLOCK)
    fleet.index.publish(holder.worker_id, holder.epoch, hashes[:3])
    asked = Generation(prompt=TokenPrompt(prompt), max_tokens=1)

    told = await front.client.explain(asked)
    assert not any(worker.submissions for worker in fleet.workers)
    assert front.at_rest()

    predicted = {worker.worker_id: worker.predicted_cached_tokens for worker in told.workers}
    costs = {worker.worker_id: worker.cost for worker in told.workers if worker.cost is not None}
    assert predicted == {"a": 0, "b": 3 * BLOCK}
    assert {name: cost.prefill_tokens for name, cost in costs.items()} == {"a": 4 * BLOCK, "b": BLOCK}
    assert costs["b"].others_tokens == 0
    assert costs["b"].total < costs["a"].total
    raw = await front.stub.Explain(v1.ExplainRequest(request=generation_to_wire(asked)), timeout=10)
    assert {worker.worker_id: worker.cost.total for worker in raw.workers} == {
        name: cost.total for name, cost in costs.items()
    }
    assert (told.chosen, told.index_state) == ("b", IndexState.EXACT)

    answer = await front.client.complete(asked)
    assert answer.usage.worker_id == told.chosen
