"""How long a worker waits for its cache manager: a real engine and model here, a real manager process beside it."""

import asyncio
import os
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from bench.control_plane import python_process, redis_process
from deploy.process import running
from octavo.ids import Incarnation, WorkerId
from octavo.models import ModelFolder
from octavo.records.attend import Registration
from octavo.records.fleet import PoolSpec
from octavo.records.serve import Submission
from worker.attendance import Attendance
from worker.cache_client import AttendClient
from worker.core.scheduler import Scheduler
from worker.engine import Engine
from worker.outbox import Outbox
from worker.runner import Runner, RunnerOptions, open_runner

REQUESTS = 32
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
DEADLINE_SECONDS = 60.0


async def measure_waits(folder: ModelFolder, dtype: str, threads: int) -> list[dict[str, object]]:
    """The share of the working time that went by in waiting, with steps and exchanges overlapping and in turns."""
    # One thread for all steps, as a worker has it: another would start its own set of compute threads.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "model"))
    options = RunnerOptions(kv_memory_bytes=512 << 20, dtype=dtype, device="cpu", threads=threads)
    runner, pool = await asyncio.to_thread(open_runner, folder, options)
    async with running(redis_process()) as redis:
        url = f"redis://{redis.address}/0"
        async with running(python_process("manager", "-m", "cache_manager", OCTAVO_REDIS_URL=url)) as manager:
            shares = {
                overlap: await _wait_share(runner, pool, manager.address, overlap=overlap) for overlap in (True, False)
            }
    run = {"requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    names = {True: "wait_share", False: "wait_share_in_turns"}
    return [
        {"name": names[overlap], "value": round(100 * share, 3), "unit": "percent", **run}
        for overlap, share in shares.items()
    ]


async def _wait_share(runner: Runner, pool: PoolSpec, manager: str, *, overlap: bool) -> float:
    """Of one worker that serves the requests, which come together; prompts that no worker before it had."""
    async with _engine(runner, pool, manager, overlap=overlap) as engine:
        outbox = engine.open_outbox()
        for request in range(REQUESTS):
            prompt = tuple((token * (2 * request + overlap + 1)) % pool.vocab_size for token in range(PROMPT_TOKENS))
            engine.submit(outbox, Submission(request=request, prompt=prompt, max_tokens=OUTPUT_TOKENS))
        await _ended(outbox, REQUESTS)
        counts = engine.counts
        return counts.wait_seconds / (counts.wait_seconds + counts.step_seconds)


@asynccontextmanager
async def _engine(runner: Runner, pool: PoolSpec, manager: str, *, overlap: bool) -> AsyncGenerator[Engine]:
    scheduler = Scheduler(pool, max_step_tokens=512, max_running=REQUESTS, max_waiting=REQUESTS)
    attendance = Attendance([AttendClient(manager, DEADLINE_SECONDS)], draw=lambda: 0.0)
    ready = asyncio.Event()

    async def set_ready(welcome: bool) -> None:
        if welcome:
            ready.set()

    engine = Engine(
        scheduler, runner, attendance, set_ready=set_ready, max_unread_reports=10 * OUTPUT_TOKENS, overlap=overlap
    )
    name = WorkerId(f"bench-{os.getpid()}-{overlap}")
    loop = asyncio.create_task(
        engine.run(Registration(worker_id=name, incarnation=Incarnation(1), address="127.0.0.1:1", pool=pool))
    )
    try:
        await ready.wait()
        yield engine
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        await attendance.close()


async def _ended(outbox: Outbox, requests: int) -> None:
    """Read until so many requests have ended."""
    left = requests
    async for report in outbox.reports():
        assert not report.refused, report.refused
        left -= len(report.finished)
        if not left:
            return
