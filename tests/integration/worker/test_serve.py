"""The worker's loop and its Serve stream, over real gRPC, with a real manager and a model that is a function."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from octavo.errors import Draining, InvalidRequest, OctavoError, QueueFull
from octavo.metrics import metrics_endpoint
from octavo.records.attend import Exchange, Grant
from octavo.records.serve import StepReport
from octavo.v1 import worker_pb2 as v1
from octavo.wire.serve import submission_to_wire
from tests.support import books
from tests.support.fakes import FunctionRunner, LedgerClient
from tests.support.scheduling import SAMPLED, submission
from tests.support.scrape import scrape
from tests.support.turnstile import LONG, POOL, SHORT, Turnstile, assert_served, computed_once, running_long
from tests.support.worker_service import (
    ManagerProcess,
    WorkerService,
    attend,
    manager_process,
    until,
    worker_service,
)
from worker.core.step import StepPlan
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox


@pytest.fixture
async def manager() -> AsyncGenerator[ManagerProcess]:
    async with manager_process() as manager:
        yield manager


@pytest.fixture
def runner() -> FunctionRunner:
    return FunctionRunner(POOL)


@pytest.fixture
async def worker(manager: ManagerProcess, runner: FunctionRunner) -> AsyncGenerator[WorkerService]:
    async with worker_service(POOL, runner, attend(manager)) as worker:
        yield worker


# ---- requests --------------------------------------------------------------------------------------------------


async def test_the_requests_of_two_gateways_get_the_texts_of_solo_runs(worker: WorkerService, manager: ManagerProcess):
    wanted = [submission(n, range(n, n + 9), 6, samples=1 + n % 3, sampling=SAMPLED) for n in range(8)]
    gateways = [worker.gateway(), worker.gateway()]
    for request in wanted:
        await gateways[request.request % 2].submit(request)
    for number, gateway in enumerate(gateways):
        await gateway.until_ended(*wanted[number::2])
        assert_served(gateway, *wanted[number::2])
    await until(lambda: manager.audit().held_blocks == 0)


async def test_a_step_sends_one_message_to_a_gateway(worker: WorkerService, runner: FunctionRunner):
    turnstile, gateway = Turnstile(runner), worker.gateway()
    wanted = [submission(n, range(n, n + 9), 4, samples=2, sampling=SAMPLED) for n in range(4)]
    for request in wanted:
        await gateway.submit(request)
    await until(lambda: worker.scheduler.load().waiting_sequences + worker.scheduler.load().running_sequences == 4)
    turnstile.let_through(100)
    await gateway.until_ended(*wanted)
    drawing = [step for step in runner.steps if any(chunk.draws for chunk in step.chunks)]
    assert len(gateway.reports) == len(drawing)


async def test_a_second_request_reports_what_it_found_of_the_first(worker: WorkerService):
    gateway = worker.gateway()
    for number, cached in ((1, 0), (2, 16)):
        wanted = submission(number, range(20), 2)
        await gateway.submit(wanted)
        await gateway.until_ended(wanted)
        assert gateway.heard.of(number).cached_tokens == cached


async def test_prometheus_is_told_of_steps_and_tokens(worker: WorkerService):
    gateway = worker.gateway()
    for number in (1, 2):
        wanted = submission(number, range(20), 3)
        await gateway.submit(wanted)
        await gateway.until_ended(wanted)
    async with metrics_endpoint("127.0.0.1:0", WorkerMetrics(worker.engine, worker.scheduler), lambda: True) as port:
        samples = await scrape(port)
    assert samples["octavo_prompt_tokens_total",] == 40
    assert samples["octavo_cached_tokens_total",] == 16
    assert samples["octavo_output_tokens_total",] == 6
    assert samples["octavo_computed_tokens_total",] == 20 + 4 + 2 * 2
    assert samples["octavo_steps_total",] == 6
    assert (samples["octavo_preemptions_total",], samples["octavo_failed_steps_total",]) == (0, 0)


async def test_a_cancelled_request_says_nothing_more_and_others_go_on(worker: WorkerService, manager: ManagerProcess):
    gateway = worker.gateway()
    await gateway.submit(LONG)
    await gateway.hear()
    await gateway.cancel(LONG.request)
    await gateway.submit(SHORT)
    await gateway.until_ended(SHORT)
    assert_served(gateway, SHORT)
    assert len(gateway.heard.of(LONG.request).tokens[0]) < LONG.max_tokens
    await until(lambda: manager.audit().held_blocks == 0)


async def test_who_follows_a_prompt_of_a_gateway_that_dies_takes_it_over(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    """Three wait for what a fourth computes, whose gateway goes while it does so. One of them computes it again."""
    turnstile, dying, staying = Turnstile(runner), worker.gateway(), worker.gateway()
    shared, own, output = list(range(40)), 2, 2
    await dying.submit(submission(0, [*shared, 500], 50))
    await turnstile.until_waiting(1)
    followers = [submission(n, [*shared, 500 + n, 600 + n], output) for n in range(1, 4)]
    for follower in followers:
        await staying.submit(follower)

    def has(sequences: int) -> bool:
        load = worker.scheduler.load()
        return load.running_sequences + load.waiting_sequences == sequences

    await until(lambda: has(4))
    dying.call.cancel()
    await until(lambda: has(3))
    turnstile.let_through(100)
    await staying.until_ended(*followers)

    assert_served(staying, *followers)
    lost = len(shared) + 1
    assert runner.computed_tokens == lost + len(shared) + len(followers) * (own + output - 1)
    await until(lambda: manager.audit().held_blocks == 0)


async def test_a_gateway_that_goes_takes_its_requests_along(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    """S15: the worker stops within a step or two, the blocks are free, the other gateway hears nothing of it."""
    turnstile, leaving, staying = Turnstile(runner), worker.gateway(), worker.gateway()
    await leaving.submit(LONG)
    turnstile.let_through(3)
    for _ in range(3):
        await leaving.hear()
    await turnstile.until_waiting(4)
    leaving.call.cancel()
    await until(lambda: worker.scheduler.load().running_sequences == 0)
    turnstile.let_through(100)
    await until(lambda: manager.audit().held_blocks == 0)
    assert len(runner.steps) == 4
    await staying.submit(SHORT)
    await staying.until_ended(SHORT)
    assert_served(staying, SHORT)


async def test_a_gateway_that_only_stops_speaking_has_ended_its_stream(worker: WorkerService, manager: ManagerProcess):
    gateway = worker.gateway()
    await gateway.submit(LONG)
    await gateway.hear()
    await gateway.call.done_writing()
    while await gateway.hear() is not None:
        pass
    await until(lambda: manager.audit().held_blocks == 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": b""}, "prompt: 0 tokens, wanted at least 1"),
        ({"prompt": b"abc"}, "submit.prompt: 3 bytes, wanted a multiple of 4"),
        ({"prompt": b"\xff\xff\xff\xff"}, "prompt: token id 4294967295 at position 0"),
        ({"samples": 0}, "samples: 0, wanted from 1 to 16"),
        ({"max_tokens": 0}, "max_tokens: 0, wanted from 1 to 256"),
        ({"max_tokens": 1000}, "max_tokens: 1000, wanted from 1 to 256"),
        ({"sampling": {"temperature": -1.0, "top_p": 1.0}}, "sampling.temperature: -1, wanted at least 0"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p: 0, wanted in"),
        ({"salt": b"short"}, "submit.salt: 5 bytes, wanted 0 or 32"),
        ({"tenant": b"short"}, "submit.tenant: 5 bytes, wanted 0 or 8"),
        ({"media": [{"position": 1, "digest": b"i" * 32}]}, "media: 1 of them, this worker takes none"),
        ({"request": 2}, "request: 2 is running on this stream already"),
    ],
)
async def test_a_bad_request_is_refused_by_itself(
    worker: WorkerService, runner: FunctionRunner, fields: dict[str, Any], reason: str
):
    turnstile, gateway = Turnstile(runner), worker.gateway()
    await gateway.submit(SHORT)
    message = submission_to_wire(LONG)
    for field in fields:
        message.ClearField(field)
    message.MergeFrom(v1.Submit(**fields))
    await gateway.say(v1.ServeRequest(submit=message))
    report = await gateway.hear()
    assert report is not None
    (refusal,) = report.refused
    assert refusal.request == message.request
    assert isinstance(refusal.error, InvalidRequest)
    assert reason in str(refusal.error)
    gateway.heard.of(SHORT.request).error = None  # where the refused one had its number
    turnstile.let_through(100)
    await gateway.until_ended(SHORT)
    assert_served(gateway, SHORT)


async def test_a_message_that_says_nothing_ends_the_stream_and_names_what_was_wanted(
    worker: WorkerService, caplog: pytest.LogCaptureFixture
):
    wanted = "serve: an empty message, wanted submit or cancel"
    gateway = worker.gateway()
    with caplog.at_level(logging.WARNING, "octavo.worker"):
        await gateway.say(v1.ServeRequest())
        with pytest.raises(InvalidRequest, match=wanted):
            await gateway.hear()
    assert [(record.msg, vars(record)["reason"]) for record in caplog.records] == [("gateway_cut_off", wanted)]


async def test_a_gateway_that_does_not_read_loses_its_stream_and_stalls_nobody():
    runner, client = FunctionRunner(POOL), LedgerClient()
    async with worker_service(POOL, runner, client, max_unread_reports=3) as worker:
        asleep, gateway = worker.engine.open_outbox(), worker.gateway()
        worker.engine.submit(asleep, LONG)
        await gateway.submit(SHORT)
        await gateway.until_ended(SHORT)
        await until(lambda: asleep.closed)
        read: list[StepReport] = []
        with pytest.raises(QueueFull, match="3 reports are unread"):
            await read_all(asleep, read)
        assert len(read) == 3
        await until(lambda: not worker.scheduler.has_news)


async def read_all(outbox: Outbox, read: list[StepReport]) -> None:
    async for report in outbox.reports():
        read.append(report)


# ---- faults ----------------------------------------------------------------------------------------------------


async def test_a_killed_manager_costs_no_request_and_nothing_is_computed_twice(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    async with running_long(worker, runner):
        await manager.kill()
        await manager.start()
    assert runner.computed_tokens == computed_once(LONG)
    assert worker.ready == [True, False, True]
    await until(lambda: manager.audit().held_blocks == 0)


async def test_a_reset_costs_no_request_and_the_next_manager_goes_on_with_its_number(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    """S9."""
    gateway = worker.gateway()
    async with running_long(worker, runner):
        number = manager.reset().cache_epoch
    runner.before_step = lambda _: None
    await gateway.submit(SHORT)
    await gateway.until_ended(SHORT)
    await manager.kill()
    await manager.start()
    again = submission(3, SHORT.prompt, 3)
    await gateway.submit(again)
    await gateway.until_ended(again)
    assert_served(gateway, SHORT, again)
    assert manager.info().cache_epoch == number


async def test_a_hit_is_a_hit_after_a_restart_of_the_manager(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    gateway = worker.gateway()
    await gateway.submit(LONG)
    await gateway.until_ended(LONG)
    await until(lambda: manager.audit().held_blocks == 0)
    cached = manager.audit().cached_blocks
    await manager.kill()
    await manager.start()
    await until(lambda: len(worker.ready) == 3)
    assert manager.audit().cached_blocks == cached > 0
    again = submission(9, LONG.prompt, 1)
    await gateway.submit(again)
    await gateway.until_ended(again)
    assert gateway.heard.of(again.request).cached_tokens == POOL.block_size


async def test_an_expired_lease_costs_no_request_and_nothing_is_computed_twice(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    async with running_long(worker, runner):
        manager.expire()
    assert runner.computed_tokens == computed_once(LONG)
    assert worker.ready == [True, False, True]


async def test_a_manager_that_is_lost_while_a_step_runs_costs_not_even_the_step(runner: FunctionRunner):
    client = LedgerClient(lease_seconds=0.01)
    losses: list[Exception] = []

    def lose_when_told(_: Any) -> None:
        if losses:
            raise losses.pop()

    client.before_exchange = lose_when_told
    async with worker_service(POOL, runner, client) as worker, running_long(worker, runner):
        losses.append(ConnectionError("reset"))
        await until(lambda: not losses)
    assert len(client.registrations) == 2
    assert runner.computed_tokens == computed_once(LONG)


async def test_a_manager_that_refuses_an_exchange_is_asked_to_start_anew(caplog: pytest.LogCaptureFixture):
    client, refusals = LedgerClient(), [InvalidRequest("a bug")]

    def refuse_once(_: Any) -> None:
        if len(client.exchanges) == 3 and refusals:
            raise refusals.pop()

    client.before_exchange = refuse_once
    async with worker_service(POOL, FunctionRunner(POOL), client) as worker:
        gateway = worker.gateway()
        await gateway.submit(LONG)
        await gateway.until_ended(LONG)
        assert_served(gateway, LONG)
    assert [registration.inventory_parts for registration in client.registrations] == [0, 0]
    assert [record.message for record in caplog.records].count("exchange_refused") == 1


async def test_a_worker_waits_for_its_manager(runner: FunctionRunner):
    manager = ManagerProcess()
    await manager.start()
    await manager.kill()
    async with worker_service(POOL, runner, attend(manager)) as worker:
        gateway = worker.gateway()
        await gateway.submit(SHORT)
        await manager.start()
        await gateway.until_ended(SHORT)
        assert_served(gateway, SHORT)
        assert worker.ready == [True]
    await manager.kill()


async def test_a_worker_that_no_manager_can_take_says_so(manager: ManagerProcess, runner: FunctionRunner):
    impossible = books.pool_spec(num_blocks=1 << 30)
    async with worker_service(impossible, runner, attend(manager)) as worker:
        with pytest.raises(InvalidRequest, match="num_blocks"):
            await worker.loop


async def test_a_step_that_raises_ends_its_requests_and_no_others(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner, caplog: pytest.LogCaptureFixture
):
    def break_on_long(plan: StepPlan) -> None:
        if any(chunk.tokens[0] == LONG.prompt[0] for chunk in plan.chunks):
            raise MemoryError("out of memory")

    runner.before_step, gateway = break_on_long, worker.gateway()
    await gateway.submit(LONG)
    await gateway.until_ended(LONG)
    await gateway.submit(SHORT)
    await gateway.until_ended(SHORT)
    assert type(gateway.heard.of(LONG.request).error) is OctavoError
    assert "MemoryError" in str(gateway.heard.of(LONG.request).error)
    assert_served(gateway, SHORT)
    assert [record.message for record in caplog.records].count("step_failed") == 1
    await until(lambda: manager.audit().held_blocks == 0)


# ---- side by side ----------------------------------------------------------------------------------------------


async def test_what_the_next_step_needs_is_asked_for_while_a_step_runs(runner: FunctionRunner):
    """The step that fills a block is held: the next one's block is there before it is over."""
    client, turnstile = LedgerClient(), Turnstile(runner)
    async with worker_service(POOL, runner, client) as worker:
        gateway = worker.gateway()
        wanted = submission(1, range(POOL.block_size), POOL.block_size + 2)
        await gateway.submit(wanted)
        await turnstile.until_waiting(1)
        await until(lambda: len(client.exchanges) == 2)
        assert [wish.positions for wish in client.exchanges[-1].reserves] == [POOL.block_size + 1]
        turnstile.let_through(100)
        await gateway.until_ended(wanted)
        assert_served(gateway, wanted)


