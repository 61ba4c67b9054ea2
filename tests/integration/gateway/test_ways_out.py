"""Every way in which a request can end gives back what it held: at the gateway and at the worker."""

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import httpx2
import pytest

from gateway.bounds import Bounds
from gateway.core.events import Delta, Event, Finished, Started, Usage
from gateway.core.in_flight import PromptBlocks
from gateway.core.interval import Interval
from gateway.core.request import Generation, TextPrompt, TokenPrompt
from gateway.prefix_lookup import Hits
from gateway.worker_client import Workers
from octavo.errors import Draining, InvalidRequest, PoolExhausted, WorkerLost
from octavo.ids import Epoch, Incarnation
from octavo.records.fleet import WorkerInfo
from octavo.records.serve import FinishReason, SampleFinished, StepReport, Submission, Tokens
from octavo.service import open_channel
from octavo.v1 import gateway_pb2 as v1
from octavo.v1 import gateway_pb2_grpc as v1_grpc
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, FakeWorker, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.memory_lookup import MemoryLookup
from tests.support.tcp_proxy import tcp_proxy

BRIEF = Bounds(max_standstill_seconds=0.01)
"""For a gateway that finds nobody."""

ENDLESS = Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=1000)


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        await running.add("b", words_pool())
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path, Bounds(max_running=8, max_waiting=2000)) as running:
        yield running


def chosen(fleet: FakeFleet, started: Event | None = None) -> tuple[FakeWorker, FakeWorker]:
    """(the worker that has the request, the other one): as the request's first event says, or as they know by now."""
    has = [
        worker.info.worker_id == started.worker_id if isinstance(started, Started) else bool(worker.submissions)
        for worker in fleet.workers
    ]
    assert sorted(has) == [False, True]
    return fleet.workers[has.index(True)], fleet.workers[has.index(False)]


async def begin(worker: FakeWorker) -> None:
    """Let a worker whose gate is closed say the first four tokens of its one request, and no more."""
    await worker.until(lambda worker: bool(worker.submissions))
    number = worker.submissions[0].request
    worker.say(StepReport(tokens=(Tokens(number, 0, (5, 6, 7, 5)),)))


async def tokens_of(events: AsyncGenerator[Event]) -> list[int]:
    return [token async for event in events if isinstance(event, Delta) for token in event.token_ids]


async def until_at_rest(front: Gateway) -> None:
    """Return when the gateway counts nothing any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not front.at_rest():
            await front.load()


# ---- the client leaves ---------------------------------------------------------------------------------------


async def test_a_client_that_leaves_in_mid_stream_stops_the_worker_once(fleet: FakeFleet, front: Gateway) -> None:
    """S15."""
    call = front.stub.Generate(v1.GenerateRequest(tokens=v1.TokenIds(ids=[5, 6, 7]), max_tokens=1000), timeout=60)
    started, delta = await call.read(), await call.read()
    call.cancel()

    assert (started.WhichOneof("kind"), delta.WhichOneof("kind")) == ("started", "delta")
    busy, other = chosen(fleet)
    await busy.until(lambda worker: not worker.running)
    await until_at_rest(front)
    assert (busy.cancelled, other.cancelled) == ([1], [])
    assert len(busy.submissions) == 1


async def test_a_client_whose_socket_closes_in_mid_stream_stops_the_worker_once(
    fleet: FakeFleet, front: Gateway
) -> None:
    """S15: it says nothing before."""
    port = int(front.address.rpartition(":")[2])
    async with tcp_proxy(port) as way, open_channel(f"127.0.0.1:{way.port}") as channel:
        request = v1.GenerateRequest(tokens=v1.TokenIds(ids=[5, 6, 7]), max_tokens=1000)
        call = v1_grpc.InferenceStub(channel).Generate(request, timeout=60)
        kinds = [(await call.read()).WhichOneof("kind") for _ in range(2)]
        await way.close()

        assert kinds == ["started", "delta"]
        busy, other = chosen(fleet)
        await busy.until(lambda worker: not worker.running)
        await until_at_rest(front)
        assert (busy.cancelled, other.cancelled) == ([1], [])


async def test_a_client_that_leaves_before_the_first_token_stops_the_worker(fleet: FakeFleet, front: Gateway) -> None:
    """S15."""
    for worker in fleet.workers:
        worker.gate.clear()
    events = front.client.generate(ENDLESS)
    busy, _ = chosen(fleet, await anext(events))
    await busy.until(lambda worker: bool(worker.running))
    await events.aclose()

    await busy.until(lambda worker: not worker.running)
    await until_at_rest(front)
    assert busy.cancelled == [1]


async def test_a_client_that_leaves_the_queue_never_reaches_a_worker(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_running=1)) as front:
        for worker in fleet.workers:
            worker.gate.clear()
        first = front.client.generate(ENDLESS)
        await anext(first)
        waits = asyncio.create_task(front.client.complete(ENDLESS))
        while not (await front.load()).waiting_requests:
            pass
        waits.cancel()
        while (await front.load()).waiting_requests:
            pass
        await first.aclose()
        await until_at_rest(front)

    assert sum(len(worker.submissions) for worker in fleet.workers) == 1


async def test_a_request_that_ends_by_itself_is_not_cancelled(fleet: FakeFleet, front: Gateway) -> None:
    """S15: none after normal ends. The second request's report comes behind whatever the first had sent."""
    for _ in range(2):
        await front.client.complete(Generation(prompt=TokenPrompt((5,)), max_tokens=3))
    assert [worker.cancelled for worker in fleet.workers] == [[], []]


