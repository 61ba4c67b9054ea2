"""The prefix index in Redis, from a manager's books to a gateway's look-up: alike however the servers stand to one
another. Whatever happens to them, no look-up fails or waits for more than its budget, its worth is told, and it heals.

Time is the test's: a budget ends when the test says so, and the breaker's pauses pass when it moves the clock.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.core.breaker import BreakerState
from gateway.core.in_flight import PromptBlocks
from gateway.prefix_lookup import Hits, RedisLookup
from octavo import redis_client
from octavo.records.fleet import WorkerInfo, WorkerLoad
from octavo.records.generate import IndexState
from octavo.records.scope import PLAIN
from octavo.redis_client import open_client
from tests.support import books, fleets
from tests.support.manager_service import ManagerService, WorkerStandIn, manager_service
from tests.support.redis_topologies import (
    TOPOLOGIES,
    Servers,
    behind_proxy,
    in_cluster,
    in_cluster_over_tls,
    under_sentinel,
    under_sentinel_over_tls,
    until,
)

pytestmark = pytest.mark.redis

BUDGET = 0.005
WORKERS = 6
BLOCKS = 3
POOL = 64
PROMPT = tuple(range(100, 100 + 4 * BLOCKS + 1))
LATER = tuple(range(200, 251))
"""Another prompt, of 12 full blocks; no block of it begins another."""
EXACT, DEGRADED, FALLBACK = IndexState.EXACT, IndexState.DEGRADED, IndexState.FALLBACK


class Timer:
    """Stands for asyncio.sleep: pauses last until the test says that they are over."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self.over.wait()


class Rumour:
    """A manager with some workers that hold the same prompt, and a gateway's look-up."""

    def __init__(self, servers: Servers, service: ManagerService, workers: list[WorkerStandIn]) -> None:
        self.servers = servers
        self.service = service
        self.workers = workers
        self.timer = Timer()
        self.now = 1000.0
        self.lookup = RedisLookup(open_client(servers.url), BUDGET, clock=lambda: self.now, sleep=self.timer.sleep)

    @property
    def infos(self) -> list[WorkerInfo]:
        return [
            WorkerInfo(
                worker_id=worker.worker_id,
                epoch=worker.epoch,
                address="nowhere:1",
                pool=books.pool_spec(),
                load=WorkerLoad(),
            )
            for worker in self.workers
        ]

    async def hits(self) -> Hits:
        return await self.lookup.hits(PromptBlocks(PROMPT, PLAIN), self.infos)

    async def until_exact(self) -> None:
        """The clock goes on, and the gateway looks for itself, until all is as it was."""

        whole = Hits({worker.worker_id: 4 * BLOCKS for worker in self.workers}, EXACT)

        async def healed() -> bool:
            self.now += 5.0
            await self.lookup.check(self.infos)
            return self.lookup.state is EXACT and await self.hits() == whole  # else some changes are on their way

        await until(healed)

    async def until_open(self) -> None:
        """Requests that learn nothing open the breaker."""

        async def opened() -> bool:
            assert await self.hits() == Hits({}, FALLBACK)
            return self.lookup.breaker.state is BreakerState.OPEN

        await until(opened)


@asynccontextmanager
async def rumour(servers: Servers) -> AsyncGenerator[Rumour]:
    """With an index that is whole. Keys are renewed, and so looked at, every 0.2 seconds."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(manager_service(servers.url, ttl_seconds=0.6))
        workers = [
            await stack.enter_async_context(service.worker(f"w{number}", num_blocks=POOL)) for number in range(WORKERS)
        ]
        for worker in workers:
            await worker.compute(1, list(PROMPT))
        made = Rumour(servers, service, workers)
        stack.push_async_callback(made.lookup.close)
        await made.until_exact()
        yield made


@pytest.fixture(params=list(TOPOLOGIES))
async def any_rumour(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Rumour]:
    async with TOPOLOGIES[request.param](tmp_path) as servers, rumour(servers) as made:
        yield made


@pytest.fixture
def patient_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets give up after a minute, so what ends earlier was not ended by them. For clients opened from here on."""
    monkeypatch.setattr(redis_client, "SOCKET_SECONDS", 60.0)


async def test_what_managers_publish_is_found(any_rumour: Rumour) -> None:
    """S40, over any Redis; a block that was evicted is not found."""
    await any_rumour.workers[0].exchange(finished=[1])
    await any_rumour.workers[0].compute(2, list(range(4 * POOL)))  # takes the whole pool

    async def forgotten() -> bool:
        found = await any_rumour.hits()
        return found.state is EXACT and any_rumour.workers[0].worker_id not in found.tokens

    await until(forgotten)
    found = await any_rumour.hits()
    assert found.tokens == {worker.worker_id: 4 * BLOCKS for worker in any_rumour.workers[1:]}


