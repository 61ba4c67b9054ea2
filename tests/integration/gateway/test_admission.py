"""Who is let in and when, through a real gateway: quotas, room at the workers, and what a refused client is told."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import grpc
import pytest

from gateway.bounds import Bounds
from gateway.client import AsyncClient
from gateway.core.in_flight import PromptBlocks
from gateway.core.request import Generation, TokenPrompt
from gateway.core.retries import NEVER
from gateway.prefix_lookup import Hits
from gateway.tenancy import Tenancy
from octavo.errors import InvalidRequest, NoWorker, QueueFull, QuotaExceeded
from octavo.records.fleet import WorkerInfo, WorkerLoad
from octavo.status import RETRY_AFTER_KEY, error_from
from octavo.tenants import Tenant, credentials
from octavo.v1 import gateway_pb2 as v1
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.memory_lookup import MemoryLookup
from tests.support.tenants import write_tenants

BLOCK = 16
KEY = "the key of x"
LONG = Generation(prompt=TokenPrompt(tuple(range(5, 5 + 4 * BLOCK))), max_tokens=1)


class HeldIndex(MemoryLookup):
    """Answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        await self.gate.wait()
        return await super().hits(prompt, workers)


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool(num_blocks=8))
        yield running


async def until_load(
    front: Gateway, *, running: int, waiting: int, look: Callable[[], Awaitable[object]] | None = None
) -> None:
    """`look` lets the gateway do something; one with tenants tells its load to those who show a key."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (front.dispatcher.running, front.dispatcher.waiting) != (running, waiting):
            await (look or front.load)()


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


async def test_those_who_are_let_in_together_do_not_count_on_the_same_room(tmp_path: Path) -> None:
    """Four prompts of four blocks waited for a worker of ten: two begin, two wait on."""
    async with fake_fleet() as fleet, gateway(fleet, tmp_path) as front:
        prompts = [TokenPrompt(tuple(range(at, at + 4 * BLOCK))) for at in range(5, 9)]
        waits = [asyncio.create_task(front.client.complete(replace(LONG, prompt=prompt))) for prompt in prompts]
        await until_load(front, running=0, waiting=4)
        worker = await fleet.add("a", words_pool(num_blocks=10))
        worker.gate.clear()
        await worker.until(lambda worker: bool(worker.submissions))
        await until_load(front, running=2, waiting=2)

        worker.gate.set()
        await asyncio.gather(*waits)
        assert front.at_rest()


async def test_room_that_was_taken_for_a_request_which_then_leaves_is_there_for_the_next(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    """It leaves while its prompt is looked up: let in, and at no worker yet."""
    index = HeldIndex()
    async with gateway(fleet, tmp_path, lookup=index) as front:
        first = asyncio.create_task(front.client.complete(LONG))
        await until_load(front, running=1, waiting=0)
        other = replace(LONG, prompt=TokenPrompt(tuple(range(70, 70 + 5 * BLOCK))))
        second = asyncio.create_task(front.client.complete(other))
        await until_load(front, running=1, waiting=1)
        first.cancel()
        await until_load(front, running=1, waiting=0)
        index.gate.set()
        assert (await second).usage.prompt_tokens == 5 * BLOCK
        assert front.at_rest()


async def test_waiting_for_room_has_a_bound(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(max_wait_seconds=0.05)) as front:
        holds(fleet, 8)
        await front.until_fleet(lambda _: front.dispatcher.fleet[0].load.held_blocks == 8)
        async with AsyncClient(front.address, retries=NEVER) as client:
            with pytest.raises(QueueFull, match=r"waited 0\.\d s while 0 requests ran") as refused:
                await client.complete(LONG)
        assert refused.value.retry_after_seconds == 1.0
        assert front.at_rest()


# ---- nobody is there -----------------------------------------------------------------------------------------


async def test_a_request_that_finds_no_worker_waits_at_the_door_for_the_first_one(tmp_path: Path) -> None:
    """A fleet that is just starting, or whose only worker is being replaced, refuses nobody who has the time."""
    async with fake_fleet() as fleet, gateway(fleet, tmp_path) as front:
        waits = [asyncio.create_task(front.client.complete(replace(LONG, max_tokens=2))) for _ in range(3)]
        await until_load(front, running=0, waiting=3)
        await fleet.add("a", words_pool())
        answers = await asyncio.gather(*waits)

        assert [answer.samples[0].token_ids for answer in answers] == [(5, 6)] * 3
        assert front.at_rest()


async def test_while_every_worker_is_about_to_leave_a_request_waits_for_the_next(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    """S57: the rolling restart of a model's only worker."""
    async with gateway(fleet, tmp_path) as front:
        old = fleet.workers[0]
        fleet.drain(old)
        await front.until_fleet(lambda _: front.dispatcher.fleet[0].draining)
        waits = asyncio.create_task(front.client.complete(LONG))
        await until_load(front, running=0, waiting=1)
        fleet.manager.tell(gone=(old.info.worker_id,))
        await fleet.add("b", words_pool())

        assert (await waits).usage.worker_id == "b"
        assert old.submissions == []


