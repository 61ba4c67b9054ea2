"""A real model behind a real worker and its manager, and a gateway that speaks by hand."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from octavo import models
from octavo.records.fleet import PoolSpec
from octavo.records.serve import Submission
from tests.support import tiny_model
from tests.support.oracle import solo_greedy
from tests.support.worker_service import (
    GatewayStandIn,
    ManagerProcess,
    WorkerService,
    attend,
    manager_process,
    until,
    worker_service,
)
from worker.core.step import StepPlan, StepResult
from worker.runner import Runner, RunnerOptions, open_runner

SIZE = 16
"""Positions of a block."""


class WatchedRunner:
    """A runner, and what it was asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self._runner.execute(plan)


class Stack:
    """Manager, worker and one gateway."""

    def __init__(self, folder: Path, manager: ManagerProcess, worker: WorkerService, plans: list[StepPlan]) -> None:
        self.folder = folder
        self.plans = plans
        """Of all steps, in order."""
        self.manager = manager
        self.worker = worker
        self.gateway: GatewayStandIn = worker.gateway()

    async def serve(self, *requests: Submission) -> None:
        """Submit all at once and hear them to their ends."""
        for request in requests:
            await self.gateway.submit(request)
        await self.gateway.until_ended(*requests)

    def text(self, request: Submission, sample: int = 0) -> list[int]:
        return self.gateway.heard.of(request.request).tokens[sample]

    def assert_greedy(self, *requests: Submission) -> None:
        for request in requests:
            assert self.text(request) == solo_greedy(self.folder, request.prompt, request.max_tokens)

    async def until_at_rest(self) -> None:
        await until(lambda: self.manager.audit().held_blocks == 0)
        audit = self.manager.audit()
        assert audit.violation == ""
        assert audit.free_blocks + audit.cached_blocks == audit.num_blocks


@asynccontextmanager
async def stack(
    folder: Path,
    *,
    blocks: int,
    size: int = SIZE,
    min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS,
    **limits: int,
) -> AsyncGenerator[Stack]:
    """The model on a pool of so many blocks."""
    shape = open_tiny(folder, size, kv_memory_bytes=1 << 23)[0].pool.shape
    runner, pool = open_tiny(folder, size, kv_memory_bytes=blocks * shape.bytes_per_block)
    assert pool.num_blocks == blocks
    watched = WatchedRunner(runner)
    async with (
        manager_process(min_copy_tokens) as manager,
        worker_service(pool, watched, attend(manager), **limits) as worker,
    ):
        yield Stack(folder, manager, worker, watched.plans)


def open_tiny(folder: Path, size: int, kv_memory_bytes: int) -> tuple[Runner, PoolSpec]:
    options = RunnerOptions(kv_memory_bytes=kv_memory_bytes, block_size=size, dtype="float32", threads=1)
    return open_runner(models.find(str(folder), folder.parent), options)


def prompt(seed: int, length: int) -> list[int]:
    return Random(seed).choices(range(3, tiny_model.VOCAB_SIZE), k=length)