async def test_what_a_gateway_claims_is_found_behind_what_is_published(any_rumour: Rumour) -> None:
    """S37, over any Redis: the claims of each worker lie where its index lies."""
    for info in any_rumour.infos:
        any_rumour.lookup.claim(info, PromptBlocks(LATER, PLAIN).of(info))

    async def claimed() -> bool:
        found = await any_rumour.lookup.hits(PromptBlocks(LATER, PLAIN), any_rumour.infos)
        return found == Hits({}, EXACT, {worker.worker_id: 4 * 12 for worker in any_rumour.workers})

    await until(claimed)


async def test_a_worker_of_an_earlier_epoch_is_not_known(any_rumour: Rumour) -> None:
    """S44: its SET is dropped, so that nothing is known of it."""
    gone = any_rumour.infos[0]
    any_rumour.workers[0].drop()

    async def dropped() -> bool:
        return await any_rumour.lookup.hits(PromptBlocks(PROMPT, PLAIN), [gone]) == Hits({}, DEGRADED)

    await until(dropped)


async def test_stopped_servers_cost_hits_only_and_their_return_heals(
    any_rumour: Rumour, caplog: pytest.LogCaptureFixture
) -> None:
    """S43, S47: killed, and started again empty. Routing goes on; it is exact again when all is published."""
    caplog.set_level(logging.INFO, "octavo")
    await any_rumour.servers.stop()
    await any_rumour.until_open()
    failures = any_rumour.lookup.failures

    assert [await any_rumour.hits() for _ in range(10)] == [Hits({}, FALLBACK)] * 10
    assert any_rumour.lookup.failures == failures  # nobody was asked

    await any_rumour.workers[0].compute(2, list(LATER))  # the books do not wait
    await any_rumour.servers.begin_again()
    await any_rumour.until_exact()
    told = [record.__dict__["state"] for record in caplog.records if record.msg == "prefix_index_state"]
    assert told[0] == "fallback"
    assert told[-1] == "exact"
    assert all(before != after for before, after in pairwise(told))


async def test_frozen_servers_cost_no_more_than_the_budget(any_rumour: Rumour, patient_sockets: None) -> None:
    """S47: paused, so that connections live and nothing comes back. Only the budget's end lets a look-up go on."""
    patient = Rumour(any_rumour.servers, any_rumour.service, any_rumour.workers)
    try:
        await patient.until_exact()
        any_rumour.servers.freeze()
        patient.timer.over.set()
        patient.timer.asked.clear()
        await patient.until_open()
        assert set(patient.timer.asked) == {BUDGET}
        asked = len(patient.timer.asked)
        assert await patient.hits() == Hits({}, FALLBACK)
        assert len(patient.timer.asked) == asked  # with an open breaker, not even that

        any_rumour.servers.thaw()
        patient.timer.over.clear()
        await patient.until_exact()
    finally:
        any_rumour.servers.thaw()
        await patient.lookup.close()


async def test_wiped_servers_are_known_to_be_incomplete_until_the_managers_have_published(
    any_rumour: Rumour,
) -> None:
    """S43: FLUSHALL. Redis answers, and what it answers proves nothing."""
    for server in any_rumour.servers.writable:
        await server.client.flushall()
    seen: set[IndexState] = set()

    async def whole_again() -> bool:
        found = await any_rumour.hits()
        seen.add(found.state)
        assert found.state is DEGRADED or len(found.tokens) == WORKERS
        return found.state is EXACT

    await until(whole_again)
    assert FALLBACK not in seen


async def test_a_value_of_the_wrong_type_costs_one_key_and_heals(any_rumour: Rumour) -> None:
    """S47: one corrupt value."""
    worker = any_rumour.workers[2]
    holder = await any_rumour.servers.holder(worker.index)
    await holder.client.set(worker.index, "nonsense")

    found = await any_rumour.hits()

    assert found.tokens.items() >= {each.worker_id: 4 * BLOCKS for each in any_rumour.workers if each != worker}.items()
    assert any_rumour.lookup.breaker.closed
    await any_rumour.until_exact()


async def test_full_servers_are_filled_again_when_there_is_room(
    any_rumour: Rumour, caplog: pytest.LogCaptureFixture
) -> None:
    """S47: `maxmemory` reached, so that writes are refused. What cannot be written is not called whole."""
    await any_rumour.servers.everywhere("CONFIG", "SET", "maxmemory", "1")
    for worker in any_rumour.workers:
        await worker.compute(2, list(LATER))

    async def told() -> bool:
        return (await any_rumour.hits()).state is DEGRADED and "index_mirror_lost" in caplog.messages

    await until(told)
    assert any_rumour.lookup.breaker.closed
    await any_rumour.servers.everywhere("CONFIG", "SET", "maxmemory", "0")
    await any_rumour.until_exact()


async def test_a_cluster_is_spoken_to_over_tls(tmp_path: Path) -> None:
    """With a password, to every node at the place that it names itself; a node that is lost costs its own keys."""
    async with in_cluster_over_tls(tmp_path) as servers, rumour(servers) as secret:
        assert await secret.hits() == Hits({worker.worker_id: 4 * BLOCKS for worker in secret.workers}, EXACT)
        held = [await server.client.dbsize() for server in servers.servers]
        assert sum(held) == WORKERS
        await (await servers.holder(secret.workers[0].index)).stop()
        assert (await secret.hits()).state is DEGRADED


