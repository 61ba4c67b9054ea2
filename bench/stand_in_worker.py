"""A worker without a model, and the cache manager that tells of it: what a gateway has behind it in bench.gateway.

    python -m bench.stand_in_worker [SECONDS]      of a step

Speaks the real Serve. All requests of a stream get one token a step, in one message, at every multiple of a step of the
machine's monotonic clock; the token is the step's number, so whoever reads it knows when it was made. A request for one
token is answered when it comes.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.control_plane import NullServicer
from deploy.process import LOOPBACK
from octavo import models
from octavo.ids import Epoch, Incarnation, WorkerId
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerInfo, WorkerLoad
from octavo.records.serve import FinishReason, Prefilled, SampleFinished, StepReport, Tokens
from octavo.service import SERVER_OPTIONS
from octavo.v1 import cache_manager_pb2 as manager_v1
from octavo.v1 import cache_manager_pb2_grpc as manager_v1_grpc
from octavo.v1 import worker_pb2 as worker_v1
from octavo.v1 import worker_pb2_grpc as worker_v1_grpc
from octavo.wire.fleet import fleet_to_wire
from octavo.wire.serve import report_to_wire

STEP_SECONDS = 0.02
"""Unless it is told another."""
FIRST_TOKEN, NUM_TOKENS = 1000, 4096
"""Steps are told by these tokens, one after another and then anew."""
MODEL = models.DEFAULT


def token_of(step: int) -> int:
    """The token of a step."""
    return FIRST_TOKEN + step % NUM_TOKENS


def seconds_since(token: int, now: float) -> float:
    """How long ago the step of a token was due, of tokens within half a minute."""
    step = int(now / STEP_SECONDS)
    ago = (step - (token - FIRST_TOKEN) + NUM_TOKENS // 2) % NUM_TOKENS - NUM_TOKENS // 2
    return now - (step - ago) * STEP_SECONDS


class StandIn(worker_v1_grpc.WorkerServicer):
    """octavo.v1.Worker."""

    def __init__(self, step_seconds: float) -> None:
        """Make a token of every request so often."""
        self._step_seconds = step_seconds

    async def Serve(  # noqa: N802  # the schema's name
        self, request_iterator: AsyncIterator[worker_v1.ServeRequest], context: Any
    ) -> AsyncGenerator[worker_v1.ServeReply]:
        """One message a step for all requests of the stream."""
        left: dict[int, int] = {}
        replies: asyncio.Queue[StepReport] = asyncio.Queue()
        tasks = [
            asyncio.create_task(_listen(request_iterator, left, replies)),
            asyncio.create_task(_step(left, replies, self._step_seconds)),
        ]
        try:
            while True:
                yield report_to_wire(await replies.get())
        finally:
            for task in tasks:
                task.cancel()


async def _listen(
    requests: AsyncIterator[worker_v1.ServeRequest], left: dict[int, int], replies: asyncio.Queue[StepReport]
) -> None:
    async for message in requests:
        if message.WhichOneof("kind") == "cancel":
            left.pop(message.cancel.request, None)
            continue
        request = message.submit.request
        first = StepReport(prefilled=(Prefilled(request, 0),))
        if message.submit.max_tokens == 1:
            first = StepReport(
                tokens=(Tokens(request, 0, (FIRST_TOKEN,)),), prefilled=first.prefilled, finished=(_end(request),)
            )
        else:
            left[request] = message.submit.max_tokens
        replies.put_nowait(first)


async def _step(left: dict[int, int], replies: asyncio.Queue[StepReport], seconds: float) -> None:
    step = 0
    while True:
        step = max(step, int(time.monotonic() / seconds)) + 1  # a timer may be early
        await asyncio.sleep(step * seconds - time.monotonic())
        if not left:
            continue
        token = (token_of(step),)
        tokens = tuple(Tokens(request, 0, token) for request in left)
        for request in left:
            left[request] -= 1
        ended = [request for request, count in left.items() if count == 0]
        for request in ended:
            del left[request]
        replies.put_nowait(StepReport(tokens=tokens, finished=tuple(map(_end, ended))))


def _end(request: int) -> SampleFinished:
    return SampleFinished(request, 0, FinishReason.LENGTH)


class OneWorker(NullServicer):
    """octavo.v1.CacheManager, as far as a gateway asks."""

    def __init__(self, worker: WorkerInfo) -> None:
        """Tell of this one."""
        self._worker = worker

    async def WatchFleet(  # noqa: N802  # the schema's name
        self, request: manager_v1.WatchFleetRequest, context: Any
    ) -> AsyncGenerator[manager_v1.FleetUpdate]:
        """Everybody there is, and no news."""
        yield fleet_to_wire(FleetUpdate(workers=(self._worker,), snapshot=True))
        await asyncio.Event().wait()


async def serve(folder: models.ModelFolder, step_seconds: float) -> None:
    """Both services on one port, for that model, until killed."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    pool = PoolSpec(
        model=folder.name,
        model_digest=folder.model_digest,
        tokenizer_digest=folder.tokenizer_digest,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=16,
        num_blocks=1 << 18,
        max_model_tokens=folder.max_model_tokens,
        vocab_size=folder.vocab_size,
    )
    worker = WorkerInfo(
        worker_id=WorkerId("stand-in"),
        epoch=Epoch(1),
        address=f"{LOOPBACK}:{port}",
        pool=pool,
        load=WorkerLoad(),
        incarnation=Incarnation(1),
    )
    worker_v1_grpc.add_WorkerServicer_to_server(StandIn(step_seconds), server)
    manager_v1_grpc.add_CacheManagerServicer_to_server(OneWorker(worker), server)
    await server.start()
    print(json.dumps({"event": "serving", "port": port}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else STEP_SECONDS
    uvloop.run(serve(models.find(MODEL, Path("~/.cache/octavo/models").expanduser()), seconds))
