"""Whoever dies, leaves or is left: nothing that was held for a request stays held, anywhere in the fleet.

Real processes and the real engine, two of each kind, with a model of two layers: its streams are long in tokens, not in
time. Outputs do not depend on who runs beside them (OCTAVO_DETERMINISTIC), so a stream's tokens are those that a
request of its own gets in a quiet fleet.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import LlamaConfig

from deploy.local import Cluster
from deploy.process import LOOPBACK, Process
from gateway.client import AsyncClient
from gateway.core.events import Delta, Started
from gateway.core.request import Generation, TokenPrompt
from gateway.core.retries import NEVER
from octavo.commands.model import fetch_model
from octavo.errors import Draining
from octavo.service import open_channel
from tests.support.cluster import Client
from tests.support.scrape import scrape
from tests.support.tiny_model import SHAPE, save

pytestmark = [pytest.mark.cluster, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

PATIENCE_SECONDS = 240.0
LONG = 8000
"""Tokens: far more than anybody computes in a grace of 3.2 seconds."""
PREFIX = tuple(range(3, 103))
PROMPTS = [(*PREFIX, *range(first, first + 20)) for first in (110, 130, 150)]


class Fleet:
    """The processes, and a client of each gateway."""

    def __init__(self, cluster: Cluster, clients: list[AsyncClient], books: Client) -> None:
        self.cluster = cluster
        self.clients = clients
        self.books = books

    async def stream(self, gateway: int, prompt: tuple[int, ...], max_tokens: int = LONG) -> "Stream":
        """One of whose tokens the first have come."""
        return await Stream(self.clients[gateway], request(prompt, max_tokens)).grows()

    def worker(self, worker_id: str | None) -> Process:
        [worker] = [each for each in self.cluster.workers if each.name == worker_id]
        return worker

    async def solo(self, prompt: tuple[int, ...], tokens: int) -> list[int]:
        """What a request of its own gets."""
        answer = await self.clients[1].complete(request(prompt, tokens), timeout_seconds=PATIENCE_SECONDS)
        return [*answer.samples[0].token_ids]

    async def heals(self) -> None:
        """Everybody who is gone comes back, and the fleet is whole."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for process in reversed(self.cluster.processes):
                if not process.running:
                    await self.cluster.restart(process)
            await self.cluster.until_fleet_is_whole()


def request(prompt: tuple[int, ...], max_tokens: int) -> Generation:
    return Generation(prompt=TokenPrompt(prompt), max_tokens=max_tokens, ignore_eos=True)


@asynccontextmanager
async def fleet_of(model: str, kv_memory: str, grace_seconds: float) -> AsyncIterator[Fleet]:
    """Two of each kind."""
    settings = {"MODEL": model, "DTYPE": "float32", "THREADS": "1", "KV_MEMORY": kv_memory, "AUDIT": "true"}
    settings |= {"DETERMINISTIC": "true", "LOOKUP_SECONDS": "1", "METRICS_LISTEN": f"{LOOPBACK}:0"}
    env = {f"OCTAVO_{name}": value for name, value in settings.items()}
    async with AsyncExitStack() as stack:
        cluster = Cluster(workers=2, managers=2, gateways=2, env=env, grace_seconds=grace_seconds)
        await stack.enter_async_context(cluster)
        clients = [
            await stack.enter_async_context(AsyncClient(gateway.address, retries=NEVER)) for gateway in cluster.gateways
        ]
        channel = await stack.enter_async_context(open_channel(cluster.gateways[1].address))
        managers = [await stack.enter_async_context(open_channel(each.address)) for each in cluster.managers]
        yield Fleet(cluster, clients, Client(cluster, channel, managers))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    shape: dict[str, Any] = SHAPE | {"max_position_embeddings": 2 * LONG}
    model = save(LlamaConfig(**shape, tie_word_embeddings=True), tmp_path_factory.mktemp("tiny"), seed=0)
    async with fleet_of(str(model), "128MiB", grace_seconds=3.2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(running: Fleet) -> Fleet:
    """Whole, whatever the test before has left."""
    await running.heals()
    return running


class Stream:
    """A request, and what has come of it so far."""

    def __init__(self, client: AsyncClient, asked: Generation) -> None:
        assert isinstance(asked.prompt, TokenPrompt)
        self.prompt = asked.prompt.ids
        self.began_at: str | None = None
        self.tokens: list[int] = []
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read(client, asked))

    async def _read(self, client: AsyncClient, asked: Generation) -> None:
        try:
            async with aclosing(client.generate(asked, timeout_seconds=PATIENCE_SECONDS)) as events:
                async for event in events:
                    match event:
                        case Started():
                            self.began_at = event.worker_id
                        case Delta():
                            self.tokens += event.token_ids
                        case _:
                            pass
                    self._news.set()
        finally:
            self._news.set()

    async def grows(self) -> "Stream":
        """Return when a few more tokens have come."""
        before = len(self.tokens)
        while len(self.tokens) < before + 5 and not self._reading.done():
            self._news.clear()
            await self._news.wait()
        assert len(self.tokens) >= before + 5, self._reading
        return self

    async def end(self) -> None:
        """Raises what it ended with."""
        await self._reading

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  what is waited for is in another process
            await asyncio.sleep(0.05)


