"""A worker, put together: load the model, compose the service and run it until SIGTERM."""

import asyncio
import logging
import random
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from octavo import models
from octavo.ids import Incarnation, WorkerId
from octavo.metrics import metrics_endpoint
from octavo.records.attend import Registration
from octavo.records.fleet import PoolSpec
from octavo.service import Service
from octavo.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from worker.attendance import Attendance
from worker.cache_client import AttendClient
from worker.core.drafting import Drafter, Lookups
from worker.core.scheduler import Scheduler
from worker.draft_model import DraftModel, require_same_tokens
from worker.engine import Engine
from worker.metrics import WorkerMetrics
from worker.runner import Runner, RunnerOptions, open_runner
from worker.servicer import SERVICE_NAME, WorkerServicer
from worker.settings import WorkerSettings

log = logging.getLogger("octavo.worker")

STOP_SECONDS = 1.0
"""For streams that have nothing more to say."""


async def serve(config: WorkerSettings) -> None:
    """Serve until asked to stop, then finish what runs. Ready as long as the cache manager knows this worker."""
    # One thread loads the model and runs every step: a new thread would start its own set of compute threads.
    thread = ThreadPoolExecutor(1, "model")
    asyncio.get_running_loop().set_default_executor(thread)
    drafter = await drafter_of(config, thread)  # first: the pool gets what this leaves
    runner, pool = await load(config)
    transport = config.transport()
    managers = [AttendClient(address, config.exchange_seconds, transport) for address in config.cache_manager]
    attendance = Attendance(managers, random.random)
    service = Service(config.listen, [SERVICE_NAME], transport=transport, internal=True)
    scheduler = Scheduler(
        pool,
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        drafter=drafter,
    )
    engine = Engine(
        scheduler,
        runner,
        attendance,
        set_ready=service.set_ready,
        max_unread_reports=config.max_unread_reports,
        overlap=config.overlap,
    )
    add_WorkerServicer_to_server(WorkerServicer(engine), service.server)
    port = await service.start(ready=False)
    try:
        metrics = WorkerMetrics(engine, scheduler)
        endpoint = metrics_endpoint(config.metrics_listen, metrics, lambda: service.ready)
        async with endpoint, asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(engine.run(registration_of(config, pool, port)))
            await service.until_asked_to_stop()
            await engine.drain(max(0.0, config.grace_seconds - STOP_SECONDS))
            loop.cancel()
    finally:
        await attendance.close()
        await service.stop(STOP_SECONDS)


async def load(config: WorkerSettings) -> tuple[Runner, PoolSpec]:
    """The model on its pool. Takes seconds, in the model's thread."""
    folder = models.find(config.model, config.models_dir)
    log.info("model_loading", extra={"model": folder.name, "path": str(folder.path)})
    started = time.monotonic()
    runner, pool = await asyncio.to_thread(open_runner, folder, _options(config))
    log.info(
        "model_loaded",
        extra={
            "model": folder.name,
            "seconds": round(time.monotonic() - started, 1),
            "dtype": pool.dtype,
            "kv_dtype": pool.kv_dtype,
        },
    )
    return runner, pool


async def drafter_of(config: WorkerSettings, thread: ThreadPoolExecutor) -> Drafter | None:
    """Who guesses, if anybody. A draft model runs in the model's thread: steps are planned when that is idle.

    Raises:
        ValueError: the draft model has other tokens than the model.
    """
    if config.draft_model is None:
        return Drafter(Lookups()) if config.speculate == "ngram" else None
    draft = models.find(config.draft_model, config.models_dir)
    require_same_tokens(draft, models.find(config.model, config.models_dir))
    options = replace(_options(config), kv_memory_bytes=config.draft_memory, cuda_graphs=False)
    runner, pool = await asyncio.to_thread(open_runner, draft, options)
    log.info("draft_model_loaded", extra={"model": draft.name, "pool_tokens": pool.num_blocks * pool.block_size})
    source = DraftModel(
        lambda plan: thread.submit(runner.execute, plan).result(),
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_tokens=pool.max_model_tokens,
    )
    return Drafter(source)


def _options(config: WorkerSettings) -> RunnerOptions:
    return RunnerOptions(
        device=config.device,
        road=config.model_road,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        threads=config.threads,
        deterministic=config.deterministic,
        cuda_graphs=config.cuda_graphs,
        kv_memory_bytes=config.kv_memory,
        gpu_memory_share=config.gpu_memory_share,
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        block_size=config.block_size,
    )


def registration_of(config: WorkerSettings, pool: PoolSpec, port: int) -> Registration:
    """What the cache manager is told of this process."""
    return Registration(
        worker_id=WorkerId(config.worker_id or f"worker-{secrets.token_hex(4)}"),
        incarnation=Incarnation(secrets.randbits(64)),
        address=config.advertised(port),
        pool=pool,
    )
