"""python -m cache_manager: compose the service and run it until SIGTERM."""

import asyncio
import contextlib
import gc
import logging
import sys
import time
from dataclasses import replace
from importlib import import_module

from cache_manager.allowances import PLAIN_LRU, SEGMENTED, EvictionSettings, require_floors_fit
from cache_manager.change_queue import ChangeQueue
from cache_manager.core.ledger import is_compiled
from cache_manager.manager import Manager
from cache_manager.metrics import ManagerMetrics
from cache_manager.restored_audit import audit_restored
from cache_manager.servicer import SERVICE_NAME, CacheManagerServicer, Now
from cache_manager.settings import CacheManagerSettings
from octavo import settings, telemetry
from octavo.metrics import metrics_endpoint
from octavo.pool_part import parse_pool_part
from octavo.service import Service, run
from octavo.tenants import read_tenants
from octavo.transport import Transport
from octavo.v1.cache_manager_pb2_grpc import add_CacheManagerServicer_to_server

log = logging.getLogger("octavo.cache_manager")

TTL_LEASES = 3
"""Lease times after which the copy of an index that nobody renews is dropped by Redis."""


async def serve(config: CacheManagerSettings, eviction: EvictionSettings, transport: Transport) -> None:
    """Serve until asked to stop; then send the workers to another manager, and tell Redis."""
    now = _clock()
    changes = ChangeQueue()
    manager = Manager(
        changes,
        lease_seconds=config.lease_seconds,
        min_copy_tokens=config.min_copy_tokens,
        eviction=eviction,
        audit_every_exchange=config.audit,
    )
    service = Service(config.listen, [SERVICE_NAME], transport=transport, internal=True)
    add_CacheManagerServicer_to_server(CacheManagerServicer(manager, now), service.server)
    gc.freeze()  # what start-up made stays: to look at it again would stop the service for 20 ms now and then
    endpoint = metrics_endpoint(config.metrics_listen, ManagerMetrics(manager), lambda: service.ready)
    async with endpoint, asyncio.TaskGroup() as tasks:
        log.info("keeping_books", extra={"compiled": is_compiled()})
        await service.start()
        background = [
            tasks.create_task(keep_leases(manager, now, config.lease_seconds)),
            tasks.create_task(keep_mirror(changes, config)),
            tasks.create_task(audit_restored(manager, now)),
        ]
        await service.until_asked_to_stop()
        await leave(manager, config.grace_seconds)
        await service.stop(grace_seconds=1.0)
        for task in background:
            task.cancel()


def eviction_of(config: CacheManagerSettings) -> EvictionSettings:
    """Which blocks make room in every pool, tenants as their file says now.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no tenants file, or owes more than there is.
    """
    tenants = () if config.tenants_file is None else tuple(read_tenants(config.tenants_file))
    require_floors_fit(tenants)
    order = PLAIN_LRU if config.eviction == "lru" else SEGMENTED
    return replace(order, tenants=tenants, retention_quota=parse_pool_part(config.retention_quota))


async def keep_leases(manager: Manager, now: Now, lease_seconds: float) -> None:
    """Expire the workers that are not heard, when their time has come."""
    while True:
        expiry = manager.next_expiry()
        await asyncio.sleep(lease_seconds if expiry is None else max(0.0, expiry - now()))
        manager.expire(now())


async def keep_mirror(changes: ChangeQueue, config: CacheManagerSettings) -> None:
    """Bring to Redis what the queue says, until cancelled; then its last words.

    The library for Redis takes a fifth of a second to load, for which no worker needs to wait.
    """
    await asyncio.to_thread(import_module, "cache_manager.redis_mirror")
    from cache_manager.redis_mirror import RedisMirror
    from octavo.redis_client import open_client

    mirror = RedisMirror(open_client(config.redis_url), changes, ttl_seconds=TTL_LEASES * config.lease_seconds)
    try:
        await mirror.run()
    finally:
        await mirror.close()


async def leave(manager: Manager, grace_seconds: float) -> None:
    """Send the workers to another manager; those that leave themselves have the grace for it."""
    manager.hand_over()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_seconds):
            await manager.until_alone()
    manager.close()


def _clock() -> Now:
    """The time of day, which it takes from the system once; an operator who corrects the clock expires nobody."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


def main() -> None:
    """Read the environment and serve."""
    config = settings.read(CacheManagerSettings, "The Octavo cache manager.")
    telemetry.configure("cache_manager", config.log_level)
    try:
        eviction, transport = eviction_of(config), config.transport()
    except (OSError, ValueError) as failure:  # said in one line
        log.error("cannot_serve", extra={"reason": str(failure)})
        sys.exit(1)
    run(serve(config, eviction, transport))


if __name__ == "__main__":
    main()