async def test_of_a_thousand_requests_half_of_which_are_left_at_some_stage_nothing_is_counted_at_rest(
    fleet: Fleet,
) -> None:
    """S38, on the real engine: at rest the gateways, the workers, the managers and their metrics count 0."""
    dice = Random(38)

    async def whole(client: AsyncClient, asked: Generation) -> None:
        answer = await client.complete(asked, timeout_seconds=PATIENCE_SECONDS)
        assert answer.usage.output_tokens == asked.max_tokens

    async def left_after_some_events(client: AsyncClient, asked: Generation) -> None:
        async with aclosing(client.generate(asked, timeout_seconds=PATIENCE_SECONDS)) as events:
            for _ in range(dice.randint(1, 5)):
                await anext(events, None)

    async def left_unheard(client: AsyncClient, asked: Generation) -> None:
        unheard = asyncio.create_task(client.complete(asked))
        for _ in range(dice.randint(0, 200)):
            await asyncio.sleep(0)  # as long as the others take to do something, each
        unheard.cancel()

    async with asyncio.TaskGroup() as group:
        for at in range(1000):
            prompt = (*PREFIX[: dice.randint(0, 40)], *(3 + at // 200, 3 + at % 200), 7)
            way = whole if at % 2 else dice.choice((left_after_some_events, left_unheard))
            group.create_task(way(dice.choice(fleet.clients), request(prompt, dice.randint(1, 8))))

    books = await fleet.books.at_rest()
    assert books.cached > 0
    for process in (*fleet.cluster.gateways, *fleet.cluster.workers, *fleet.cluster.managers):
        samples = await scrape(process.events("metrics_served")[-1]["port"])
        loads = {name: value for name, value in samples.items() if is_load(name)}
        assert loads, process.name
        assert set(loads.values()) == {0}, (process.name, loads)


def is_load(sample: tuple[str, ...]) -> bool:
    """Whether a sample counts what runs, waits or is held."""
    name, *labels = sample
    return name.removeprefix("octavo_") in {
        "running_requests",
        "waiting_requests",
        "running_sequences",
        "waiting_sequences",
        "queued_prefill_tokens",
        "held_sequences",
        "held_tokens",
    } or (name == "octavo_pool_blocks" and "held" in labels)


async def test_what_was_held_for_a_dead_gateway_or_at_a_dead_worker_is_free_again(fleet: Fleet) -> None:
    """S13. Octavo loads no blocks from afar: a prefix that somebody else has is attached in place. What may be cut off
    from its source here is a request that shares blocks with others: first the gateway dies that asked for the others,
    then the worker that holds the blocks, and at that moment the client leaves."""
    survivor = await fleet.stream(1, PROMPTS[0])
    orphans = [await fleet.stream(0, prompt) for prompt in PROMPTS]
    heard_of = {worker.name: len(worker.events("gateway_left")) for worker in fleet.cluster.workers}
    homes = {orphan.began_at for orphan in orphans}

    await fleet.cluster.gateways[0].kill()
    for orphan in orphans:
        with pytest.raises(ConnectionError):
            await orphan.end()
    home = fleet.worker(survivor.began_at)
    for name in homes:
        worker = fleet.worker(name)
        await until(lambda worker=worker: len(worker.events("gateway_left")) == heard_of[worker.name] + 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum(audit.sequences for audit in await fleet.books.audits()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await survivor.grows()
    attended = sum(len(manager.events("worker_gone")) for manager in fleet.cluster.managers)

    await home.kill()
    await survivor.leave()
    await until(lambda: sum(len(manager.events("worker_gone")) for manager in fleet.cluster.managers) > attended)

    await fleet.books.at_rest()
    assert survivor.tokens == await fleet.solo(survivor.prompt, len(survivor.tokens))


async def test_under_streams_far_longer_than_its_grace_each_service_leaves_in_order(fleet: Fleet) -> None:
    """S57, scaled: streams of 8,000 tokens, a grace of 3.2 seconds. A manager, a worker and a gateway are asked to
    leave while they run: readiness falls first, while the streams go on; the streams move, and at the gateway end with
    Draining; each service leaves by itself; nothing is held for anybody afterwards."""
    await everybody_leaves(fleet, LONG)


@pytest.mark.chaos
@pytest.mark.model
@pytest.mark.timeout(1200)
async def test_with_their_own_grace_services_leave_in_order_under_streams_of_more_than_a_minute() -> None:
    """S57 as it is: SmolLM2, which takes more than a minute for 3,000 tokens of four streams on two cores, and the ten
    seconds of grace that services have where nobody says otherwise."""
    async with fleet_of(str(fetch_model("smollm2")), "256MiB", grace_seconds=10) as fleet:
        await everybody_leaves(fleet, 3000)


async def everybody_leaves(fleet: Fleet, tokens: int) -> None:
    """One after the other, under streams of so many tokens."""
    streams = [await fleet.stream(gateway, prompt, tokens) for gateway in (0, 1) for prompt in PROMPTS[:2]]
    worker = fleet.worker(streams[-1].began_at)
    moving = sum(stream.began_at == worker.name for stream in streams)

    await leaves(fleet.cluster.managers[0], streams)
    await leaves(worker, streams)
    await leaves(fleet.cluster.gateways[0], streams)
    for stream in streams[:2]:
        with pytest.raises(Draining):
            await stream.end()
    for stream in streams[2:]:
        await stream.grows()
        await stream.leave()

    moved = [event for gateway in fleet.cluster.gateways for event in gateway.events("worker_lost_under_request")]
    assert sum(event["worker"] == worker.name for event in moved if "shutting down" in event["reason"]) == moving
    await fleet.books.at_rest()
    longest = {prompt: max(len(each.tokens) for each in streams if each.prompt == prompt) for prompt in PROMPTS[:2]}
    right = dict(zip(longest, await asyncio.gather(*itertools.starmap(fleet.solo, longest.items())), strict=True))
    assert all(stream.tokens == right[stream.prompt][: len(stream.tokens)] for stream in streams)


async def leaves(process: Process, streams: list[Stream]) -> None:
    """It is asked to, says that it takes nothing new, serves on, and is gone before it would be killed."""
    async with open_channel(process.address) as channel:
        readiness = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await readiness.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass  # a worker whose manager has left may be with the next one in a moment
        os.kill(process.pid, signal.SIGTERM)
        assert (await readiness.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await asyncio.gather(*(stream.grows() for stream in streams))
    assert await process.exited() == 0
