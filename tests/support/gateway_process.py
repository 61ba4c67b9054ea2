"""`python -m gateway`: a process of its own, asked the way an operator asks."""

import asyncio
import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from deploy.process import Process, log_event, running
from octavo.service import open_channel, probe
from octavo.status import translated
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from tests.support.fake_fleet import PATIENCE_SECONDS
from tests.support.scrape import Samples, scrape


def _served_port(line: str) -> int | None:
    event = log_event(line)
    return event["port"] if event is not None and event["event"] == "serving" else None


def gateway_process(managers: str, redis_url: str, model: Path, **more: str) -> AbstractAsyncContextManager[Process]:
    """A gateway whose port is open; it is not ready before one of the managers (host:port,host:port) answers."""
    settings = {
        "OCTAVO_CACHE_MANAGER": managers,
        "OCTAVO_REDIS_URL": redis_url,
        "OCTAVO_MODEL": str(model),
        "OCTAVO_LOOKUP_SECONDS": "1",
        **more,
    }
    command = [sys.executable, "-m", "gateway"]
    return running(Process("gateway", lambda _: command, env={**os.environ, **settings}, served_port=_served_port))


async def load_of(process: Process) -> gateway_v1.GatewayLoad:
    """What it says of itself."""
    async with open_channel(process.address) as channel:
        with translated():
            reply = await gateway_v1_grpc.InferenceStub(channel).GetFleet(gateway_v1.GetFleetRequest(), timeout=10)
        return reply.gateway


async def until_exact(process: Process) -> None:
    """No request asks: the gateway looks for itself."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await load_of(process)).index_state != gateway_v1.INDEX_STATE_EXACT:
            pass


async def scrape_of(process: Process) -> Samples:
    """Its metrics; it is told where to serve them."""
    return await scrape(process.events("metrics_served")[0]["port"])


def index_state(samples: Samples) -> str:
    """The one that is told as a metric."""
    (state,) = (labels[0] for (name, *labels), value in samples.items() if name == "octavo_index_state" and value)
    return state


async def until_ready(process: Process, wanted: bool = True) -> None:
    """Return when its health is as wanted."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await asyncio.to_thread(probe, process.address) != wanted:
            pass
