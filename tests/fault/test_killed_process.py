"""A process is killed while requests run: the cluster heals, and what it says afterwards is right."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
import pytest_asyncio

from deploy.process import Process
from tests.support.cluster import Answer, Client, greedy, prose, request_of, smollm2

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

OUTPUT = 24
PATIENCE_SECONDS = 180.0
"""For what must happen on a machine that does something else: to start a worker alone takes a minute there."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_cluster() -> AsyncIterator[Client]:
    async with smollm2(workers=2, managers=2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(running_cluster: Client) -> Client:
    """A whole fleet, whatever the test before has left."""
    for process in reversed(running_cluster.cluster.processes):
        if not process.running:
            await running_cluster.cluster.restart(process)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await running_cluster.cluster.until_fleet_is_whole()
    return running_cluster


class Running:
    """A request whose first tokens have arrived."""

    def __init__(self, client: Client, prompt: Sequence[int]) -> None:
        call = client.gateway.Generate(request_of(prompt, max_tokens=OUTPUT), timeout=PATIENCE_SECONDS)
        self._replies = aiter(call)
        self.answer = Answer(tokens=[[]], texts=[""], reasons=[0])

    async def begin(self) -> "Running":
        while not self.answer.tokens[0]:
            self.answer.take(await anext(self._replies))
        return self

    async def finish(self) -> Answer | grpc.aio.AioRpcError:
        """The whole answer, or the error that ended it."""
        try:
            async for reply in self._replies:
                self.answer.take(reply)
        except grpc.aio.AioRpcError as error:
            return error
        return self.answer


def whole(end: Answer | grpc.aio.AioRpcError) -> Answer:
    """The answer of a stream that must not have failed."""
    assert isinstance(end, Answer), end
    return end


async def begin_all(client: Client, prompts: Sequence[Sequence[int]]) -> list[Running]:
    return await asyncio.gather(*(Running(client, prompt).begin() for prompt in prompts))


async def heals(client: Client, process: Process) -> None:
    """The killed process comes back, the fleet is whole again, and new requests are right."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.cluster.restart(process)
        await client.cluster.until_fleet_is_whole()
    prompts = [prose(2000 + 100 * i, 40) for i in range(4)]
    answers = await client.ask_together(prompts, max_tokens=8)
    assert [answer.tokens[0] for answer in answers] == [greedy(prompt, 8) for prompt in prompts]
    await client.at_rest()


async def test_running_requests_survive_the_cache_managers(client: Client) -> None:
    """kill -9 of the one, then of the other: their books are opened again from what the workers hold; no client
    notices, nothing is computed again."""
    prompts = [prose(100 * i, 30 + i) for i in range(4)]
    running = await begin_all(client, prompts)
    preempted = await client.preemptions()

    for manager in client.cluster.managers:
        await manager.kill()
        await client.cluster.restart(manager)
    answers = [await one.finish() for one in running]

    assert await client.preemptions() == preempted
    assert [answer.tokens[0] for answer in answers if isinstance(answer, Answer)] == [
        greedy(prompt, OUTPUT) for prompt in prompts
    ]
    await client.at_rest()


async def test_the_streams_of_a_killed_worker_go_on_at_another(client: Client) -> None:
    """S25, kill -9: every client has the tokens of a solo run; those of the other worker were not concerned."""
    prompts = [prose(500 + 100 * (i % 5), 30 + i % 5) for i in range(20)]
    running = await begin_all(client, prompts)
    victim = client.cluster.workers[1]
    on_victim = [one.answer.started.worker_id == victim.env["OCTAVO_WORKER_ID"] for one in running]
    assert set(on_victim) == {True, False}

    await victim.kill()
    answers = [whole(await one.finish()) for one in running]

    assert [answer.tokens[0] for answer in answers] == [greedy(prompt, OUTPUT) for prompt in prompts]
    assert [answer.usage.carried_over for answer in answers] == [int(moved) for moved in on_victim]
    assert [answer.usage.output_tokens for answer in answers] == [OUTPUT] * len(answers)
    await heals(client, victim)


async def test_the_streams_of_a_frozen_worker_go_on_at_another(client: Client) -> None:
    """S25, SIGSTOP: its connections stay open and silent, so it is found by HTTP/2 pings. What it has to say when it
    goes on reaches nobody."""
    prompts = [prose(1600 + 100 * (i % 5), 30 + i % 5) for i in range(20)]
    running = await begin_all(client, prompts)
    victim = client.cluster.workers[0]

    victim.freeze()
    answers = [whole(await one.finish()) for one in running]
    victim.thaw()

    assert [answer.tokens[0] for answer in answers] == [greedy(prompt, OUTPUT) for prompt in prompts]
    moved = [answer.started.worker_id != answer.usage.worker_id for answer in answers]
    assert any(moved)
    assert [answer.usage.carried_over for answer in answers] == [int(each) for each in moved]
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.cluster.until_fleet_is_whole()
    await client.at_rest()


async def test_a_worker_that_comes_back_has_forgotten_everything(client: Client) -> None:
    """S44, its first part: nothing is credited to the new incarnation that only the old one held."""
    prompt = prose(1300, 100)
    before = await client.ask(prompt, max_tokens=2)
    [holder] = [w for w in client.cluster.workers if w.env["OCTAVO_WORKER_ID"] == before.usage.worker_id]

    await holder.kill()
    await heals(client, holder)
    after = await client.ask(prompt, max_tokens=2)

    assert after.started.predicted_cached_tokens == after.usage.cached_tokens == 0
    assert after.tokens == before.tokens


async def test_requests_are_served_without_redis(client: Client) -> None:
    prompt = prose(1500, 60)
    expected = greedy(prompt, 4)

    await client.cluster.redis.kill()
    answers = [await client.ask(prompt, max_tokens=4) for _ in range(3)]
    await heals(client, client.cluster.redis)

    assert [answer.tokens[0] for answer in answers] == [expected] * 3