async def test_what_a_step_has_drawn_is_heard_while_the_next_one_computes(
    worker: WorkerService, runner: FunctionRunner
):
    """It is packed, sent and read while the model is held in the next step: no step waits for a gateway to be told."""
    turnstile, gateway = Turnstile(runner), worker.gateway()
    await gateway.submit(SHORT)
    await turnstile.until_waiting(1)
    for step in range(1, SHORT.max_tokens):
        turnstile.let_through()
        await turnstile.until_waiting(step + 1)
        while len(gateway.heard.of(SHORT.request).tokens.get(0, ())) < step:
            assert await gateway.hear() is not None
        assert turnstile.waiting == step + 1, "the next step is still under way"
    turnstile.let_through()
    await gateway.until_ended(SHORT)
    assert_served(gateway, SHORT)


async def test_a_step_waits_for_no_answer_while_somebody_has_room(runner: FunctionRunner):
    """The manager is silent while what one step filled is told; the next steps run until the block is full."""
    client, told = LedgerClient(), asyncio.Event()
    answer = client.exchange

    async def late(exchange: Exchange) -> Grant:
        if exchange.commits:
            await told.wait()
        return await answer(exchange)

    client.exchange = late
    began = time.monotonic()
    async with worker_service(POOL, runner, client) as worker:
        gateway = worker.gateway()
        wanted = submission(1, range(POOL.block_size + 1), 20)
        await gateway.submit(wanted)
        await until(lambda: len(runner.steps) == POOL.block_size)
        assert worker.engine.counts.lost_managers == 0
        told.set()
        await gateway.until_ended(wanted)
        assert_served(gateway, wanted)
        counts = worker.engine.counts
        assert min(counts.wait_seconds, counts.step_seconds) > 0
        assert counts.wait_seconds + counts.step_seconds <= time.monotonic() - began


