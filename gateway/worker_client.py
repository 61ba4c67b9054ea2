"""Adapter: the Serve streams to the workers, one per worker process.

A stream is opened by its first request and closed when its worker is gone and its last request has ended.
Everything a worker produced in a step comes as one message; it is taken apart here, by request.
Invariant: every call ends, be it with its last sample, an error from the worker, or WorkerLost.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Self

import grpc

from gateway.core.fleet import WorkerProcess, process_of
from gateway.core.interval import Interval
from gateway.core.transcript import Said
from gateway.waker import Waker
from octavo.errors import InvalidRequest, OctavoError, WorkerLost
from octavo.records.fleet import WorkerInfo
from octavo.records.serve import SampleFinished, StepReport, Submission, Tokens
from octavo.service import open_channel
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import worker_pb2 as worker_v1
from octavo.v1 import worker_pb2_grpc as worker_v1_grpc
from octavo.wire.serve import report_from_wire, submission_to_wire

log = logging.getLogger("octavo.gateway")


class WorkerCall:
    """One request at one worker. Ask what it says until all samples are finished; `close` it in any case.

    Whatever the worker says before the reader comes is heard at once: a reader that lags catches up.
    """

    def __init__(self, stream: "_WorkerStream", interval: Interval, waker: Waker) -> None:
        """Have the reader woken by `waker` for all that is said; for tokens when `interval` says so."""
        self._stream = stream
        self._waker = waker
        self._interval = interval
        self._live: dict[int, set[int]] = {}
        """Number of each submission on the stream -> its samples that the worker has not ended."""
        self._said: list[Said] = []
        """In order, and not heard."""
        self._error: OctavoError | TimeoutError | None = None
        self._late = False
        self._awake = False
        """The reader's turn has come, and it has not."""
        self._reader: asyncio.Future[None] | None = None
        """Waits for its turn."""

    async def hear(self) -> list[Said]:
        """What the worker has said about this request since the last call, at least something.

        Raises:
            OctavoError: the worker refused the request.
            WorkerLost: the worker, or the stream to it, is gone.
            TimeoutError: the request has no more time.
        """
        while True:
            if not self._awake:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            self._awake = self._error is not None
            if self._said and not self._late:
                said, self._said = self._said, []
                self._interval.told()
                return said
            if self._error is not None:
                raise self._error
            # Woken for what the turn before has taken along.

    def go_on(self) -> None:
        """For the waker: the reader has its turn."""
        self._awake = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def expect(self, number: int, submission: Submission) -> None:
        """For the stream: a part of the request was sent under that number."""
        first = submission.first_sample
        self._live[number] = set(range(first, first + submission.samples))

    def put(self, said: Said) -> None:
        """For the stream: the worker said this."""
        self._said.append(said)
        if not isinstance(said, Tokens) or self._interval.due(said.sample, len(said.tokens)):
            self._waker.wake(self)
        if isinstance(said, SampleFinished):
            self._live[said.request].discard(said.sample)

    def fail(self, error: OctavoError | TimeoutError, number: int | None = None) -> None:
        """For the stream: the request ends here, since the worker is gone or refused the part with that number."""
        if number is not None:
            self._live[number].clear()
        self._error = error
        self.go_on()

    def expire(self, error: TimeoutError) -> None:
        """The request has no more time: nothing that the worker says counts any more.

        One timer for a call, and not one for each wait, which would cost a fifth of what a token does.
        """
        self._late = True
        self.fail(error)

    def close(self) -> None:
        """Forget the request; a worker that has not finished it is told to stop."""
        for number, live in self._live.items():
            self._stream.forget(number, cancel=bool(live))

    def stop(self, sample: int) -> None:
        """Let the worker make no more of a sample. The last one of a part ends that part."""
        for number, live in self._live.items():
            if sample in live:
                live.remove(sample)
                if live:
                    self._stream.cancel(number, sample)
                else:
                    self._stream.forget(number, cancel=True)


