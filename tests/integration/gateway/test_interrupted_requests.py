"""Whatever strikes a request at whichever await, its gateway counts nothing afterwards, and no worker is at it.

A request is run once for each of its awaits, and there the awaited thing fails: its task is cancelled, or what it waits
for raises. The requests are of every kind that takes something: one sample, several, a batch, one that is carried over,
one that its worker refuses, one that waits at the door.
"""

import asyncio
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.bounds import Bounds
from gateway.core.in_flight import PromptBlocks
from gateway.core.request import Generation, TextPrompt, TokenPrompt
from gateway.prefix_lookup import Hits
from octavo.errors import Draining, OctavoError, PoolExhausted
from octavo.hashing import block_hashes
from octavo.ids import BlockHash
from octavo.records.fleet import WorkerInfo
from octavo.records.scope import PLAIN
from octavo.v1 import gateway_pb2 as v1
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.memory_lookup import MemoryLookup

PROMPT = tuple(range(5, 5 + 40))
MOST_AWAITS = 1000


class SlowIndex(MemoryLookup):
    """Answers later, as one in another process does."""

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        await asyncio.sleep(0)
        found = await super().hits(prompt, workers)
        await asyncio.sleep(0)
        return found


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        running.index = SlowIndex()
        for name in ("holder", "other"):
            await running.add(name, words_pool())
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path, Bounds(max_running=2)) as running:
        yield running


class Bug(Exception):
    """In whatever was awaited."""


class Struck:
    """Awaits something, and fails it at its `at`th await, from 0 on."""

    def __init__(self, work: Coroutine[Any, Any, None], at: int, error: BaseException) -> None:
        self._work = work
        self._at = at
        self._error = error
        self.happened = False

    @types.coroutine
    def run(self) -> Generator[Any, Any, None]:
        waits = self._work.__await__()
        try:
            awaited = waits.send(None)
            for number in range(MOST_AWAITS):
                if number == self._at:
                    self.happened = True
                    if awaited is not None:
                        awaited.cancel()
                    awaited = waits.throw(self._error)
                else:
                    awaited = waits.send((yield awaited))
        except StopIteration:
            return
        raise AssertionError(f"no end after {MOST_AWAITS} awaits")


async def strike(work: Coroutine[Any, Any, None], at: int, error: BaseException) -> bool:
    """Whether there was such an await; the work may end as it likes, but for a failure that nobody has heard of."""
    struck = Struck(work, at, error)
    with suppress(OctavoError, asyncio.CancelledError, Bug):
        await struck.run()
    return struck.happened


async def one(front: Gateway, samples: int = 1) -> None:
    request = Generation(prompt=TokenPrompt(PROMPT), max_tokens=3, samples=samples)
    await hear(front, request)


async def of_text(front: Gateway) -> None:
    await hear(front, Generation(prompt=TextPrompt("An octavo is a book"), max_tokens=3, stop=("book",)))


async def hear(front: Gateway, request: Generation) -> None:
    async with aclosing(front.dispatcher.generate(request, PATIENCE_SECONDS)) as events:
        async for _ in events:
            pass


async def several_samples(front: Gateway) -> None:
    await one(front, 3)


async def batch(front: Gateway) -> None:
    """Of three, of which two run at once."""
    requests = [Generation(prompt=TokenPrompt((*PROMPT[at:],)), max_tokens=3) for at in range(3)]
    async with aclosing(front.dispatcher.generate_each(requests, PATIENCE_SECONDS)) as events:
        async for _ in events:
            pass


Work = Callable[[Gateway], Coroutine[Any, Any, None]]
KINDS: dict[str, tuple[Work, OctavoError | None]] = {
    "one sample": (one, None),
    "of text": (of_text, None),
    "three samples": (several_samples, None),
    "a batch": (batch, None),
    "refused after it has started": (one, PoolExhausted("1 block free, 4 wanted")),
    "a batch, refused": (batch, PoolExhausted("1 block free, 4 wanted")),
    "carried over from a worker that leaves": (several_samples, Draining("it leaves")),
    "carried over from a worker that is lost": (one, None),
}
ERRORS: list[Callable[[], BaseException]] = [
    asyncio.CancelledError,
    Bug,
    lambda: PoolExhausted("0 blocks free"),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_strikes_a_request_at_any_await_nothing_is_reserved_afterwards(
    fleet: FakeFleet, front: Gateway, kind: str
) -> None:
    """S14, S38."""
    work, refusal = KINDS[kind]
    holder = fleet.workers[0]
    holder.refuses_with, holder.ends_streams = refusal, kind.endswith("is lost")
    fleet.index.publish(holder.info.worker_id, holder.info.epoch, hashes_of(holder.info))

    for error in ERRORS:
        at = 0
        while await strike(work(front), at, error()):
            await until_at_rest(front, fleet)
            at += 1
        assert at >= 3, "there are more awaits than that"

    for worker in (await explained(front)).workers:
        assert (worker.cost.queued, worker.cost.decode) == (0, 0)


async def test_what_cannot_be_sent_is_not_counted_where_it_would_have_gone(fleet: FakeFleet, front: Gateway) -> None:
    """No door lets such a number in; were there one that did, its requests would weigh on a worker for ever."""
    with pytest.raises(ValueError, match="range"):
        await hear(front, Generation(prompt=TokenPrompt(PROMPT), seed=1 << 70))
    await until_at_rest(front, fleet)
    await one(front)


def hashes_of(worker: WorkerInfo) -> list[BlockHash]:
    """Of the prompt's blocks, with which it is sent to that worker first."""
    return list(block_hashes(worker.chain_root(PLAIN).hash(), PROMPT, worker.pool.block_size))


async def until_at_rest(front: Gateway, fleet: FakeFleet) -> None:
    """Until nothing is counted, and no worker is at anything."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not front.at_rest():  # noqa: ASYNC110  # what ends later tells nobody
            await asyncio.sleep(0)
    for worker in fleet.workers:
        await worker.until(lambda worker: not worker.running)


async def explained(front: Gateway) -> v1.ExplainReply:
    request = v1.GenerateRequest(tokens=v1.TokenIds(ids=[300, 301]))
    return await front.stub.Explain(v1.ExplainRequest(request=request), timeout=10)
