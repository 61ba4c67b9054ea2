"""How soon a worker goes on after its cache manager was killed, what that costs its requests, and how soon Redis heals.

    python -m bench.recovery [--blocks 100000] [--kills 5]

A real worker, but for its model, which draws tokens that are known beforehand and takes 20 ms a step, holds 100,000
published blocks and decodes 32 streams. Its manager, a process of its own beside a real Redis, is killed with SIGKILL

- and started again at once, as whoever looks after it does (`recovery_s`);
- while another one stands by (`recovery_standby_s`).

Both are the time from the kill to the first grant of the new books. Beside it, how long the new process took until it
served, which is mostly Python's imports, and what opening the books took of the manager's CPU. `recovery_tokens_lost`
are tokens that a stream should have had and did not have, or had otherwise; `recovery_tokens_recomputed` went through
the model a second time.

Then Redis is killed under the same load, and started again empty: `index_recovery_s` is the time from the kill until it
holds a whole copy of the index again (S43). One JSON object a line.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import redis.asyncio

from bench.control_plane import POOL, cpu_seconds, python_process, redis_process
from deploy.process import Process, running
from octavo.ids import Incarnation, WorkerId
from octavo.index_schema import WHOLE_MARK, index_key
from octavo.records.attend import Exchange, Grant, Inventory, Registered, Registration
from octavo.records.sampling import SamplingParams
from octavo.records.serve import Submission
from worker.attendance import Attendance
from worker.cache_client import AttendClient
from worker.core.scheduler import Scheduler
from worker.core.step import StepPlan, StepResult
from worker.engine import Engine
from worker.outbox import Outbox

STREAMS = 32
STEP_SECONDS = 0.02
FILLER_TOKENS = 16_000
"""Of each prompt that fills the pool."""

OUTPUT_TOKENS = 30_000
"""Of each stream: more than it gets to."""

SPARE_BLOCKS = 20_000
"""Beyond the published ones."""

_NAME = WorkerId("bench")

PAUSE_SECONDS = 1.0
"""Between two kills."""

LOOK_SECONDS = 0.005
"""Between two looks at the index."""


def token_at(seed: int, position: int) -> int:
    """The token that stands at a position of a stream."""
    return (1_000_003 * seed + 7_919 * position) % POOL.vocab_size


class KnownTokens:
    """A model that takes its time and says what is expected."""

    def __init__(self) -> None:
        self.prefilled_tokens = 0
        """Put through the model otherwise than one by one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """See worker.model_thread.StepRunner."""
        time.sleep(STEP_SECONDS)
        self.prefilled_tokens += sum(len(chunk.tokens) for chunk in plan.chunks if len(chunk.tokens) > 1)
        return StepResult(
            tuple(tuple(token_at(draw.sampling.seed, draw.position) for draw in chunk.draws) for chunk in plan.chunks)
        )


class WatchedClient:
    """A cache manager, and a word when it has given the first grant of new books."""

    def __init__(self, process: Process, went_on: Callable[[Process], None]) -> None:
        self._client = AttendClient(process.address, deadline_seconds=10.0)
        self._process = process
        self._went_on = went_on
        self._new_books = False

    async def register(self, registration: Registration, inventory: Sequence[Inventory] = ()) -> Registered:
        """See worker.cache_client.CacheClient."""
        registered = await self._client.register(registration, inventory)
        self._new_books = True
        return registered

    def when_ended(self, tell: Callable[[], None]) -> None:
        """See worker.cache_client.CacheClient."""
        self._client.when_ended(tell)

    async def exchange(self, exchange: Exchange) -> Grant:
        """See worker.cache_client.CacheClient."""
        grant = await self._client.exchange(exchange)
        if self._new_books:
            self._new_books = False
            self._went_on(self._process)
        return grant

    async def is_there(self) -> bool:
        """See worker.cache_client.CacheClient."""
        return await self._client.is_there()

    def leave(self) -> None:
        """See worker.cache_client.CacheClient."""
        self._client.leave()

    async def close(self) -> None:
        """See worker.cache_client.CacheClient."""
        await self._client.close()


