"""`python -m gateway`: settings, adapters, dispatcher, servicer, put together."""

import asyncio
import random
from contextlib import aclosing

from gateway.core.request import Limits
from gateway.dispatcher import Bounds, Dispatcher, ServedModel
from gateway.fleet_watch import watch
from gateway.prefix_lookup import RedisLookup
from gateway.servicer import InferenceServicer
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from gateway.worker_client import Workers
from octavo import models, service, settings, telemetry
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc


async def serve(wanted: GatewaySettings) -> None:
    """Run a gateway until it is asked to stop. It is ready once it knows the fleet, be it empty."""
    lookup = RedisLookup(wanted.redis_url, wanted.lookup_seconds)
    front = service.Service(wanted.listen, [gateway_v1.DESCRIPTOR.services_by_name["Inference"].full_name])
    try:
        async with Workers() as workers:
            dispatcher = Dispatcher([_served(wanted)], lookup=lookup, workers=workers, bounds=_bounds(wanted))
            gateway_v1_grpc.add_InferenceServicer_to_server(InferenceServicer(dispatcher), front.server)
            await lookup.warm_up()
            await front.start(ready=False)
            watching = asyncio.create_task(_keep_watching(wanted.cache_manager, dispatcher, front))
            await front.until_asked_to_stop()
            dispatcher.drain()
            await front.stop(wanted.grace_seconds)
            watching.cancel()
    finally:
        await lookup.close()


async def _keep_watching(address: str, dispatcher: Dispatcher, front: service.Service) -> None:
    """Keep the dispatcher's picture of the fleet; the first one makes the gateway ready."""
    ready = False
    async with aclosing(watch(address, random.random)) as updates:
        async for update in updates:
            dispatcher.apply_fleet(update)
            if not ready:
                await front.set_ready(True)
                ready = True


def _served(wanted: GatewaySettings) -> ServedModel:
    folder = models.find(wanted.model, wanted.models_dir.expanduser())
    return ServedModel(
        name=folder.name,
        tokenizer=Tokenizer(folder.path, folder.name),
        tokenizer_digest=folder.tokenizer_digest,
        stop_tokens=frozenset(folder.eos_token_ids),
    )


def _bounds(wanted: GatewaySettings) -> Bounds:
    return Bounds(
        limits=Limits(
            max_samples=wanted.max_samples,
            max_prompt_bytes=wanted.max_prompt_bytes,
            max_stop_strings=wanted.max_stop_strings,
            max_stop_bytes=wanted.max_stop_bytes,
        ),
        max_running=wanted.max_running_requests,
        max_waiting=wanted.max_waiting_requests,
        max_wait_seconds=wanted.max_wait_seconds,
        max_request_seconds=wanted.max_request_seconds,
        max_attempts=wanted.max_attempts,
    )


if __name__ == "__main__":
    values = settings.read(GatewaySettings, "The front door of an Octavo fleet.")
    telemetry.configure("gateway", values.log_level)
    service.run(serve(values))