async def test_after_many_requests_cancelled_at_any_stage_everything_counts_zero(
    fleet: FakeFleet, front: Gateway
) -> None:
    """S38: of a thousand, a third end by themselves, a third are left after some events, a third are never heard."""
    random = Random(38)

    async def whole(request: Generation) -> None:
        await front.client.complete(request)

    async def left_after_some_events(request: Generation) -> None:
        events = front.client.generate(request)
        for _ in range(random.randint(1, 5)):
            await anext(events, None)
        await events.aclose()

    async def left_unheard(request: Generation) -> None:
        unheard = asyncio.create_task(front.client.complete(request))
        for _ in range(random.randint(0, 3)):
            await front.load()
        unheard.cancel()

    async with asyncio.TaskGroup() as group:
        for at in range(1000):
            request = Generation(prompt=TextPrompt(f"{at} octavo"), max_tokens=random.randint(1, 6))
            group.create_task(random.choice((whole, left_after_some_events, left_unheard))(request))
    await until_at_rest(front)

    for worker in fleet.workers:
        await worker.until(lambda worker: not worker.running)
    load = await front.load()
    assert (load.running_requests, load.waiting_requests, load.refused) == (0, 0, 0)
    assert front.dispatcher.reservations == 0


# ---- the worker leaves ---------------------------------------------------------------------------------------


async def test_a_worker_that_dies_before_its_first_token_is_replaced(fleet: FakeFleet, front: Gateway) -> None:
    for worker in fleet.workers:
        worker.gate.clear()
    events = front.client.generate(Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=3))
    busy, other = chosen(fleet, await anext(events))
    await busy.until(lambda worker: bool(worker.running))
    await busy.die()
    other.gate.set()

    assert await tokens_of(events) == [5, 6, 7]
    assert len(other.submissions) == 1
    assert front.at_rest()


async def test_a_worker_that_dies_in_mid_stream_is_not_noticed_by_the_client(fleet: FakeFleet, front: Gateway) -> None:
    """S25: the other worker gets the prompt and what there is of the output, and makes the rest."""
    for worker in fleet.workers:
        worker.gate.clear()
    events = front.client.generate(replace(ENDLESS, max_tokens=40))
    busy, other = chosen(fleet, await anext(events))
    await begin(busy)
    heard = [await anext(events)]
    other.gate.set()
    await busy.die()
    heard += [event async for event in events]

    tokens = [token for event in heard if isinstance(event, Delta) for token in event.token_ids]
    assert tokens == [5, 6, 7] * 13 + [5]
    [carried] = other.submissions
    assert carried.prompt[: carried.output_begins] == (5, 6, 7)
    assert carried.prompt[3:] == tuple(tokens[: carried.carried_tokens])
    usage = heard[-1]
    assert isinstance(usage, Usage)
    assert (usage.worker_id, usage.carried_over) == (other.info.worker_id, 1)
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 40)
    assert front.at_rest()