async def test_waiting_for_a_worker_ends_at_the_bound_or_at_the_clients_deadline(tmp_path: Path) -> None:
    async with fake_fleet() as fleet:
        async with gateway(fleet, tmp_path / "bound", Bounds(max_wait_seconds=0.05)) as front:
            with pytest.raises(NoWorker, match=r"no worker serves 'words' now; .*; waited 0\.\d s") as refused:
                await front.client.complete(LONG)
            assert refused.value.retry_after_seconds == 1.0
            assert front.at_rest()
        async with gateway(fleet, tmp_path / "deadline") as front:
            with pytest.raises(TimeoutError):
                await front.client.complete(LONG, timeout_seconds=0.05)
            await until_load(front, running=0, waiting=0)


async def test_no_more_requests_wait_for_a_worker_than_may_wait(tmp_path: Path) -> None:
    async with fake_fleet() as fleet, gateway(fleet, tmp_path, Bounds(max_running=1, max_waiting=1)) as front:
        waits = [asyncio.create_task(front.client.complete(LONG)) for _ in range(2)]
        await until_load(front, running=0, waiting=2)
        with pytest.raises(QueueFull, match="0 requests run and 2 wait, at most 1 and 1"):
            await front.client.complete(LONG)
        await fleet.add("a", words_pool())
        await asyncio.gather(*waits)


async def test_what_waited_for_a_worker_is_measured_when_one_comes(tmp_path: Path) -> None:
    """What it can never hold is refused with both numbers; an output without a number gets what the pool leaves."""
    async with fake_fleet() as fleet, gateway(fleet, tmp_path) as front:
        too_long = asyncio.create_task(front.client.complete(replace(LONG, max_tokens=100)))
        unbounded = asyncio.create_task(front.client.complete(replace(LONG, max_tokens=None, ignore_eos=True)))
        await until_load(front, running=0, waiting=2)
        await fleet.add("a", words_pool(num_blocks=8))

        with pytest.raises(InvalidRequest, match=r"64 \+ 100 = 164 tokens, the largest pool holds 128"):
            await too_long
        assert (await unbounded).usage.output_tokens == 64
        assert front.at_rest()


async def test_to_explain_is_not_to_wait(tmp_path: Path) -> None:
    async with fake_fleet() as fleet, gateway(fleet, tmp_path) as front:
        request = v1.ExplainRequest(request=v1.GenerateRequest(tokens=v1.TokenIds(ids=[5])))
        with pytest.raises(grpc.aio.AioRpcError, match="no worker serves 'words' now"):
            await front.stub.Explain(request, timeout=20)


# ---- whose turn it is ----------------------------------------------------------------------------------------


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


async def test_tenants_who_all_wait_get_tokens_by_the_weights_of_their_file(fleet: FakeFleet, tmp_path: Path) -> None:
    """One that has asked long before the other takes none of its share: 3 to 1 of what is served while both wait."""
    file = tmp_path / "tenants.toml"
    digests = {name: sha256(name.encode()).hexdigest() for name in ("heavy", "light")}
    weights = {"heavy": 3.0, "light": 1.0}
    file.write_text(
        "".join(
            f'[tenants.{name}]\napi_key_sha256 = ["{digest}"]\nweight = {weights[name]}\n'
            for name, digest in digests.items()
        )
    )
    [worker] = fleet.workers
    worker.info = replace(worker.info, pool=words_pool())
    fleet.manager.tell(worker.info)
    asked = Generation(prompt=TokenPrompt(tuple(range(5, 5 + 255)) * 2), max_tokens=2)  # 512 tokens: four to a quantum
    async with (
        gateway(fleet, tmp_path / "words", Bounds(max_running=1), tenancy=Tenancy(file)) as front,
        AsyncClient(front.address, api_key="light") as light,
        AsyncClient(front.address, api_key="heavy") as heavy,
    ):
        worker.gate.clear()
        waits = [asyncio.create_task(light.complete(asked)) for _ in range(13)]
        await until_load(front, running=1, waiting=12, look=light.fleet)
        waits += [asyncio.create_task(heavy.complete(asked)) for _ in range(12)]
        await until_load(front, running=1, waiting=24, look=light.fleet)
        worker.gate.set()
        await asyncio.gather(*waits)

    _, *order = (sent.tenant == Tenant(name="heavy").tag for sent in worker.submissions)
    assert sum(order[:16]) == 12, order


async def test_a_priority_reaches_the_worker(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path) as front:
        await front.client.complete(replace(LONG, priority=-7))
    assert [submission.priority for submission in fleet.workers[0].submissions] == [-7]
