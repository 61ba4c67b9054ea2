"""Cache managers are killed, stopped and replaced while 32 streams run: the workers notice, their requests do not.

Managers are processes of their own beside a real Redis; workers are real but for their model, which reads its whole
history back through the block table before it draws, so a block that is lost, given away or mistaken changes its text.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from deploy.process import Process
from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from octavo.errors import UnknownWorker
from octavo.hashing import block_hashes
from octavo.ids import WorkerId
from octavo.index_schema import WHOLE_MARK, index_key, index_member
from octavo.records.fleet import PoolSpec
from octavo.records.insight import PoolAudit
from octavo.records.serve import Submission
from octavo.service import open_channel
from octavo.status import translated
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from octavo.wire.insight import audit_from_wire
from tests.support import words
from tests.support.books import pool_spec
from tests.support.fakes import FunctionRunner, solo_text
from tests.support.gateway_process import gateway_process, until_ready
from tests.support.gateway_service import words_pool
from tests.support.manager_service import manager_process, until
from tests.support.redis_server import RedisServer, redis_server
from tests.support.scheduling import submission
from tests.support.turnstile import Turnstile
from tests.support.worker_service import GatewayStandIn, worker_service
from tests.support.worker_service import until as until_so
from worker import attendance
from worker.cache_client import AttendClient

pytestmark = [pytest.mark.cluster, pytest.mark.redis]

STREAMS = 32
OUTPUT = 150
POOL = pool_spec(block_size=16, num_blocks=STREAMS * 20)


class Worker:
    """One worker with its share of the streams, and the gateway that asked for them."""

    def __init__(self, name: str, pool: PoolSpec, streams: Sequence[Submission]) -> None:
        self.name = WorkerId(name)
        self.runner = FunctionRunner(pool)
        self.streams = streams
        self._turnstile = Turnstile(self.runner)
        self._gateway: GatewayStandIn | None = None

    @asynccontextmanager
    async def at_work(self, managers: Sequence[Process]) -> AsyncGenerator[None]:
        clients = [AttendClient(manager.address, deadline_seconds=30) for manager in managers]
        async with worker_service(POOL, self.runner, *clients, worker_id=self.name, max_running=STREAMS) as service:
            self._gateway = service.gateway()
            for stream in self.streams:
                await self._gateway.submit(stream)
            yield

    async def has_done(self, steps: int) -> None:
        """Return when so many steps more have begun. As many may follow, and no more than that."""
        begun = self._turnstile.waiting
        self._turnstile.let_through(2 * steps)
        await self._turnstile.until_waiting(begun + steps)

    async def ended_right(self) -> None:
        """Every stream has its tokens, and none of them was computed twice."""
        assert self._gateway is not None
        self._turnstile.let_through(100 * OUTPUT)
        await self._gateway.until_ended(*self.streams)
        for stream in self.streams:
            text = self._gateway.heard.of(stream.request).tokens[0]
            assert text == solo_text(stream.prompt, OUTPUT, vocab_size=POOL.vocab_size)
        assert self.runner.computed_tokens == sum(len(tokens) for tokens in self.written)

    @property
    def written(self) -> list[list[int]]:
        """What each stream has in the pool at its end: the last token that is drawn is not."""
        assert self._gateway is not None
        heard = self._gateway.heard
        return [[*stream.prompt, *heard.of(stream.request).tokens[0][:-1]] for stream in self.streams]

    @property
    def index(self) -> set[bytes]:
        """What Redis is to hold of it."""
        root = POOL.chain_root().hash()
        blocks = (block for tokens in self.written for block in block_hashes(root, tokens, POOL.block_size))
        return {WHOLE_MARK, *map(index_member, blocks)}


class Fleet:
    """Managers, workers and the Redis behind them."""

    def __init__(self, managers: Sequence[Process], workers: Sequence[Worker], redis: RedisServer) -> None:
        self.managers = managers
        self.workers = workers
        self.redis = redis

    async def works(self, steps: int) -> None:
        """Every worker has begun so many steps more, and none of its streams has come to its end."""
        await asyncio.gather(*(worker.has_done(steps) for worker in self.workers))
        assert all(len(worker.runner.steps) < OUTPUT for worker in self.workers)

    async def ends_right(self) -> None:
        """All streams end as if nothing had happened, the books balance, and the index holds all that was written."""
        await asyncio.gather(*(worker.ended_right() for worker in self.workers))
        for worker in self.workers:
            await until(lambda worker=worker: self._at_rest(worker))
            audit = await self.audit(worker)
            assert audit is not None
            assert audit.violation == ""
            assert audit.free_blocks + audit.cached_blocks == POOL.num_blocks

            async def is_whole(worker: Worker = worker, key: str = index_key(worker.name, audit.epoch)) -> bool:
                return await self.redis.client.smembers(key) == worker.index

            await until(is_whole)

    async def _at_rest(self, worker: Worker) -> bool:
        audit = await self.audit(worker)
        return audit is not None and audit.held_blocks == audit.sequences == 0

    async def audit(self, worker: Worker) -> PoolAudit | None:
        """Of whichever manager the worker attends; None while it attends none."""
        request = v1.AuditRequest(worker_id=worker.name)
        for manager in self.managers:
            if not manager.running:
                continue
            async with open_channel(manager.address) as channel:
                audit = v1_grpc.CacheManagerStub(channel).Audit
                with suppress(UnknownWorker), translated():
                    # A new channel may still know from another one that nobody was there.
                    return audit_from_wire(await audit(request, timeout=10, wait_for_ready=True))
        return None


@asynccontextmanager
async def fleet(*, managers: int, workers: int) -> AsyncGenerator[Fleet]:
    """32 streams, spread over the workers, no two of which begin alike."""
    dice = Random(32)
    streams = [
        submission(number, [number, *dice.choices(range(1000), k=20 + number)], OUTPUT) for number in range(STREAMS)
    ]
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server())
        processes = await start_managers(stack, redis, managers)
        staff = [Worker(f"worker-{number}", POOL, streams[number::workers]) for number in range(workers)]
        for worker in staff:
            await stack.enter_async_context(worker.at_work(processes))
        yield Fleet(processes, staff, redis)


async def start_managers(stack: AsyncExitStack, redis: RedisServer, count: int) -> list[Process]:
    processes = [manager_process(redis_url=redis.url, grace_seconds=0.5) for _ in range(count)]
    for process in processes:
        stack.push_async_callback(process.kill)
        await process.start()
    for process in processes:
        await process.serving()
    return processes


async def restart(process: Process) -> None:
    await process.start()
    await process.serving()


async def test_a_killed_manager_is_missed_by_no_request() -> None:
    """kill -9 under load, again and again, once while the workers tell the new one what they hold."""
    async with fleet(managers=1, workers=2) as running:
        [manager] = running.managers
        for _ in range(2):
            await running.works(steps=20)
            await manager.kill()
            await restart(manager)
        await manager.kill()
        await restart(manager)
        await running.ends_right()

        async def both_are_audited() -> bool:
            last = [event["epoch"] for event in manager.events("worker_registered")[-len(running.workers) :]]
            return {*last} <= {event["epoch"] for event in manager.events("restored_books_audited")}

        await until(both_are_audited)


async def test_a_manager_that_is_asked_to_leave_is_missed_by_no_request() -> None:
    """S57, the manager's part: SIGTERM, and another process in its place."""
    async with fleet(managers=1, workers=2) as running:
        [manager] = running.managers
        await running.works(steps=30)
        await manager.stop(grace_seconds=30)
        assert await manager.exited() == 0
        await restart(manager)
        await running.ends_right()