class _WorkerStream:
    """One Serve stream and the requests on it."""

    def __init__(self, worker: WorkerInfo, transport: Transport, waker: Waker) -> None:
        self._worker = worker
        self._transport = transport
        self._waker = waker
        self._outgoing: asyncio.Queue[worker_v1.ServeRequest | None] = asyncio.Queue()
        """None: there will be no more."""
        self._calls: dict[int, WorkerCall] = {}
        self._last_request = 0
        self.lost = False

    @property
    def idle(self) -> bool:
        """Whether no request is on it."""
        return not self._calls

    def submit(self, parts: Iterable[Submission], interval: Interval) -> WorkerCall:
        """Send the parts of a request, each under a number of this stream's own; all of them, or none."""
        numbered = [replace(part, request=self._last_request + at) for at, part in enumerate(parts, 1)]
        messages = [worker_v1.ServeRequest(submit=submission_to_wire(part)) for part in numbered]
        self._last_request += len(numbered)
        call = WorkerCall(self, interval, self._waker)
        for part, message in zip(numbered, messages, strict=True):
            self._calls[part.request] = call
            call.expect(part.request, part)
            self._outgoing.put_nowait(message)
        return call

    def forget(self, request: int, *, cancel: bool) -> None:
        """Take no more reports of a request, and tell the worker if it may still be at it."""
        if self._calls.pop(request, None) is not None and cancel:
            self._outgoing.put_nowait(worker_v1.ServeRequest(cancel=worker_v1.Cancel(request=request)))

    def cancel(self, request: int, sample: int) -> None:
        """Tell the worker to end one sample."""
        self._outgoing.put_nowait(worker_v1.ServeRequest(cancel=worker_v1.Cancel(request=request, sample=sample)))

    async def run(self) -> None:
        """Carry messages until the stream is lost or this task is cancelled; then every call has ended."""
        reason = "the gateway closed the stream"
        try:
            async with open_channel(self._worker.address, self._transport) as channel:
                stub = worker_v1_grpc.WorkerStub(channel)
                async for message in stub.Serve(self._messages(), metadata=self._transport.fleet_metadata):
                    self._deliver(report_from_wire(message))
            reason = "the worker ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        except InvalidRequest as error:  # a worker that does not speak this version
            reason = f"malformed report: {error}"
        finally:
            self._end(reason)

    async def _messages(self) -> AsyncGenerator[worker_v1.ServeRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _deliver(self, report: StepReport) -> None:
        """Give each request its part. A request that was forgotten may still be spoken of for a step or two."""
        for said in chain(report.prompt_logprobs, report.prefilled, report.tokens, report.finished):
            if call := self._calls.get(said.request):
                call.put(said)
        for refusal in report.refused:
            if call := self._calls.pop(refusal.request, None):
                call.fail(refusal.error, refusal.request)

    def _end(self, reason: str) -> None:
        self.lost = True
        self._outgoing.put_nowait(None)  # gRPC's reader of a stream that its server ended waits on, as long as it lives
        worker = self._worker.worker_id
        log.info("worker_stream_ended", extra={"worker": worker, "reason": reason, "requests": len(self._calls)})
        self.fail(WorkerLost(f"worker {worker}: {reason}"))

    def fail(self, error: OctavoError) -> None:
        """End every call with an error; a worker that is still there is told by whoever closes them."""
        for call in set(self._calls.values()):
            call.fail(error)


class Workers:
    """The streams of one gateway. Use as `async with`: leaving it closes them all."""

    def __init__(self, transport: Transport = PLAINTEXT) -> None:
        self._transport = transport
        self._waker = Waker()
        self._streams: dict[WorkerProcess, tuple[_WorkerStream, asyncio.Task[None]]] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, task in self._streams.values():
            task.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def submit(self, worker: WorkerInfo, parts: Iterable[Submission], interval: Interval) -> WorkerCall:
        """Send the parts of one request to a worker; their numbers are replaced by the stream's own.

        `interval` says how often its tokens are told.
        """
        process = process_of(worker)
        stream, _ = self._streams.get(process, (None, None))
        if stream is None or stream.lost:
            stream = _WorkerStream(worker, self._transport, self._waker)
            self._streams[process] = (stream, self._tasks.create_task(stream.run()))
        return stream.submit(parts, interval)

    def fail(self, process: WorkerProcess, error: OctavoError) -> None:
        """End everything that is at a worker; it is told to stop."""
        if process in self._streams:
            self._streams[process][0].fail(error)

    def fail_all(self, error: OctavoError) -> None:
        """End everything that is at any worker."""
        for stream, _ in self._streams.values():
            stream.fail(error)

    def keep(self, live: Collection[WorkerProcess]) -> None:
        """Close the streams of workers that are not live any more and on which nothing is left; call it often.

        A worker that its manager has given up goes on with what it has, so its stream stays until that is done.
        """
        for process, (stream, task) in list(self._streams.items()):
            if process not in live and (stream.idle or stream.lost):
                task.cancel()
                del self._streams[process]
