"""Every service is replaced in turn while requests keep coming: none fails, none changes its tokens (S57)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from deploy.local import Cluster
from deploy.process import Process
from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from octavo.commands.model import fetch_model
from octavo.service import probe
from tests.support.cluster import greedy, prose

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(600)]

OUTPUT = 24
GRACE_SECONDS = 60.0
WORKER_GRACE_SECONDS = 3.0
"""Less than a request takes on a busy machine: it goes on at the other worker."""
INTERPRETER_SECONDS = 10.0
"""For Python and torch to take themselves apart on a busy machine, when the service has ended."""
PROMPTS = [prose(200 * i, 24 + i) for i in range(3)]


class Callers:
    """Clients that ask again and again, each time at a gateway that says that it is ready."""

    def __init__(self, gateways: Sequence[Process], clients: Sequence[AsyncClient]) -> None:
        self._gateways = dict(zip(gateways, clients, strict=True))
        self.answers: list[tuple[int, list[int]]] = []
        self.moved = 0
        self._stopping = False

    async def ask_on(self, caller: int) -> None:
        """Until `stop`."""
        prompt = caller % len(PROMPTS)
        while not self._stopping:
            client = await self._ready(caller)
            request = Generation(prompt=TokenPrompt(tuple(PROMPTS[prompt])), max_tokens=OUTPUT, ignore_eos=True)
            answer = await client.complete(request, timeout_seconds=120)
            self.answers.append((prompt, [*answer.samples[0].token_ids]))
            self.moved += answer.usage.carried_over

    def stop(self) -> None:
        self._stopping = True

    async def _ready(self, caller: int) -> AsyncClient:
        """As a load balancer does: round robin over those whose health check passes."""
        while True:
            for gateway in [*self._gateways][caller % 2 :] + [*self._gateways][: caller % 2]:
                if gateway.running and await asyncio.to_thread(probe, gateway.address):
                    return self._gateways[gateway]
            await asyncio.sleep(0.05)


@asynccontextmanager
async def under_load() -> AsyncIterator[tuple[Cluster, Callers]]:
    """Two of everything, and six callers."""
    fetch_model("smollm2")
    env = {"OCTAVO_MODEL": "smollm2", "OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1", "OCTAVO_KV_MEMORY": "64MiB"}
    async with AsyncExitStack() as stack:
        cluster = Cluster(workers=2, managers=2, gateways=2, env=env, grace_seconds=GRACE_SECONDS)
        for worker in cluster.workers:
            worker.env["OCTAVO_GRACE_SECONDS"] = f"{WORKER_GRACE_SECONDS:g}"
        await stack.enter_async_context(cluster)
        clients = [await stack.enter_async_context(AsyncClient(each.address)) for each in cluster.gateways]
        callers = Callers(cluster.gateways, clients)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for caller in range(6):
            tasks.create_task(callers.ask_on(caller))
        yield cluster, callers
        callers.stop()


async def test_a_rolling_restart_of_every_service_fails_no_request() -> None:
    """S57: each process is asked to leave, leaves within its grace by itself, and is started anew."""
    async with under_load() as (cluster, callers):
        for process in (*cluster.workers, *cluster.managers, *cluster.gateways, cluster.redis):
            before = len(callers.answers)
            await process.stop(GRACE_SECONDS + INTERPRETER_SECONDS)
            assert await process.exited() == 0, process.name
            await cluster.restart(process)
            await cluster.until_fleet_is_whole()
            while len(callers.answers) < before + 3:  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0.05)

    expected = [greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert all(tokens == expected[prompt] for prompt, tokens in callers.answers)