@pytest.mark.parametrize("field", ["model_digest", "adapter_digest"])
async def test_a_text_that_one_version_of_a_model_began_is_finished_by_no_other_one(field: str, tmp_path: Path) -> None:
    """S8: the name is the same, the weights are not, and a text of both would be nobody's. One that has no token yet
    may go to either.
    """
    async with fake_fleet() as fleet, gateway(fleet, tmp_path, BRIEF) as front:
        old = await fleet.add("old", words_pool())
        await front.until_fleet(lambda names: names == ["old"])
        old.gate.clear()
        unbegun = front.client.generate(replace(ENDLESS, max_tokens=3))
        await anext(unbegun)
        begun = front.client.generate(ENDLESS)
        await anext(begun)
        await old.until(lambda worker: len(worker.submissions) == 2)
        old.say(StepReport(tokens=(Tokens(old.submissions[1].request, 0, (5, 6)),)))
        assert isinstance(await anext(begun), Delta)
        new = await fleet.add("new", words_pool(**{field: b"2" * 32}))
        await front.until_fleet(lambda names: names == ["new", "old"])
        await old.die()
        assert await tokens_of(unbegun) == [5, 6, 7]
        with pytest.raises(WorkerLost):
            await tokens_of(begun)
        assert [submission.carried_tokens for submission in new.submissions] == [0]
        assert front.at_rest()


async def test_samples_go_on_from_where_each_of_them_was(fleet: FakeFleet, front: Gateway) -> None:
    """n = 3, one of which a stop string has ended: only the others are asked for again, under their own numbers."""
    for worker in fleet.workers:
        worker.gate.clear()
    request = Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=6, samples=3)
    events = front.client.generate(request)
    busy, other = chosen(fleet, await anext(events))
    await busy.until(lambda worker: bool(worker.submissions))
    number = busy.submissions[0].request
    busy.say(StepReport(tokens=(Tokens(number, 0, (5, 6)), Tokens(number, 1, (5,)), Tokens(number, 2, (5, 6)))))
    busy.say(StepReport(finished=(SampleFinished(number, 2, FinishReason.STOP),)))
    heard: list[Event] = []
    while not any(isinstance(event, Finished) for event in heard):
        heard.append(await anext(events))
    other.gate.set()
    await busy.die()
    heard += [event async for event in events]

    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in heard:
        if isinstance(event, Delta):
            tokens[event.sample] += event.token_ids
    assert tokens == {0: [5, 6, 7, 5, 6, 7], 1: [5, 6, 7, 5, 6, 7], 2: [5, 6]}
    assert [(part.first_sample, part.samples, part.carried_tokens) for part in other.submissions] == [
        (0, 1, 2),
        (1, 1, 1),
    ]
    assert sorted(event.sample for event in heard if isinstance(event, Finished)) == [0, 1, 2]
    assert front.at_rest()


async def test_when_every_worker_is_lost_the_client_is_told(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, BRIEF) as front:
        for worker in fleet.workers:
            await worker.die()
        with pytest.raises(WorkerLost):
            await front.client.complete("x")
        assert front.at_rest()


async def test_a_request_that_loses_every_worker_it_is_sent_to_is_given_up(tmp_path: Path) -> None:
    """One that takes its workers with it must not take them all."""
    async with fake_fleet() as fleet:
        for name in "abcd":
            (await fleet.add(name, words_pool())).ends_streams = True
        async with gateway(fleet, tmp_path, Bounds(max_attempts=3)) as front:
            with pytest.raises(WorkerLost):
                await front.client.complete("x")
            assert front.dispatcher.counters.carried_over == 2


async def test_a_request_waits_for_a_worker_that_is_started_anew(tmp_path: Path) -> None:
    async with fake_fleet() as fleet:
        old = await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path) as front:
            old.gate.clear()
            events = front.client.generate(replace(ENDLESS, max_tokens=40))
            heard = [await anext(events)]
            await begin(old)
            heard.append(await anext(events))
            await old.die()
            fleet.manager.tell(gone=(old.info.worker_id,))
            await front.until_fleet(lambda names: not names)
            await fleet.add("b", words_pool())
            heard += [event async for event in events]

    tokens = [token for event in heard if isinstance(event, Delta) for token in event.token_ids]
    assert tokens == [5, 6, 7] * 13 + [5]


