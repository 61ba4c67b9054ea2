"""A worker and its manager, each a real service in this process on loopback, and a gateway that speaks by hand."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cache_manager.change_queue import ChangeQueue
from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from cache_manager.manager import Manager
from cache_manager.servicer import CacheManagerServicer
from octavo.errors import UnknownWorker
from octavo.ids import Incarnation, WorkerId
from octavo.records.attend import Registration
from octavo.records.fleet import PoolSpec, WorkerInfo
from octavo.records.insight import CacheReset, PoolAudit
from octavo.records.serve import StepReport, Submission
from octavo.service import Service, open_channel
from octavo.status import translated
from octavo.v1 import worker_pb2 as v1
from octavo.v1 import worker_pb2_grpc as v1_grpc
from octavo.v1.cache_manager_pb2_grpc import add_CacheManagerServicer_to_server
from octavo.wire.serve import report_from_wire, submission_to_wire
from tests.support.memory_lookup import MemoryLookup
from tests.support.scheduling import Gateways
from worker.attendance import Attendance
from worker.cache_client import AttendClient, CacheClient
from worker.core.scheduler import Scheduler
from worker.engine import Engine
from worker.model_thread import StepRunner
from worker.servicer import WorkerServicer

WORKER_ID = WorkerId("w")
LEASE_SECONDS = 60.0


class ManagerProcess:
    """A cache manager that can be killed and started again at the same port. It audits every exchange."""

    def __init__(self, min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS) -> None:
        self._min_copy_tokens = min_copy_tokens
        self._listen = "127.0.0.1:0"
        self._now = 1_700_000_000.0

    @property
    def address(self) -> str:
        return self._listen

    async def start(self) -> None:
        self._now += 1.0  # so that epochs grow over a restart
        self.manager = Manager(
            ChangeQueue(),
            lease_seconds=LEASE_SECONDS,
            min_copy_tokens=self._min_copy_tokens,
            audit_every_exchange=True,
        )
        self._service = Service(self._listen, [])
        add_CacheManagerServicer_to_server(CacheManagerServicer(self.manager, lambda: self._now), self._service.server)
        self._listen = f"127.0.0.1:{await self._service.start()}"

    async def kill(self) -> None:
        """Streams are reset, nobody is told why."""
        await self._service.stop(0)

    def expire(self) -> None:
        """Let every lease run out."""
        self._now += 10 * LEASE_SECONDS
        self.manager.expire(self._now)

    def reset(self) -> CacheReset:
        return self.manager.reset(None, self._now)

    def info(self) -> WorkerInfo:
        """The one worker, as gateways are told of it."""
        with self.manager.subscribe() as subscription:
            (worker,) = subscription.take().workers
            return worker

    def audit(self) -> PoolAudit:
        return self.manager.audit(WORKER_ID)

    @property
    def attended(self) -> bool:
        """Whether the worker has registered here and is not gone."""
        try:
            self.manager.audit(WORKER_ID)
        except UnknownWorker:
            return False
        return True


@asynccontextmanager
async def manager_process(min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS) -> AsyncGenerator[ManagerProcess]:
    manager = ManagerProcess(min_copy_tokens)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.kill()


class GatewayStandIn:
    """A gateway's side of Serve: says what it is told to, and keeps what it hears."""

    def __init__(self, channel: Any) -> None:
        self.call = v1_grpc.WorkerStub(channel).Serve()
        self.heard = Gateways()
        self.reports: list[StepReport] = []

    async def say(self, message: v1.ServeRequest) -> None:
        await self.call.write(message)

    async def submit(self, submission: Submission) -> None:
        await self.say(v1.ServeRequest(submit=submission_to_wire(submission)))

    async def cancel(self, request: int, sample: int | None = None) -> None:
        await self.say(v1.ServeRequest(cancel=v1.Cancel(request=request, sample=sample)))

    async def hear(self) -> StepReport | None:
        """The next report; None when the worker has ended the stream. Raises what the worker raises."""
        with translated():
            async with asyncio.timeout(20):
                reply = await self.call.read()
        if not isinstance(reply, v1.ServeReply):
            return None
        report = report_from_wire(reply)
        self.reports.append(report)
        self.heard.hear(report)
        return report

    async def until_ended(self, *requests: Submission) -> None:
        """Hear reports until every sample of the requests has ended, or its request was refused."""

        def ended(request: Submission) -> bool:
            heard = self.heard.of(request.request)
            return heard.error is not None or len(heard.reasons) == request.samples

        while not all(ended(request) for request in requests):
            assert await self.hear() is not None, "the worker ended the stream"


@dataclass(slots=True)
class WorkerService:
    """The service and what stands behind it."""

    engine: Engine
    scheduler: Scheduler
    channel: Any
    loop: asyncio.Task[None]
    """Runs the engine."""
    ready: list[bool]
    """What health checks were told, in order."""

    def gateway(self) -> GatewayStandIn:
        return GatewayStandIn(self.channel)


@dataclass(slots=True)
class RealFleet:
    """A manager and its workers, as the fixture of a gateway asks for them. Nothing is in the index but claims."""

    manager: ManagerProcess
    workers: list[WorkerService] = field(default_factory=list[WorkerService])
    index: MemoryLookup = field(default_factory=MemoryLookup)


@asynccontextmanager
async def worker_service(
    pool: PoolSpec,
    runner: StepRunner,
    *clients: CacheClient,
    worker_id: WorkerId = WORKER_ID,
    max_unread_reports: int = 1024,
    overlap: bool = True,
    **limits: int,
) -> AsyncGenerator[WorkerService]:
    """A worker whose model is `runner`, for the time of the context."""
    scheduler = Scheduler(pool, **{"max_step_tokens": 64, "max_running": 16, "max_waiting": 1000, **limits})
    ready: list[bool] = []
    service = Service("127.0.0.1:0", [])

    async def set_ready(welcome: bool) -> None:
        ready.append(welcome)

    attendance = Attendance(clients, draw=lambda: 0.0)
    engine = Engine(
        scheduler, runner, attendance, set_ready=set_ready, max_unread_reports=max_unread_reports, overlap=overlap
    )
    v1_grpc.add_WorkerServicer_to_server(WorkerServicer(engine), service.server)
    port = await service.start(ready=False)
    registration = Registration(worker_id=worker_id, incarnation=Incarnation(7), address=f"127.0.0.1:{port}", pool=pool)
    loop = asyncio.create_task(engine.run(registration))
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield WorkerService(engine, scheduler, channel, loop, ready)
    finally:
        if not loop.done():
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
        await service.stop(0)
        await attendance.close()


def attend(manager: ManagerProcess) -> AttendClient:
    """A worker's adapter to the manager."""
    return AttendClient(manager.address, deadline_seconds=10)


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fails after 10 seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.002)