async def test_who_comes_while_a_step_runs_is_in_the_next(runner: FunctionRunner):
    client, turnstile = LedgerClient(), Turnstile(runner)
    async with worker_service(POOL, runner, client) as worker:
        gateway = worker.gateway()
        await gateway.submit(LONG)
        await turnstile.until_waiting(1)
        await gateway.submit(SHORT)
        await until(lambda: any(attach.tokens == SHORT.prompt for ask in client.exchanges for attach in ask.attaches))
        turnstile.let_through()
        await turnstile.until_waiting(2)
        assert [len(chunk.tokens) for chunk in runner.steps[-1].chunks] == [1, len(SHORT.prompt)]
        turnstile.let_through(1000)
        await gateway.until_ended(LONG, SHORT)
        assert_served(gateway, LONG, SHORT)


async def test_a_step_that_raises_beside_an_exchange_costs_whoever_came_in_with_that_nothing(runner: FunctionRunner):
    client, turnstile, asked = LedgerClient(), Turnstile(runner), asyncio.Event()
    answer, failures = client.exchange, [MemoryError("out of memory")]

    async def late(exchange: Exchange) -> Grant:
        if any(attach.tokens == SHORT.prompt for attach in exchange.attaches):
            asked.set()
            await until(lambda: not failures)
        return await answer(exchange)

    def held_and_broken(plan: StepPlan) -> None:
        hold(plan)
        if failures:
            raise failures.pop()

    hold, runner.before_step, client.exchange = runner.before_step, held_and_broken, late
    async with worker_service(POOL, runner, client) as worker:
        gateway = worker.gateway()
        await gateway.submit(LONG)
        await turnstile.until_waiting(1)
        await gateway.submit(SHORT)
        await asked.wait()
        turnstile.let_through(1000)
        await gateway.until_ended(LONG, SHORT)
        assert_served(gateway, SHORT)
        assert "MemoryError" in str(gateway.heard.of(LONG.request).error)
        await until(lambda: client.ledger is not None and client.ledger.num_held == 0)