class Worker:
    """The worker, and one gateway's side of its requests."""

    def __init__(self, managers: Sequence[Process], blocks: int) -> None:
        self.pool = replace(POOL, num_blocks=blocks + SPARE_BLOCKS, max_model_tokens=FILLER_TOKENS + OUTPUT_TOKENS)
        self.model = KnownTokens()
        self.manager: Process | None = None
        """That is attended."""
        self._went_on = asyncio.Event()
        self._dice = random.Random(3)
        self._attendance = Attendance([WatchedClient(manager, self._go_on) for manager in managers], self._dice.random)
        scheduler = Scheduler(self.pool, max_step_tokens=FILLER_TOKENS + STREAMS, max_running=64, max_waiting=4096)
        self._engine = Engine(scheduler, self.model, self._attendance, set_ready=_ignore, max_unread_reports=1 << 20)
        self._outbox: Outbox = self._engine.open_outbox()
        self._ended = asyncio.Condition()
        self._to_end = 0
        self.heard: dict[int, list[int]] = {}
        """Request -> its tokens."""
        self.broken: set[int] = set()
        """Streams that were refused."""

    @property
    def index(self) -> str:
        """The key of its prefix index."""
        return index_key(_NAME, self._attendance.epoch)

    @asynccontextmanager
    async def at_work(self) -> AsyncGenerator[None]:
        """Attend and listen for the time of the context."""
        registration = Registration(worker_id=_NAME, incarnation=Incarnation(1), address="127.0.0.1:1", pool=self.pool)
        tasks = [asyncio.create_task(self._engine.run(registration)), asyncio.create_task(self._listen())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self._attendance.close()

    async def fill(self, blocks: int) -> None:
        """Publish so many blocks, and begin the streams."""
        fillers = range(STREAMS, STREAMS + -(-blocks * self.pool.block_size // FILLER_TOKENS))
        self._to_end = len(fillers)
        for request in fillers:
            self._submit(request, FILLER_TOKENS, max_tokens=1)
        async with self._ended:
            await self._ended.wait_for(lambda: self._to_end == 0)
        for request in range(STREAMS):
            self._submit(request, 2 * self.pool.block_size, max_tokens=OUTPUT_TOKENS)
        async with self._ended:
            await self._ended.wait_for(lambda: all(self.heard.get(request) for request in range(STREAMS)))

    async def goes_on(self) -> None:
        """Return when a manager has given the first grant of books that are new since the last call."""
        await self._went_on.wait()
        self._went_on.clear()

    def _go_on(self, manager: Process) -> None:
        self.manager = manager
        self._went_on.set()

    def lost_tokens(self) -> int:
        """Of the streams: tokens that are not what they should be, or that a stream that ended lacks."""
        wrong = sum(
            token != token_at(request, position)
            for request in range(STREAMS)
            for position, token in enumerate(self.heard[request], start=2 * self.pool.block_size)
        )
        return wrong + sum(OUTPUT_TOKENS - len(self.heard[request]) for request in self.broken)

    def _submit(self, request: int, prompt_tokens: int, max_tokens: int) -> None:
        prompt = tuple(self._dice.choices(range(self.pool.vocab_size), k=prompt_tokens))
        sampling = SamplingParams(seed=request)
        self._engine.submit(
            self._outbox, Submission(request=request, prompt=prompt, max_tokens=max_tokens, sampling=sampling)
        )

    async def _listen(self) -> None:
        async for report in self._outbox.reports():
            for new in report.tokens:
                self.heard.setdefault(new.request, []).extend(new.tokens)
            self.broken.update(end.request for end in (*report.finished, *report.refused) if end.request < STREAMS)
            self._to_end -= len(report.finished)
            async with self._ended:
                self._ended.notify_all()


async def _ignore(ready: bool) -> None:
    """Nobody asks for this worker's health."""


@dataclass(slots=True)
class Figures:
    """What kill after kill has brought."""

    seconds: list[float] = field(default_factory=list[float])
    """From the kill to the first grant."""
    start_seconds: list[float] = field(default_factory=list[float])
    """Of these, until the new process served; 0 where one stood by."""
    cpu_seconds: list[float] = field(default_factory=list[float])
    """Of the manager that opened the books, from when it served to the grant."""
    index_seconds: list[float] = field(default_factory=list[float])
    """From the kill of Redis to a whole copy of the index."""
    index_start_seconds: list[float] = field(default_factory=list[float])
    """Of these, until the new Redis served."""
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0


async def kill_and_measure(managers: Sequence[Process], index: Process, blocks: int, kills: int) -> Figures:
    """Kill the manager that is attended, time after time; with one manager alone, start it again at once.

    Then kill Redis as often.
    """
    figures, worker = Figures(), Worker(managers, blocks)
    async with worker.at_work():
        await worker.fill(blocks)
        await worker.goes_on()
        prefilled = worker.model.prefilled_tokens
        for _ in range(kills):
            await asyncio.sleep(PAUSE_SECONDS)
            victim = worker.manager
            assert victim is not None
            before = {manager: cpu_seconds(manager.pid) for manager in managers}
            killed_at = time.perf_counter()
            await victim.kill()
            if len(managers) == 1:
                await _restart(victim)
                figures.start_seconds.append(time.perf_counter() - killed_at)
                before[victim] = cpu_seconds(victim.pid)
            await worker.goes_on()
            figures.seconds.append(time.perf_counter() - killed_at)
            opened = worker.manager
            assert opened is not None
            figures.cpu_seconds.append(cpu_seconds(opened.pid) - before[opened])
            if not victim.running:
                await _restart(victim)
        for _ in range(kills):
            await asyncio.sleep(PAUSE_SECONDS)
            await _kill_the_index(index, worker, figures)
        figures.recomputed_tokens = worker.model.prefilled_tokens - prefilled
        figures.lost_tokens = worker.lost_tokens()
        figures.output_tokens = sum(len(worker.heard[request]) for request in range(STREAMS))
    return figures


async def _kill_the_index(index: Process, worker: Worker, figures: Figures) -> None:
    """Once it is whole; return when it is so again."""
    await _until_whole(index, worker)
    killed_at = time.perf_counter()
    await index.kill()
    await _restart(index)
    figures.index_start_seconds.append(time.perf_counter() - killed_at)
    await _until_whole(index, worker)
    figures.index_seconds.append(time.perf_counter() - killed_at)


async def _until_whole(index: Process, worker: Worker) -> None:
    async with redis.asyncio.Redis.from_url(f"redis://{index.address}/0") as client:
        # Nobody is told when the copy is whole.
        while not await client.execute_command("SISMEMBER", worker.index, WHOLE_MARK):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)


async def _restart(process: Process) -> None:
    await process.start()
    await process.serving()


def report(alone: Figures, standby: Figures, blocks: int) -> Iterator[dict[str, object]]:
    """One object a figure."""
    run = {"blocks": blocks, "streams": STREAMS, "kills": len(alone.seconds)}
    start = statistics.median(alone.start_seconds)
    yield _line("recovery_s", alone.seconds, "s", **run, process_start_s=round(start, 3))
    opening = statistics.median(standby.cpu_seconds)
    yield _line("recovery_standby_s", standby.seconds, "s", **run, manager_cpu_s=round(opening, 3))
    index_start = statistics.median(alone.index_start_seconds + standby.index_start_seconds)
    yield _line(
        "index_recovery_s", alone.index_seconds + standby.index_seconds, "s", **run, redis_start_s=round(index_start, 3)
    )
    outputs = alone.output_tokens + standby.output_tokens
    for name in ("lost_tokens", "recomputed_tokens"):
        value = getattr(alone, name) + getattr(standby, name)
        yield {
            "name": f"recovery_tokens_{name.removesuffix('_tokens')}",
            "value": value,
            "unit": "tokens",
            "of": outputs,
        }


def _line(name: str, seconds: Sequence[float], unit: str, **more: object) -> dict[str, object]:
    worst = round(max(seconds), 3)
    return {"name": name, "value": round(statistics.median(seconds), 3), "unit": unit, "worst": worst, **more}


def _manager(redis_url: str) -> Process:
    return python_process("manager", "-m", "cache_manager", OCTAVO_REDIS_URL=redis_url)


async def bench(blocks: int, kills: int) -> None:
    """Measure, then print."""
    figures: list[Figures] = []
    async with running(redis_process()) as index:
        url = f"redis://{index.address}/0"
        for count in (1, 2):
            async with AsyncExitStack() as stack:
                processes = [_manager(url) for _ in range(count)]
                managers = [await stack.enter_async_context(running(process)) for process in processes]
                figures.append(await kill_and_measure(managers, index, blocks, kills))
    alone, standby = figures
    for line in report(alone, standby, blocks):
        print(json.dumps(line))


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000, help="published when the manager is killed")
    parser.add_argument("--kills", type=int, default=5, help="of which the median is told (default: 5)")
    arguments = parser.parse_args()
    asyncio.run(bench(arguments.blocks, arguments.kills))


if __name__ == "__main__":
    main()
