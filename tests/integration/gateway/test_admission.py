"""Who is let in and when, through a real gateway: quotas, room at the workers, and what a refused client is told."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from gateway.bounds import Bounds
from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from gateway.core.retries import NEVER
from gateway.tenancy import Tenancy
from octavo.errors import InvalidRequest, QueueFull, QuotaExceeded
from octavo.records import WorkerLoad
from octavo.status import RETRY_AFTER_KEY, error_from
from octavo.tenants import credentials
from octavo.v1 import gateway_pb2 as v1
from tests.support.fake_fleet import FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.tenants import write_tenants

BLOCK = 16
KEY = "the key of x"
LONG = Generation(prompt=TokenPrompt(tuple(range(5, 5 + 4 * BLOCK))), max_tokens=1)


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool(num_blocks=8))
        yield running


async def until_load(front: Gateway, *, running: int, waiting: int) -> None:
    async with asyncio.timeout(20):
        while (front.dispatcher.running, front.dispatcher.waiting) != (running, waiting):
            await front.load()


def holds(fleet: FakeFleet, blocks: int) -> None:
    """The worker says that so many of its blocks are held."""
    [worker] = fleet.workers
    worker.info = replace(worker.info, load=WorkerLoad(held_blocks=blocks))
    fleet.manager.tell(worker.info)


async def test_a_prompt_that_finds_no_room_waits_here_until_there_is_some(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path) as front:
        holds(fleet, 6)
        await front.until_fleet(lambda _: front.dispatcher.fleet[0].load.held_blocks == 6)
        waits = asyncio.create_task(front.client.complete(LONG))
        await until_load(front, running=0, waiting=1)
        assert fleet.workers[0].submissions == []

        small = Generation(prompt=TokenPrompt((5,)), max_tokens=1)
        behind = asyncio.create_task(front.client.complete(small))
        await until_load(front, running=0, waiting=2)
        holds(fleet, 4)

        assert (await waits).usage.output_tokens == 1
        assert (await behind).usage.output_tokens == 1
        assert [len(submission.prompt) for submission in fleet.workers[0].submissions] == [64, 1]


async def test_what_a_prompt_has_in_common_with_those_that_run_takes_no_room_twice(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    async with gateway(fleet, tmp_path) as front:
        fleet.workers[0].gate.clear()
        first = asyncio.create_task(front.client.complete(LONG))
        await fleet.workers[0].until(lambda worker: len(worker.submissions) == 1)
        for held in (6, 7):  # two reports, after which the first request is part of what is held
            holds(fleet, held)
            await front.until_fleet(lambda _, held=held: front.dispatcher.fleet[0].load.held_blocks == held)
        second = asyncio.create_task(front.client.complete(LONG))
        await fleet.workers[0].until(lambda worker: len(worker.submissions) == 2)
        fleet.workers[0].gate.set()
        await asyncio.gather(first, second)


async def test_waiting_for_room_has_a_bound(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_wait_seconds=0.05)) as front:
        holds(fleet, 8)
        await front.until_fleet(lambda _: front.dispatcher.fleet[0].load.held_blocks == 8)
        async with AsyncClient(front.address, retries=NEVER) as client:
            with pytest.raises(QueueFull, match=r"waited 0\.\d s while 0 requests ran") as refused:
                await client.complete(LONG)
        assert refused.value.retry_after_seconds == 1.0
        assert front.at_rest()


async def test_a_tenant_beyond_its_quota_is_told_when_to_come_again(fleet: FakeFleet, tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED, the reason, and the milliseconds. What is more than a minute's worth can never pass."""
    file = write_tenants(tmp_path / "tenants.toml", x=KEY)
    with file.open("a", encoding="utf-8") as more:
        more.write("requests_per_minute = 2\ntokens_per_minute = 60\n")
    async with gateway(fleet, tmp_path / "words", tenancy=Tenancy(file)) as front:
        request = v1.GenerateRequest(tokens=v1.TokenIds(ids=[5, 6, 7]), max_tokens=2)

        async def ask() -> None:
            async for _ in front.stub.Generate(request, timeout=20, metadata=credentials(KEY)):
                pass

        await ask()
        await ask()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask()

        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        milliseconds = int(dict(failed.value.trailing_metadata())[RETRY_AFTER_KEY])
        assert 0 < milliseconds <= 30_000
        error = error_from(failed.value)
        assert isinstance(error, QuotaExceeded)
        assert error.retry_after_seconds == milliseconds / 1000
        async with AsyncClient(front.address, api_key=KEY, retries=NEVER) as client:
            with pytest.raises(InvalidRequest, match="65 tokens, the tenant's quota is 60 a minute"):
                await client.complete(LONG)
        assert front.at_rest()


async def test_a_priority_reaches_the_worker(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path) as front:
        await front.client.complete(replace(LONG, priority=-7))
    assert [submission.priority for submission in fleet.workers[0].submissions] == [-7]