@pytest.mark.parametrize("overlap", [True, False])
async def test_steps_and_exchanges_give_the_same_texts_side_by_side_and_by_turns(runner: FunctionRunner, overlap: bool):
    client = LedgerClient()
    async with worker_service(POOL, runner, client, overlap=overlap, max_step_tokens=16) as worker:
        gateway = worker.gateway()
        wanted = [submission(n, range(n, n + 9), 14, samples=1 + n % 3, sampling=SAMPLED) for n in range(12)]
        for request in wanted:
            await gateway.submit(request)
        await gateway.until_ended(*wanted)
        assert_served(gateway, *wanted)


# ---- lease and end ---------------------------------------------------------------------------------------------


async def test_an_idle_worker_renews_its_lease(runner: FunctionRunner):
    client = LedgerClient(lease_seconds=0.01)
    async with worker_service(POOL, runner, client):
        await until(lambda: len(client.exchanges) > 5)
    assert [exchange.step for exchange in client.exchanges] == list(range(1, len(client.exchanges) + 1))


async def test_a_worker_renews_its_lease_while_a_step_takes_long(runner: FunctionRunner):
    client, turnstile = LedgerClient(lease_seconds=0.01), Turnstile(runner)
    async with worker_service(POOL, runner, client) as worker:
        gateway = worker.gateway()
        await gateway.submit(SHORT)
        await turnstile.until_waiting(1)
        seen = len(client.exchanges)
        await until(lambda: len(client.exchanges) > seen + 5)
        turnstile.let_through(100)
        await gateway.until_ended(SHORT)
        assert_served(gateway, SHORT)


