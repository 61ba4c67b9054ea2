"""What gRPC alone costs a gateway: a relay that writes a finished message for each token, and does nothing else.

    python -m bench.null_relay HOST:PORT      of the worker

Speaks as much of octavo.v1.Inference as `bench.gateway` asks of it. One Serve stream has the tokens of all calls, as a
gateway's has; a call's handler sleeps until the step has a token for it, and writes bytes that were made once.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import uvloop

from deploy.process import LOOPBACK
from octavo.records.serve import Submission
from octavo.service import SERVER_OPTIONS, open_channel
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import worker_pb2 as worker_v1
from octavo.v1 import worker_pb2_grpc as worker_v1_grpc
from octavo.wire.serve import report_from_wire, submission_to_wire


class NullRelay:
    """The handler of Generate, and the stream to the worker."""

    def __init__(self) -> None:
        """No call is there."""
        self._outgoing: asyncio.Queue[worker_v1.ServeRequest] = asyncio.Queue()
        self._calls: dict[int, asyncio.Event] = {}
        self._untold: dict[int, int] = {}
        """Tokens of each call that were not written."""

    async def generate(self, request: gateway_v1.GenerateRequest, context: Any) -> None:
        """A message a token."""
        number, news, left = len(self._calls), asyncio.Event(), request.max_tokens
        self._calls[number], self._untold[number] = news, 0
        submission = Submission(request=number, prompt=tuple(request.tokens.ids), max_tokens=left)
        self._outgoing.put_nowait(worker_v1.ServeRequest(submit=submission_to_wire(submission)))
        while left:
            await news.wait()
            news.clear()
            told, self._untold[number] = self._untold[number], 0
            for _ in range(told):
                await context.write(_MESSAGE)
            left -= told

    async def follow(self, worker: str) -> None:
        """Wake whom the worker's reports have tokens for."""
        async with open_channel(worker) as channel:
            async for message in worker_v1_grpc.WorkerStub(channel).Serve(self._submissions()):
                for run in report_from_wire(message).tokens:
                    self._untold[run.request] += len(run.tokens)
                    self._calls[run.request].set()

    async def _submissions(self) -> AsyncGenerator[worker_v1.ServeRequest]:
        while True:
            yield await self._outgoing.get()


_MESSAGE = gateway_v1.GenerateReply(delta=gateway_v1.Delta(text=" token", token_ids=[1000])).SerializeToString()


async def serve(worker: str) -> None:
    """Relay until killed."""
    relay = NullRelay()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    generate = grpc.unary_stream_rpc_method_handler(relay.generate, gateway_v1.GenerateRequest.FromString)
    service = gateway_v1.DESCRIPTOR.services_by_name["Inference"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Generate": generate})])
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    await server.start()
    print(json.dumps({"event": "serving", "port": port}), flush=True)
    await relay.follow(worker)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