async def test_the_other_manager_takes_the_workers_over() -> None:
    """Two managers, four workers; the one is killed, comes back, and the other is killed."""
    async with fleet(managers=2, workers=4) as running:
        one, other = running.managers
        await running.works(steps=30)
        assert one.events("worker_registered")
        assert other.events("worker_registered")
        await one.kill()
        await running.works(steps=10)
        await restart(one)
        await other.kill()
        await running.ends_right()


async def test_a_manager_that_is_there_again_gets_its_workers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all of them do not stay with one, and nobody notices that either."""
    monkeypatch.setattr(attendance, "_LOOK_HOME_SECONDS", 0.1)
    async with fleet(managers=2, workers=4) as running:
        one, other = running.managers
        await running.works(steps=20)
        known = registered_at(one)
        assert registered_at(other)
        await one.kill()

        async def all_are_there() -> bool:
            return {worker.name for worker in running.workers} == {*registered_at(other)}

        await until(all_are_there)
        await restart(one)

        async def all_are_back() -> bool:
            return sorted(registered_at(one)) == sorted(2 * known)

        await until(all_are_back)
        await running.ends_right()


async def test_a_gateway_takes_nothing_from_a_worker_that_goes_from_manager_to_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has streams there while one manager is killed, comes back, and is gone back to."""
    monkeypatch.setattr(attendance, "_LOOK_HOME_SECONDS", 0.1)
    model = words.save_model(tmp_path / "words")
    pool = words_pool(tokenizer_digest=sha256((model / "tokenizer.json").read_bytes()).digest())
    prompts = [tuple(range(5 + number, 45 + number)) for number in range(8)]
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server())
        managers = await start_managers(stack, redis, 2)
        turnstiles: list[Turnstile] = []
        for number in range(2):
            runner = FunctionRunner(pool)
            turnstiles.append(Turnstile(runner))
            clients = [AttendClient(manager.address, deadline_seconds=30) for manager in managers]
            worker = worker_service(pool, runner, *clients, worker_id=WorkerId(f"worker-{number}"))
            await stack.enter_async_context(worker)
        addresses = ",".join(manager.address for manager in managers)
        front = await stack.enter_async_context(gateway_process(addresses, redis.url, model))
        await until_ready(front)
        client = await stack.enter_async_context(AsyncClient(front.address))
        asked = [Generation(prompt=TokenPrompt(prompt), max_tokens=OUTPUT, ignore_eos=True) for prompt in prompts]
        asking = [asyncio.create_task(client.complete(request)) for request in asked]
        for turnstile in turnstiles:
            turnstile.let_through(20)
            await turnstile.until_waiting(21)

        one, other = managers
        [known] = registered_at(one)
        await one.kill()
        await until_so(lambda: len(registered_at(other)) == 2)
        await restart(one)
        await until_so(lambda: registered_at(one) == [known, known] and bool(other.events("worker_gone")))
        for turnstile in turnstiles:
            turnstile.let_through(100 * OUTPUT)
        answers = await asyncio.gather(*asking)

    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.samples[0].token_ids) == solo_text(prompt, OUTPUT, vocab_size=pool.vocab_size)
    assert [answer.usage.carried_over for answer in answers] == [0] * len(prompts)
    assert {answer.usage.worker_id for answer in answers} == {"worker-0", "worker-1"}


def registered_at(manager: Process) -> list[str]:
    """The workers that have registered there, also before it was started again."""
    return [event["worker"] for event in manager.events("worker_registered")]


async def test_a_frozen_manager_is_left_for_the_other() -> None:
    """SIGSTOP: its workers notice within two seconds. When it goes on, nobody attends it, and it is not in the way."""
    async with fleet(managers=2, workers=2) as running:
        one, other = running.managers
        await running.works(steps=30)
        one.freeze()

        async def all_attend_the_other() -> bool:
            return len(other.events("worker_registered")) == len(running.workers)

        await until(all_attend_the_other)
        one.thaw()
        await running.ends_right()


async def test_workers_are_handed_over_without_a_kill() -> None:
    """One manager leaves in order while the other one stands by."""
    async with fleet(managers=2, workers=2) as running:
        one, _ = running.managers
        await running.works(steps=30)
        await one.stop(grace_seconds=30)
        assert await one.exited() == 0
        await running.ends_right()