async def until_one_more(exchanges: list[Exchange]) -> None:
    seen = len(exchanges)
    await until(lambda: len(exchanges) > seen)


async def test_a_worker_renews_its_lease_over_steps_that_need_no_exchange(runner: FunctionRunner):
    client, turnstile = LedgerClient(lease_seconds=0.01), Turnstile(runner)
    async with worker_service(POOL, runner, client) as worker:
        gateway = worker.gateway()
        wanted = submission(1, range(POOL.block_size), POOL.block_size)
        await gateway.submit(wanted)
        for step in range(1, wanted.max_tokens + 1):
            await turnstile.until_waiting(step)
            await until_one_more(client.exchanges)
            turnstile.let_through()
        await gateway.until_ended(wanted)
        assert_served(gateway, wanted)
    assert [exchange.step for exchange in client.exchanges] == list(range(1, len(client.exchanges) + 1))


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_worker_that_decodes_says_nothing_between_two_blocks(runner: FunctionRunner, overlap: bool):
    """One exchange a block, or two where what is needed next is asked for before the block is full."""
    client = LedgerClient()
    async with worker_service(POOL, runner, client, overlap=overlap) as worker:
        gateway = worker.gateway()
        await gateway.submit(LONG)
        await gateway.until_ended(LONG)
        await until(lambda: client.exchanges[-1].finished != ())
    written = len(LONG.prompt) + LONG.max_tokens - 1
    assert written % POOL.block_size == 0, "the last block's exchange is that of the end"
    blocks, with_prompt = written // POOL.block_size, 2
    assert len(client.exchanges) == 1 + blocks + (blocks - with_prompt if overlap else 0)


