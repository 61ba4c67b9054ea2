"""The service as a process of its own: start, readiness, SIGTERM, bad settings."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from os import kill
from pathlib import Path

import grpc
import pytest

from deploy.process import Process, StartFailed, running
from octavo.errors import Draining, StaleEpoch
from octavo.ids import SequenceId
from octavo.records.attend import Attach
from octavo.service import open_channel, probe
from octavo.tenants import Tenant
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from tests.support import books
from tests.support.manager_service import WorkerStandIn, announced_port, manager_process
from tests.support.scrape import scrape

pytestmark = pytest.mark.cluster


def serving(**settings: object) -> AbstractAsyncContextManager[Process]:
    return running(manager_process(**settings))


@asynccontextmanager
async def attended(process: Process) -> AsyncGenerator[WorkerStandIn]:
    async with open_channel(process.address) as channel:
        worker = WorkerStandIn(v1_grpc.CacheManagerStub(channel))
        await worker.register(books.pool_spec())
        yield worker


async def test_a_manager_serves_though_redis_is_away() -> None:
    async with serving() as process, attended(process) as worker:
        assert await asyncio.to_thread(probe, process.address)
        assert await worker.compute(1, list(range(10))) == 0
        assert len(process.events("worker_registered")) == 1


async def test_prometheus_is_answered_where_the_settings_say() -> None:
    async with serving(metrics_listen="127.0.0.1:0") as process, attended(process) as worker:
        await worker.compute(1, list(range(10)))
        samples = await scrape(process.events("metrics_served")[0]["port"])
    assert samples["octavo_pool_blocks", "held", worker.worker_id] == 3
    assert samples["octavo_held_tokens", worker.worker_id] == 10
    assert samples["octavo_registrations_total",] == 1


async def test_a_worker_that_says_nothing_is_expired_by_the_clock() -> None:
    async with serving(lease_seconds=0.2) as process, attended(process) as worker:
        with pytest.raises(StaleEpoch, match=r"not heard for 0\.2 s"):
            await worker.hear()


async def test_a_manager_without_workers_leaves_at_once() -> None:
    async with serving() as process:
        kill(process.pid, signal.SIGTERM)
        assert await asyncio.wait_for(process.exited(), 20) == 0


async def test_a_manager_leaves_when_its_last_worker_has_left() -> None:
    """S57: readiness falls first, and the worker that is leaving itself is served until it goes."""
    async with serving(grace_seconds=20) as process:
        async with attended(process) as worker:
            await worker.exchange(draining=True)
            kill(process.pid, signal.SIGTERM)
            while await asyncio.to_thread(probe, process.address):
                pass
            await worker.compute(1, list(range(10)))
        assert await asyncio.wait_for(process.exited(), 20) == 0


async def test_a_worker_that_stays_is_sent_to_another_manager_at_once() -> None:
    async with serving(grace_seconds=3600) as process, attended(process) as worker:
        kill(process.pid, signal.SIGTERM)
        with pytest.raises(Draining):
            await worker.hear()
        assert await asyncio.wait_for(process.exited(), 20) == 0


async def test_a_frozen_manager_is_lost_to_those_who_watch_it() -> None:
    """Nothing resets the connection: HTTP/2 pings go unanswered."""
    async with serving() as process, open_channel(process.address) as channel:
        call = v1_grpc.CacheManagerStub(channel).WatchFleet(v1.WatchFleetRequest())
        await call.read()
        process.freeze()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await asyncio.wait_for(call.read(), 30)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lease_seconds": 0}, "OCTAVO_LEASE_SECONDS=0: Input should be greater than 0"),
        ({"redis_url": "http://example"}, "OCTAVO_REDIS_URL=http://example: "),
        ({"eviction": "fifo"}, "OCTAVO_EVICTION=fifo: Input should be 'segmented' or 'lru'"),
        ({"retention_quota": "much"}, "OCTAVO_RETENTION_QUOTA=much: wanted a part of a pool, as 25% or"),
        ({"listen": "nowhere"}, "OCTAVO_LISTEN=nowhere: "),
    ],
)
async def test_a_setting_that_will_not_do_is_named(settings: dict[str, object], problem: str) -> None:
    process = manager_process(**settings)
    if "listen" in settings:
        process = Process(
            "manager",
            lambda _: ["env", "OCTAVO_LISTEN=nowhere", sys.executable, "-m", "cache_manager"],
            served_port=announced_port,
        )
    await process.start()
    with pytest.raises(StartFailed, match="exited with 2"):
        await process.serving()
    assert any(line.startswith(problem) for line in process.lines)


async def visit(worker: WorkerStandIn, tokens: list[int], tenant: Tenant, retain_seconds: int = 0) -> int:
    """Compute a prompt on a tenant's account, and end. Returns the tokens that were reused; all of it found room."""
    sequence = SequenceId(worker.step + 1)
    attach = Attach(sequence, tuple(tokens), tenant=tenant.tag, retain_seconds=retain_seconds)
    worker.step += 1
    wanted = books.exchange(step=worker.step, reserves=[(sequence, len(tokens))])
    grant = await worker.send(wanted._replace(attaches=(attach,)))
    assert grant.unmet == ()
    ((_, reused),) = grant.attached
    worker.step += 1
    await worker.send(books.exchange(step=worker.step, commits={sequence: tokens[reused:]}, finished=[sequence]))
    return reused


async def test_what_the_tenants_file_owes_is_kept_in_every_pool(tmp_path: Path) -> None:
    """S32, S34: 16 blocks of 4. A floor stands while somebody else sweeps; of all that a tenant retains, its quota
    stays and no more, so that others are let in.
    """
    file = tmp_path / "tenants.toml"
    file.write_text("tenants.acme.cache_floor = '25%'\ntenants.bolt.retention_quota = '25%'", encoding="utf-8")
    acme, bolt, others = (Tenant(name=name) for name in ("acme", "bolt", "others"))
    async with serving(tenants_file=file) as process, attended(process) as worker:
        chat, kept = books.tokens_of(0, 16), books.tokens_of(50, 40)
        await visit(worker, chat, acme)
        for start in range(100, 900, 25):
            await visit(worker, books.tokens_of(start, 25), others)
        assert await visit(worker, [*chat, 1, 2, 3], acme) == 16

        await visit(worker, kept, bolt, retain_seconds=3600)
        for start in range(100, 900, 25):
            await visit(worker, books.tokens_of(start, 25), others)
        assert await visit(worker, [*kept, 1, 2, 3], bolt) == 16


async def test_a_tenants_file_that_owes_too_much_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("tenants.a.cache_floor = '60%'\ntenants.b.cache_floor = '60%'", encoding="utf-8")
    process = manager_process(tenants_file=file)
    await process.start()
    with pytest.raises(StartFailed, match=r"cannot_serve.*cache_floor: 120% of a pool are owed"):
        await process.serving()


async def test_a_second_manager_on_the_port_does_not_start() -> None:
    async with serving() as first:
        second = manager_process()
        second.port = first.port
        await second.start()
        with pytest.raises(StartFailed, match=f"cannot listen on {first.address}"):
            await second.serving()
