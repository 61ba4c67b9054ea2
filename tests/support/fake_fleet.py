"""Workers and a cache manager without a model, in this process, speaking the real protocols over real gRPC.

A fake worker answers a prompt with the prompt itself, over and over: output token i is prompt token i modulo its
length. It finishes as real ones do, computes each prompt whole, and publishes its blocks in a memory index.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import grpc

from octavo.errors import OctavoError, UnknownWorker
from octavo.hashing import block_hashes
from octavo.ids import Epoch, WorkerId
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerInfo, WorkerLoad
from octavo.records.serve import FinishReason, Prefilled, Refusal, SampleFinished, StepReport, Submission, Tokens
from octavo.service import SERVER_OPTIONS
from octavo.status import StatusInterceptor
from octavo.v1 import cache_manager_pb2_grpc as cache_manager_v1_grpc
from octavo.v1 import worker_pb2 as worker_v1
from octavo.v1 import worker_pb2_grpc as worker_v1_grpc
from octavo.wire.fleet import fleet_to_wire
from octavo.wire.serve import report_to_wire, submission_from_wire
from tests.support.memory_lookup import MemoryLookup

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must happen before it fails."""


Reports = asyncio.Queue[StepReport | None]
"""What goes to one gateway; None ends its stream."""


class News:
    """Something that changes, and a way to wait until it is as wanted."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class FakeWorker(worker_v1_grpc.WorkerServicer):
    """A worker at a free port. Its steps run while `gate` is set; what it was told is there to be read."""

    def __init__(self, name: str, spec: PoolSpec, index: MemoryLookup) -> None:
        self._server = _server()
        worker_v1_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._index = index
        self._published: set[bytes] = set()
        self.info = WorkerInfo(
            worker_id=WorkerId(name), epoch=Epoch(1), address=f"127.0.0.1:{port}", pool=spec, load=WorkerLoad()
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuses_with: OctavoError | None = None
        self.ends_streams = False
        self.submissions: list[Submission] = []
        self.cancelled: list[int] = []
        self.cancelled_samples: list[tuple[int, int]] = []
        """(request, sample)."""
        self.running: set[int] = set()
        self.streams = 0
        self._reports: list[Reports] = []
        self.news = News()

    async def start(self) -> None:
        await self._server.start()

    async def die(self) -> None:
        """Every stream ends at once, and nobody listens any more."""
        await self._server.stop(None)

    def say(self, report: StepReport) -> None:
        """To every gateway that listens."""
        for reports in self._reports:
            reports.put_nowait(report)

    def cut(self) -> None:
        """End the streams that there are; new ones are welcome."""
        for reports in self._reports:
            reports.put_nowait(None)

    def forget(self) -> None:
        """What was computed, as a new process has."""
        self._published.clear()

    async def until(self, condition: Callable[["FakeWorker"], bool]) -> None:
        await self.news.until(lambda: condition(self))

    async def Serve(self, request_iterator: Any, context: Any) -> AsyncGenerator[worker_v1.ServeReply]:  # noqa: N802 - the schema's name
        reports: Reports = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}
        self.streams += 1
        self._reports.append(reports)
        listening = asyncio.create_task(self._listen(request_iterator, reports, tasks))
        try:
            ended = self.ends_streams
            while not ended:
                steps = [await reports.get()]
                while not reports.empty():
                    steps.append(reports.get_nowait())
                ended = None in steps
                if said := [step for step in steps if step is not None]:
                    yield report_to_wire(reduce(_merged, said))
        finally:
            for task in (listening, *tasks.values()):
                task.cancel()
            await asyncio.gather(listening, *tasks.values(), return_exceptions=True)
            self._reports.remove(reports)
            self.streams -= 1
            self.news.tell()

    async def _listen(
        self,
        messages: AsyncIterator[Any],
        reports: Reports,
        tasks: dict[int, asyncio.Task[None]],
    ) -> None:
        async for message in messages:
            if message.HasField("submit"):
                submission = submission_from_wire(message.submit)
                self.submissions.append(submission)
                self.running.add(submission.request)
                tasks[submission.request] = asyncio.create_task(self._run(submission, reports))
            elif message.cancel.HasField("sample"):
                self.cancelled_samples.append((message.cancel.request, message.cancel.sample))
            else:
                self.cancelled.append(message.cancel.request)
                tasks[message.cancel.request].cancel()
            self.news.tell()

    async def _run(self, submission: Submission, reports: Reports) -> None:
        request = submission.request
        try:
            await self.gate.wait()
            if self.refuses_with is not None:
                reports.put_nowait(StepReport(refused=(Refusal(request, self.refuses_with),)))
                return
            reports.put_nowait(StepReport(prefilled=(Prefilled(request, self._attach(submission)),)))
            await self._decode(submission, reports)
        finally:
            self.running.discard(request)
            self.news.tell()

    async def _decode(self, submission: Submission, reports: Reports) -> None:
        request, first = submission.request, submission.first_sample
        samples = range(first, first + submission.samples)
        prompt = submission.prompt[: submission.output_begins]
        reason = FinishReason.LENGTH
        for at in range(submission.carried_tokens, submission.max_tokens):
            await self.gate.wait()
            token = prompt[at % len(prompt)]
            if token in submission.stop_tokens:
                reason = FinishReason.STOP
                break
            reports.put_nowait(StepReport(tokens=tuple(Tokens(request, sample, (token,)) for sample in samples)))
            await asyncio.sleep(0)  # a step is over: others run
        reports.put_nowait(StepReport(finished=tuple(SampleFinished(request, sample, reason) for sample in samples)))

    def _attach(self, submission: Submission) -> int:
        """Tokens of the prompt that were there before; all its full blocks are there afterwards."""
        spec = self.info.pool
        hashes = block_hashes(spec.chain_root(submission.scope).hash(), submission.prompt, spec.block_size)
        usable = (len(submission.prompt) - 1) // spec.block_size
        cached = next((at for at, each in enumerate(hashes[:usable]) if each not in self._published), usable)
        self._published.update(hashes)
        self._index.publish(self.info.worker_id, self.info.epoch, hashes)
        return cached * spec.block_size


class FakeManager(cache_manager_v1_grpc.CacheManagerServicer):
    """A cache manager that says what the test says."""

    def __init__(self) -> None:
        self._server = _server()
        cache_manager_v1_grpc.add_CacheManagerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._workers: dict[WorkerId, WorkerInfo] = {}
        self._watchers: set[asyncio.Queue[FleetUpdate]] = set()
        self.news = News()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def restart(self) -> None:
        """A new server at the same port, which knows what this one knows."""
        await self.stop()
        self._server = _server()
        cache_manager_v1_grpc.add_CacheManagerServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address) == self.port
        await self._server.start()

    def tell(self, *workers: WorkerInfo, gone: tuple[WorkerId, ...] = ()) -> None:
        self._workers.update({worker.worker_id: worker for worker in workers})
        for worker in gone:
            self._workers.pop(worker, None)
        for watcher in self._watchers:
            watcher.put_nowait(FleetUpdate(workers=workers, gone=gone))

    async def WatchFleet(self, request: Any, context: Any) -> AsyncGenerator[Any]:  # noqa: N802 - the schema's name
        updates: asyncio.Queue[FleetUpdate] = asyncio.Queue()
        self._watchers.add(updates)
        self.news.tell()
        try:
            yield fleet_to_wire(FleetUpdate(workers=tuple(self._workers.values()), snapshot=True))
            while True:
                yield fleet_to_wire(await updates.get())
        finally:
            self._watchers.discard(updates)
            self.news.tell()

    def Attend(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802 - the schema's name
        raise NotImplementedError("no worker attends a fake manager")

    def Audit(self, request: Any, context: Any) -> Any:  # noqa: N802 - the schema's name
        raise NotImplementedError("a fake manager has no books")

    def ExplainPrompt(self, request: Any, context: Any) -> Any:  # noqa: N802 - the schema's name
        raise UnknownWorker("a fake manager has no books")


class FakeFleet:
    """A manager and its workers."""

    def __init__(self) -> None:
        self.manager = FakeManager()
        self.index = MemoryLookup()
        self.workers: list[FakeWorker] = []

    async def add(self, name: str, spec: PoolSpec) -> FakeWorker:
        worker = FakeWorker(name, spec, self.index)
        await worker.start()
        self.workers.append(worker)
        self.manager.tell(worker.info)
        return worker

    def drain(self, worker: FakeWorker) -> None:
        worker.info = replace(worker.info, draining=True)
        self.manager.tell(worker.info)


@asynccontextmanager
async def fake_fleet() -> AsyncGenerator[FakeFleet]:
    fleet = FakeFleet()
    await fleet.manager.start()
    try:
        yield fleet
    finally:
        for worker in fleet.workers:
            worker.gate.set()
            await worker.die()
        await fleet.manager.stop()


def _server() -> grpc.aio.Server:
    return grpc.aio.server(interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)


def _merged(one: StepReport, other: StepReport) -> StepReport:
    return StepReport(
        tokens=one.tokens + other.tokens,
        prefilled=one.prefilled + other.prefilled,
        finished=one.finished + other.finished,
        refused=one.refused + other.refused,
    )