@pytest.mark.parametrize("server_tls", [True, False], ids=["server over TLS", "server in clear"])
async def test_sentinels_are_asked_over_tls_as_a_user(server_tls: bool, tmp_path: Path) -> None:
    """The server that they name is spoken to over TLS as well, or in clear, as another user."""
    async with under_sentinel_over_tls(tmp_path, server_tls=server_tls) as servers, rumour(servers) as secret:
        assert await secret.hits() == Hits({worker.worker_id: 4 * BLOCKS for worker in secret.workers}, EXACT)


# ---- what only some can do -----------------------------------------------------------------------------------


async def test_a_slow_server_costs_no_more_than_the_budget(tmp_path: Path) -> None:
    """S47: 2 s latency. The breaker opens, stays open while probes are late, and closes when they are not."""
    async with behind_proxy(tmp_path) as servers, rumour(servers) as slow:
        assert servers.proxy is not None
        servers.proxy.delay = 2.0
        slow.timer.over.set()
        slow.timer.asked.clear()
        await slow.until_open()
        assert set(slow.timer.asked) == {BUDGET}

        slow.now += 5.0
        await slow.lookup.check(slow.infos)
        assert slow.lookup.breaker.state is BreakerState.OPEN
        assert (await slow.hits()).state is FALLBACK

        servers.proxy.delay = 0.0
        slow.timer.over.clear()
        await slow.until_exact()


async def test_a_fail_over_that_lost_writes_is_noticed_and_made_good(tmp_path: Path) -> None:
    """S47: the replica is cut off, the master takes writes and dies, and Sentinel promotes the replica."""
    async with under_sentinel(tmp_path) as servers, rumour(servers) as kept:
        master, replica = servers.servers
        await replica.client.config_set("masterauth", "wrong")
        await master.client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        for worker in kept.workers:
            await worker.compute(2, list(LATER))
        size = len(PROMPT) // 4 + len(LATER) // 4 + 1

        async def written(server_of: int) -> bool:
            client = servers.servers[server_of].client
            return [await client.scard(worker.index) for worker in kept.workers] == [size] * WORKERS

        await until(lambda: written(0))
        assert not await written(1)
        await master.stop()

        await until(lambda: written(1))
        assert (await replica.client.info("replication"))["role"] == "master"
        await kept.until_exact()
        found = await kept.lookup.hits(PromptBlocks(LATER, PLAIN), kept.infos)
        assert found == Hits({worker.worker_id: len(LATER) // 4 * 4 for worker in kept.workers}, EXACT)


async def test_a_lost_node_of_a_cluster_costs_its_own_keys_only(tmp_path: Path) -> None:
    """S47: the others are read and written as before."""
    async with in_cluster(tmp_path) as servers, rumour(servers) as partly:
        lost = await servers.holder(partly.workers[0].index)
        kept = [worker for worker in partly.workers if await servers.holder(worker.index) is not lost]
        assert kept, "give the workers other names: all of their keys lie on one node"
        await lost.stop()

        assert await partly.hits() == Hits({worker.worker_id: 4 * BLOCKS for worker in kept}, DEGRADED)
        assert partly.lookup.breaker.closed

        for worker in partly.workers:
            await worker.compute(2, list(LATER))

        async def published() -> bool:
            found = await partly.lookup.hits(PromptBlocks(LATER, PLAIN), partly.infos)
            return found.tokens == {worker.worker_id: len(LATER) // 4 * 4 for worker in kept}

        await until(published)
        await lost.start()
        await partly.until_exact()


async def test_a_slot_that_moves_to_another_node_is_followed(tmp_path: Path) -> None:
    async with in_cluster(tmp_path) as servers, rumour(servers) as moved:
        key = moved.workers[0].index
        source = await servers.holder(key)
        target = next(server for server in servers.servers if server is not source)
        slot = await source.client.execute_command("CLUSTER KEYSLOT", key)
        name = await target.client.execute_command("CLUSTER MYID")
        await source.client.delete(key)  # its manager writes it again
        for server in servers.servers:
            await server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)

        await moved.until_exact()
        assert await target.client.scard(key) == BLOCKS + 1


# ---- whatever the client library does ------------------------------------------------------------------------


class Stubborn(redis_client.RedisClient):
    """Loses the first cancellation, as redis-py may on Python 3.11, and never answers."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancellations = 0

    async def fill(self, commands: object, replies: list[object]) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancellations += 1
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def test_neither_a_budget_nor_a_client_that_leaves_waits_for_a_lost_cancellation() -> None:
    client, timer = Stubborn(), Timer()
    lookup = RedisLookup(client, BUDGET, sleep=timer.sleep)
    anyone = fleets.worker("anyone")
    prompt = range(100)
    leaving = asyncio.create_task(lookup.hits(PromptBlocks(prompt, PLAIN), [anyone]))
    await client.begun.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving

    timer.over.set()
    assert await lookup.hits(PromptBlocks(prompt, PLAIN), [anyone]) == Hits({}, FALLBACK)
    await lookup.close()
