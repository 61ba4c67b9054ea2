"""A real gateway in this process, on loopback, in front of a fake fleet."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gateway.bounds import Bounds
from gateway.catalogue import ServedModel
from gateway.client import AsyncClient
from gateway.core.retries import NEVER
from gateway.dispatcher import Dispatcher
from gateway.explainer import PromptExplainer
from gateway.fleet_watch import watch
from gateway.http_door.routes import Gateway as Front
from gateway.http_door.routes import build_app
from gateway.http_door.server import HttpServer
from gateway.metrics import GatewayMetrics
from gateway.open_inference_servicer import OpenInferenceServicer
from gateway.prefix_lookup import PrefixLookup
from gateway.servicer import InferenceServicer
from gateway.tenancy import Tenancy
from gateway.tokenizer import Tokenizer
from gateway.worker_client import Workers
from octavo.metrics import Everything
from octavo.records.fleet import FleetUpdate, PoolSpec
from octavo.service import SERVER_OPTIONS, open_channel
from octavo.status import StatusInterceptor
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from octavo.v1.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from tests.support import words
from tests.support.fake_fleet import FakeFleet, News
from tests.support.fleets import pool

TOKENIZER_DIGEST = b"w" * 32


def words_pool(**fields: Any) -> PoolSpec:
    """A pool for the model of `tests.support.words`."""
    defaults = {"tokenizer_digest": TOKENIZER_DIGEST, "max_model_tokens": words.MAX_MODEL_TOKENS}
    return pool(vocab_size=words.VOCAB_SIZE, **defaults | fields)


@dataclass
class Gateway:
    """The service, seen from both sides."""

    dispatcher: Dispatcher
    client: AsyncClient
    channel: grpc.aio.Channel
    stub: Any
    news: News
    address: str
    http: str
    """http://host:port of the HTTP door."""

    async def until_fleet(self, condition: Callable[[list[str]], bool]) -> None:
        """Return when the ids of the workers that it knows are as wanted."""
        await self.news.until(lambda: condition(sorted(worker.worker_id for worker in self.dispatcher.fleet)))

    async def load(self) -> gateway_v1.GatewayLoad:
        reply = await self.stub.GetFleet(gateway_v1.GetFleetRequest(), timeout=10)
        return reply.gateway

    def at_rest(self) -> bool:
        return (self.dispatcher.running, self.dispatcher.waiting, self.dispatcher.reservations) == (0, 0, 0)


@asynccontextmanager
async def gateway(
    fleet: FakeFleet,
    folder: Path,
    bounds: Bounds | None = None,
    tenancy: Tenancy | None = None,
    lookup: PrefixLookup | None = None,
    chat_template: str = words.CHAT_TEMPLATE,
) -> AsyncGenerator[Gateway]:
    """Return when it has seen every worker that the fleet has. It asks `lookup`, or the fleet's own index."""
    model = ServedModel(
        name="words",
        tokenizer=Tokenizer(words.save_model(folder, chat_template), "words"),
        tokenizer_digest=TOKENIZER_DIGEST,
        stop_tokens=frozenset({words.EOS_TOKEN}),
    )
    server = grpc.aio.server(interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    async with (
        Workers() as workers,
        PromptExplainer([fleet.manager.address]) as explainer,
        open_channel(address) as channel,
        AsyncClient(address, retries=NEVER) as client,
    ):
        dispatcher = Dispatcher([model], lookup=lookup or fleet.index, workers=workers, bounds=bounds or Bounds())
        known = tenancy or Tenancy()
        servicer = InferenceServicer(dispatcher, known, explainer)
        gateway_v1_grpc.add_InferenceServicer_to_server(servicer, server)
        watched = OpenInferenceServicer(dispatcher, known, lambda: dispatcher.fleet != ())
        add_GRPCInferenceServiceServicer_to_server(watched, server)
        await server.start()
        app = build_app(Front(dispatcher, known, Everything(GatewayMetrics(dispatcher)), lambda: True), 1 << 20)
        http = HttpServer("127.0.0.1:0", app)
        serving = asyncio.create_task(http.serve())
        news = News()
        stub, url = gateway_v1_grpc.InferenceStub(channel), f"http://127.0.0.1:{http.port}"
        running = Gateway(dispatcher, client, channel, stub, news, address, url)

        def apply(update: FleetUpdate | None) -> None:
            if update is None:
                dispatcher.manager_away(fleet.manager.address)
            else:
                dispatcher.apply_fleet(update, fleet.manager.address)
            news.tell()

        watching = asyncio.create_task(_watch(fleet.manager.address, apply))
        try:
            await running.until_fleet(lambda names: len(names) == len(fleet.workers))
            yield running
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await server.stop(None)
            await http.stop(0)
            await serving


async def _watch(address: str, apply: Callable[[FleetUpdate | None], None]) -> None:
    async with aclosing(watch(address, lambda: 0.0)) as updates:
        async for update in updates:
            apply(update)