async def test_a_draining_worker_finishes_what_it_has(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    """S57, as the worker's engine sees it. It leaves then, and does not sit out the grace."""
    async with running_long(worker, runner) as gateway:
        draining = asyncio.create_task(worker.engine.drain(grace_seconds=3600))
        await gateway.submit(SHORT)
    async with asyncio.timeout(20):
        await draining
    while await gateway.hear() is not None:
        pass
    assert isinstance(gateway.heard.of(SHORT.request).error, Draining)
    assert manager.audit().held_blocks == 0


@pytest.mark.parametrize("gone", [False, True])
async def test_an_idle_worker_leaves_without_a_wait(worker: WorkerService, manager: ManagerProcess, gone: bool):
    """There is nothing to finish, and, where the manager is gone, nobody to tell. A heartbeat is due in 20 seconds."""
    await until(lambda: worker.ready == [True])
    if gone:
        await manager.kill()
    async with asyncio.timeout(15):
        await worker.engine.drain(grace_seconds=3600)


async def test_a_drained_worker_refuses_what_did_not_finish_in_time(
    worker: WorkerService, manager: ManagerProcess, runner: FunctionRunner
):
    turnstile, gateway = Turnstile(runner), worker.gateway()
    await gateway.submit(LONG)
    await turnstile.until_waiting(1)
    draining = asyncio.create_task(worker.engine.drain(grace_seconds=0))
    await gateway.until_ended(LONG)
    assert isinstance(gateway.heard.of(LONG.request).error, Draining)
    turnstile.let_through(100)
    await draining
    assert manager.audit().held_blocks == 0
