"""Adapter: what a cache manager says of the fleet, as a stream of updates that survives the manager.

While the manager is away the last picture stands: the workers go on, and so does the gateway.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc

from octavo.errors import InvalidRequest
from octavo.records.fleet import FleetUpdate
from octavo.service import open_channel
from octavo.telemetry import Outage
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import cache_manager_pb2 as cache_manager_v1
from octavo.v1 import cache_manager_pb2_grpc as cache_manager_v1_grpc
from octavo.wire.fleet import fleet_from_wire

log = logging.getLogger("octavo.gateway")

_LEAST_DELAY_SECONDS = 0.1
_DELAY_SPREAD_SECONDS = 0.4


async def watch(
    address: str, draw: Callable[[], float], transport: Transport = PLAINTEXT
) -> AsyncGenerator[FleetUpdate | None]:
    """Everything the manager at `address` says, for ever; each connection begins with a snapshot.

    None when a stream that had begun is lost: until the next snapshot the manager says nothing.
    Connects again 100 to 500 ms after the stream was lost; `draw` gives random numbers in [0, 1), so that gateways
    do not come back in step. A manager that stays away is logged now and then, and when it is back.
    """
    outage = Outage()
    async with open_channel(address, transport) as channel:
        while True:
            begun = False
            async with aclosing(_until_lost(channel, address, transport, outage)) as updates:
                async for update in updates:
                    if not begun:
                        outage.back(log, "fleet_watch_found", address=address)
                    begun = True
                    yield update
            if begun:
                yield None
            await asyncio.sleep(_LEAST_DELAY_SECONDS + _DELAY_SPREAD_SECONDS * draw())


async def _until_lost(
    channel: grpc.aio.Channel, address: str, transport: Transport, outage: Outage
) -> AsyncGenerator[FleetUpdate]:
    stub = cache_manager_v1_grpc.CacheManagerStub(channel)
    try:
        async for message in stub.WatchFleet(cache_manager_v1.WatchFleetRequest(), metadata=transport.fleet_metadata):
            yield fleet_from_wire(message)
    except grpc.aio.AioRpcError as error:
        outage.away(log, "fleet_watch_lost", address=address, reason=error.details() or error.code().name)
    except InvalidRequest as error:  # a manager that does not speak this version
        outage.away(log, "fleet_update_malformed", address=address, reason=str(error), level=logging.ERROR)
