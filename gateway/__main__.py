"""python -m gateway: compose the service and run it until SIGTERM."""

import asyncio
import gc
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing

from gateway.bounds import Bounds
from gateway.catalogue import ServedModel
from gateway.core.request import Limits
from gateway.dispatcher import TELLING_SECONDS, Dispatcher
from gateway.explainer import PromptExplainer
from gateway.fleet_watch import watch
from gateway.http_door.routes import Gateway, build_app
from gateway.http_door.server import HttpServer
from gateway.metrics import GatewayMetrics
from gateway.open_inference_servicer import SERVICE_NAME as OPEN_INFERENCE
from gateway.open_inference_servicer import OpenInferenceServicer
from gateway.prefix_lookup import RedisLookup
from gateway.public_prefixes import PublicPrefix, as_read_by, read_public_prefixes
from gateway.servicer import SERVICE_NAME, InferenceServicer
from gateway.settings import GatewaySettings
from gateway.tenancy import Tenancy
from gateway.tokenizer import Tokenizer
from gateway.worker_client import Workers
from octavo import models, settings, telemetry
from octavo.metrics import Everything, metrics_endpoint
from octavo.redis_client import open_client
from octavo.service import Service, run
from octavo.transport import Transport
from octavo.v1.gateway_pb2_grpc import add_InferenceServicer_to_server
from octavo.v1.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

log = logging.getLogger("octavo.gateway")

MESSAGE_PROMPTS = 4
"""A message may be as long as so many of the longest prompts: what is somewhat too long is refused by its field, and
nobody waits for the gateway while it reads something that is far too long."""

TELLING_SHARE = 0.2
"""Of the grace, at most: for telling the clients of what has not ended in the rest of it."""

STOP_SECONDS = 1.0
"""For streams that have nothing more to say."""


async def serve(config: GatewaySettings) -> None:
    """Serve until asked to stop, then finish what runs. Ready once a cache manager has told of its workers, if any."""
    served = models_of(config)
    tenancy = Tenancy(config.tenants_file, config.salt_secret.get_secret_value())
    transport = config.transport()
    lookup = RedisLookup(open_client(config.redis_url), config.lookup_seconds)
    service = Service(
        config.listen,
        [SERVICE_NAME, OPEN_INFERENCE],
        transport=transport,
        max_message_bytes=MESSAGE_PROMPTS * config.max_prompt_bytes,
    )
    try:
        async with Workers(transport) as workers, PromptExplainer(config.cache_manager, transport) as explainer:
            dispatcher = Dispatcher(served, lookup=lookup, workers=workers, bounds=bounds_of(config))
            await lookup.check(dispatcher.fleet)
            add_InferenceServicer_to_server(InferenceServicer(dispatcher, tenancy, explainer), service.server)
            add_GRPCInferenceServiceServicer_to_server(
                OpenInferenceServicer(dispatcher, tenancy, lambda: service.ready), service.server
            )
            metrics = GatewayMetrics(dispatcher)
            http_doors = http_doors_of(config, Gateway(dispatcher, tenancy, Everything(metrics), lambda: service.ready))
            endpoint = metrics_endpoint(config.metrics_listen, metrics, lambda: service.ready)
            gc.freeze()  # what start-up made stays: to look at it again would stop every stream for 20 ms now and then
            async with endpoint, asyncio.TaskGroup() as tasks:
                await service.start(ready=False)
                for door in http_doors:
                    tasks.create_task(door.serve())
                watching = (keep_watching(each, dispatcher, service, transport) for each in config.cache_manager)
                background = [
                    *map(tasks.create_task, watching),
                    tasks.create_task(lookup.keep_checking(lambda: dispatcher.fleet)),
                    tasks.create_task(tenancy.keep_looking()),
                ]
                await service.until_asked_to_stop()
                telling = min(TELLING_SECONDS, TELLING_SHARE * config.grace_seconds)
                await dispatcher.drain(max(0.0, config.grace_seconds - telling - STOP_SECONDS), telling)
                await asyncio.gather(*(each.stop(STOP_SECONDS) for each in (service, *http_doors)))
                for task in background:
                    task.cancel()
    finally:
        await lookup.close()


async def keep_watching(cache_manager: str, dispatcher: Dispatcher, service: Service, transport: Transport) -> None:
    """Keep the dispatcher's picture of one manager's fleet; the first one makes the gateway ready."""
    ready = False
    async with aclosing(watch(cache_manager, random.random, transport)) as updates:
        async for update in updates:
            if update is None:
                dispatcher.manager_away(cache_manager)
                continue
            dispatcher.apply_fleet(update, cache_manager)
            if not ready:
                ready = True
                await service.set_ready(True)


def http_doors_of(config: GatewaySettings, gateway: Gateway) -> list[HttpServer]:
    """The HTTP server, where there is to be one. Raises CannotListen."""
    if config.http_listen is None:
        return []
    app = build_app(gateway, MESSAGE_PROMPTS * config.max_prompt_bytes)
    return [HttpServer(config.http_listen, app, config.tls_cert, config.tls_key)]


def models_of(config: GatewaySettings) -> list[ServedModel]:
    """The models whose words this gateway knows. Raises ValueError where two have one name."""
    public = () if config.public_prefixes_file is None else read_public_prefixes(config.public_prefixes_file)
    served = [_served(models.find(model, config.models_dir), public) for model in config.model]
    for name, count in Counter(model.name for model in served).items():
        if count > 1:
            raise ValueError(
                f"model: {count} of {len(served)} are called {name}, wanted 1; NAME= before one of them calls it NAME"
            )
    return served


def _served(folder: models.ModelFolder, public: Iterable[PublicPrefix]) -> ServedModel:
    tokenizer = Tokenizer(folder.path, folder.name)
    return ServedModel(
        name=folder.name,
        tokenizer=tokenizer,
        tokenizer_digest=folder.tokenizer_digest,
        stop_tokens=frozenset(folder.eos_token_ids),
        public_prefixes=as_read_by(tokenizer, folder.name, public),
    )


def bounds_of(config: GatewaySettings) -> Bounds:
    """The settings that say how much, and how long."""
    return Bounds(
        remembered_tokens=config.remembered_tokens,
        limits=Limits(
            max_samples=config.max_samples,
            max_prompt_bytes=config.max_prompt_bytes,
            max_batch_requests=config.max_batch_requests,
            max_stop_strings=config.max_stop_strings,
            max_stop_bytes=config.max_stop_bytes,
        ),
        stream_interval=config.stream_interval,
        max_running=config.max_running_requests,
        max_waiting=config.max_waiting_requests,
        max_wait_seconds=config.max_wait_seconds,
        max_request_seconds=config.max_request_seconds,
        max_attempts=config.max_attempts,
        max_standstill_seconds=config.max_standstill_seconds,
    )


def main() -> None:
    """Read the environment and serve."""
    config = settings.read(GatewaySettings, "An Octavo gateway.")
    telemetry.configure("gateway", config.log_level)
    try:
        run(serve(config))
    except (OSError, ValueError) as failure:  # said in one line; others are bugs
        log.error("cannot_serve", extra={"reason": str(failure)})
        sys.exit(1)


if __name__ == "__main__":
    main()