async def test_a_worker_to_which_only_the_way_was_cut_is_asked_again(tmp_path: Path) -> None:
    """It is the only one, it is well, and its manager says so."""
    async with fake_fleet() as fleet:
        worker = await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path) as front:
            worker.gate.clear()
            running = asyncio.create_task(front.client.complete(replace(ENDLESS, max_tokens=4)))
            await worker.until(lambda worker: len(worker.submissions) == 1)
            worker.cut()
            await worker.until(lambda worker: len(worker.submissions) == 2)
            worker.gate.set()
            assert (await running).samples[0].token_ids == (5, 6, 7, 5)


async def test_what_a_worker_has_that_its_manager_gave_up_is_taken_from_it(fleet: FakeFleet, front: Gateway) -> None:
    """It may be cut off from every manager and stand still for want of blocks, with its streams as they were."""
    for worker in fleet.workers:
        worker.gate.clear()
    events = front.client.generate(Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=4))
    busy, other = chosen(fleet, await anext(events))
    await busy.until(lambda worker: bool(worker.running))
    other.gate.set()
    fleet.manager.tell(gone=(busy.info.worker_id,))

    assert await tokens_of(events) == [5, 6, 7, 5]
    assert len(other.submissions) == 1
    await busy.until(lambda worker: not worker.running)
    assert front.at_rest()


async def test_a_request_that_a_worker_hands_over_while_it_drains_goes_on_at_another(
    fleet: FakeFleet, front: Gateway
) -> None:
    for worker in fleet.workers:
        worker.gate.clear()
    running = asyncio.create_task(front.client.complete(Generation(prompt=TokenPrompt((5, 6)), max_tokens=2)))
    while not any(worker.submissions for worker in fleet.workers):
        await front.load()
    busy, other = chosen(fleet)
    busy.refuses_with = Draining("this worker drains")
    busy.gate.set()
    other.gate.set()

    assert (await running).usage.worker_id == other.info.worker_id
    assert busy.cancelled == []


async def test_a_worker_that_takes_nothing_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    """The only one, cut off from its manager for longer than a lease: it is well, and the manager comes back."""
    async with fake_fleet() as fleet:
        worker = await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path) as front:
            worker.refuses_with = Draining("the worker finds no cache manager and takes nothing new")
            running = asyncio.create_task(front.client.complete(replace(ENDLESS, max_tokens=4)))
            await worker.until(lambda worker: len(worker.submissions) == 2)
            worker.refuses_with = None
            assert (await running).samples[0].token_ids == (5, 6, 7, 5)
            assert front.at_rest()


async def test_a_worker_that_takes_nothing_for_good_ends_the_wait_with_its_reason(tmp_path: Path) -> None:
    """Standing still is bounded, however often the worker is asked meanwhile."""
    async with fake_fleet() as fleet:
        worker = await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path, Bounds(max_standstill_seconds=0.8)) as front:
            worker.refuses_with = Draining("it takes nothing new")
            with pytest.raises(Draining, match="it takes nothing new"):
                await front.client.complete(ENDLESS)
            assert len(worker.submissions) == 2
            assert front.at_rest()


@pytest.mark.parametrize("error", [InvalidRequest("prompt: no"), PoolExhausted("wanted 3 blocks, 1 available")])
async def test_what_a_worker_refuses_for_another_reason_the_client_hears(
    fleet: FakeFleet, front: Gateway, error: Exception
) -> None:
    for worker in fleet.workers:
        worker.refuses_with = error
    with pytest.raises(type(error), match=str(error)):
        await front.client.complete("x")
    assert sum(len(worker.submissions) for worker in fleet.workers) == 1
    assert front.at_rest()


