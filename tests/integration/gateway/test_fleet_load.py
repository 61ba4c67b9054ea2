"""Several gateways before one fleet: each of them routes by what waits there, whoever sent it.

Real gateways, each with its own doors; for most, a real cache manager, and real workers whose models are functions that
take their steps when the test says so.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from gateway.core.events import Usage
from gateway.core.request import Generation, TokenPrompt
from octavo.ids import WorkerId
from octavo.records.fleet import PoolSpec, WorkerLoad
from octavo.v1 import gateway_pb2 as v1
from tests.support import words
from tests.support.fake_fleet import fake_fleet
from tests.support.fakes import FunctionRunner, solo_text
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.turnstile import Turnstile
from tests.support.worker_service import RealFleet, attend, manager_process, until, worker_service

BLOCK = 256
LONG, SHORT = 100_000, 40
STEP = 8192
POOL = words_pool(block_size=BLOCK, num_blocks=2048, max_model_tokens=LONG + 1000)
GATEWAYS = 4
FIRST_WORD = len(words.SPECIAL_TOKENS)


@asynccontextmanager
async def held_worker(fleet: RealFleet, name: str, pool: PoolSpec = POOL, **limits: int) -> AsyncGenerator[Turnstile]:
    """A worker that has joined the fleet, and what lets its steps through."""
    runner = FunctionRunner(pool)
    turnstile = Turnstile(runner)
    limits = {"max_step_tokens": STEP} | limits
    async with worker_service(pool, runner, attend(fleet.manager), worker_id=WorkerId(name), **limits) as worker:
        fleet.workers.append(worker)
        yield turnstile
        turnstile.let_through(1000)


def request(number: int, tokens: int) -> Generation:
    """Of so many tokens; no two begin alike."""
    prompt = [FIRST_WORD + (number + at) % (words.VOCAB_SIZE - FIRST_WORD) for at in range(tokens)]
    return Generation(prompt=TokenPrompt(tuple(prompt)), max_tokens=2, ignore_eos=True)


async def served(front: Gateway, asked: Generation) -> Usage:
    """What the answer took, which is as it must be."""
    answer = await front.client.complete(asked)
    assert isinstance(asked.prompt, TokenPrompt)
    alone = solo_text(asked.prompt.ids, asked.max_tokens or 0, vocab_size=words.VOCAB_SIZE)
    assert list(answer.samples[0].token_ids) == alone
    return answer.usage


async def served_by(front: Gateway, asked: Generation) -> str:
    """The worker that answered, as it must."""
    return (await served(front, asked)).worker_id


async def until_reported(fronts: Sequence[Gateway], worker: str, *, prompts: int, tokens: int) -> None:
    """Until the manager has told each gateway of so many prompts, and of at least so many tokens, at a worker."""

    def told(front: Gateway) -> bool:
        loads = [info.load for info in front.dispatcher.fleet if info.worker_id == worker]
        return any(
            load.waiting_sequences + load.running_sequences == prompts and load.queued_prefill_tokens >= tokens
            for load in loads
        )

    for front in fronts:
        await front.news.until(lambda front=front: told(front))


async def test_unseen_prompts_go_past_an_overloaded_worker_with_a_small_pool(tmp_path: Path) -> None:
    """S35: both workers answer at once, so what they report is all that speaks for one of them."""
    async with fake_fleet() as fleet:
        small = await fleet.add("small", words_pool(num_blocks=64))
        await fleet.add("large", words_pool(num_blocks=4096))
        overload = WorkerLoad(running_sequences=8, waiting_sequences=8, queued_prefill_tokens=900, held_blocks=60)
        fleet.manager.tell(replace(small.info, load=overload))
        async with gateway(fleet, tmp_path) as front:
            await until_reported([front], "small", prompts=16, tokens=900)
            answers = [await front.client.complete(request(at, SHORT)) for at in range(0, 300, 15)]

    assert {answer.usage.worker_id for answer in answers} == {"large"}
    assert {answer.usage.cached_tokens for answer in answers} == {0}


async def test_each_of_four_gateways_sees_the_fleets_load_in_tokens_not_in_requests(tmp_path: Path) -> None:
    """S39: three prompts of 100,000 tokens, each through another gateway, while one worker was alone; then more short
    requests, through all four, than there are long ones."""
    async with manager_process() as manager, AsyncExitStack() as stack, asyncio.TaskGroup() as asking:
        fleet = RealFleet(manager)
        busy = await stack.enter_async_context(held_worker(fleet, "busy"))
        fronts = [await stack.enter_async_context(gateway(fleet, tmp_path / str(at))) for at in range(GATEWAYS)]
        long = [asking.create_task(served_by(front, request(at, LONG))) for at, front in enumerate(fronts[:3])]
        busy.let_through()
        await until_reported(fronts, "busy", prompts=3, tokens=3 * LONG - 2 * STEP)

        other = await stack.enter_async_context(held_worker(fleet, "other"))
        for front in fronts:
            await front.until_fleet(lambda names: names == ["busy", "other"])
        short: list[asyncio.Task[str]] = []
        for at in range(2 * GATEWAYS):
            short.append(asking.create_task(served_by(fronts[at % GATEWAYS], request(100 + at, SHORT))))
            await until_reported(fronts, "other", prompts=len(short), tokens=0)

        asked = v1.GenerateRequest(tokens=v1.TokenIds(ids=range(FIRST_WORD, FIRST_WORD + SHORT)))
        for front in fronts:
            told = await front.stub.Explain(v1.ExplainRequest(request=asked), timeout=10)
            queued = {worker.worker_id: worker.cost.queued for worker in told.workers}
            assert told.chosen == "other"
            assert 3 * LONG - 2 * STEP <= queued["busy"] <= 3 * LONG
            assert queued["other"] <= len(short) * SHORT
        for turnstile in (busy, other):
            turnstile.let_through(1000)

    assert {task.result() for task in long} == {"busy"}
    assert {task.result() for task in short} == {"other"}
    assert all(front.at_rest() for front in fronts)


async def test_what_is_evicted_while_its_request_waits_is_computed_anew_and_counted(tmp_path: Path) -> None:
    """S31: one request runs at a time, and takes the whole pool while another one waits whose prefix was there."""
    size, blocks = 16, 16
    pool = words_pool(block_size=size, num_blocks=blocks)
    async with manager_process() as manager, AsyncExitStack() as stack, asyncio.TaskGroup() as asking:
        fleet = RealFleet(manager)
        worker = await stack.enter_async_context(held_worker(fleet, "only", pool, max_running=1))
        front = await stack.enter_async_context(gateway(fleet, tmp_path))
        remembered = request(0, 4 * size)
        worker.let_through(2)
        first = await served(front, remembered)
        large = replace(request(100, size), max_tokens=(blocks - 1) * size)
        running = asking.create_task(served(front, large))
        await worker.until_waiting(3)
        waiting = asking.create_task(served(front, replace(request(0, 4 * size + 1), max_tokens=1)))
        await until(lambda: fleet.workers[0].scheduler.load().waiting_sequences == 1)
        worker.let_through(1000)
        usages = [first, await running, await waiting, await served(front, remembered)]
        load = (await front.client.fleet()).gateway

    assert [usage.predicted_cached_tokens for usage in usages] == [0, 0, 4 * size, 3 * size]
    assert [usage.cached_tokens for usage in usages] == [0, 0, 0, 4 * size - 1]
    assert load.undelivered_cached_tokens == 4 * size  # no less by what the last one has found beyond whole blocks