@pytest.mark.parametrize(("incarnation", "streams"), [(0, 1), (1, 2)])
async def test_a_worker_that_registers_anew_goes_on_and_only_a_new_process_gets_a_new_stream(
    tmp_path: Path, incarnation: int, streams: int
) -> None:
    async with fake_fleet() as fleet:
        worker = await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path) as front:
            worker.gate.clear()
            old = front.client.generate(Generation(prompt=TokenPrompt((5, 6)), max_tokens=2))
            await anext(old)
            await worker.until(lambda worker: len(worker.submissions) == 1)
            worker.info = replace(worker.info, epoch=Epoch(2), incarnation=Incarnation(incarnation))
            fleet.manager.tell(worker.info)
            await front.until_fleet(lambda _: front.dispatcher.fleet[0].epoch == 2)
            new = asyncio.create_task(front.client.complete(Generation(prompt=TokenPrompt((7,)), max_tokens=1)))
            await worker.until(lambda worker: len(worker.submissions) == 2)
            assert worker.streams == streams
            worker.gate.set()

            assert await tokens_of(old) == [5, 6]
            assert (await new).samples[0].token_ids == (7,)
            fleet.manager.tell(worker.info)
            await worker.until(lambda worker: worker.streams == 1)


# ---- nobody leaves ------------------------------------------------------------------------------------------


class CancelledIndex(MemoryLookup):
    """Waits for something that is cancelled under it."""

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        raise asyncio.CancelledError


async def test_what_is_cancelled_under_a_request_is_told_as_a_bug_at_each_door(
    fleet: FakeFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client has cancelled nothing, and sees no CANCELLED, no connection cut off, and no silence."""
    async with (
        gateway(fleet, tmp_path, lookup=CancelledIndex()) as front,
        httpx2.AsyncClient(base_url=front.http, timeout=PATIENCE_SECONDS) as http,
    ):
        request = v1.GenerateRequest(tokens=v1.TokenIds(ids=[5, 6, 7]))
        codes: list[grpc.StatusCode] = []
        for call in (
            front.stub.Generate(request, timeout=PATIENCE_SECONDS),
            front.stub.GenerateBatch(v1.GenerateBatchRequest(requests=[request] * 2), timeout=PATIENCE_SECONDS),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
            codes.append(failed.value.code())
        answers = [await http.post("/v1/completions", json={"prompt": [5], "stream": how}) for how in (False, True)]

        assert codes == [grpc.StatusCode.INTERNAL] * 2
        assert [answer.status_code for answer in answers] == [500] * 2
        assert {answer.json()["error"]["code"] for answer in answers} == {"internal_error"}
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert said == ["call_failed"] * 4
        assert front.at_rest()


# ---- the cache manager leaves --------------------------------------------------------------------------------


async def test_while_the_manager_is_away_the_last_picture_stands_and_then_a_new_one_comes(
    fleet: FakeFleet, front: Gateway
) -> None:
    await fleet.manager.stop()
    answer = await front.client.complete(Generation(prompt=TokenPrompt((5,)), max_tokens=1))
    assert answer.usage.output_tokens == 1

    await fleet.manager.restart()
    await fleet.manager.news.until(lambda: fleet.manager.watchers == 1)
    await fleet.add("c", words_pool())
    fleet.manager.tell(gone=(fleet.workers[0].info.worker_id,))
    await front.until_fleet(lambda names: names == ["b", "c"])


async def test_the_status_of_a_lost_worker_is_unavailable_with_its_reason(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, BRIEF) as front:
        for worker in fleet.workers:
            await worker.die()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in front.stub.Generate(v1.GenerateRequest(text="x"), timeout=20):
                pass
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("octavo-reason", "WorkerLost") in list(failed.value.trailing_metadata())


async def test_nothing_waits_on_for_a_stream_that_its_worker_has_ended(fleet: FakeFleet) -> None:
    """gRPC's reader of what the gateway says would, and Python complain of it some time later."""
    troubles: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: troubles.append(trouble["message"]))
    worker = fleet.workers[0]
    worker.gate.clear()

    async def until_it_is_lost(workers: Workers) -> None:
        part = Submission(request=0, prompt=(5, 6, 7), max_tokens=9, samples=1)
        call = workers.submit(worker.info, [part], Interval(1))
        await worker.until(lambda worker: bool(worker.submissions))
        worker.cut()
        with pytest.raises(WorkerLost):
            await call.hear()

    async with Workers() as workers:
        await until_it_is_lost(workers)
        workers.keep(())
        await worker.until(lambda worker: worker.streams == 0)
    gc.collect()
    await asyncio.sleep(0)
    assert troubles == []
