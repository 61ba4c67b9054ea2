"""A real cache manager service in this process, on loopback, under a clock that the test moves; stand-in workers."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from cache_manager.change_queue import MAX_PENDING, ChangeQueue
from cache_manager.manager import Manager
from cache_manager.redis_mirror import RedisMirror
from cache_manager.servicer import SERVICE_NAME, CacheManagerServicer
from deploy.process import Process, log_event
from octavo.ids import Epoch, Incarnation, SequenceId, WorkerId
from octavo.index_schema import index_key
from octavo.records.attend import Exchange, Grant, Inventory, Registered, Registration
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerLoad
from octavo.records.insight import PoolAudit
from octavo.redis_client import open_client
from octavo.service import Service, open_channel
from octavo.status import translated
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from octavo.wire.attend import (
    exchange_to_wire,
    grant_from_wire,
    inventory_to_wire,
    registered_from_wire,
    registration_to_wire,
)
from octavo.wire.fleet import fleet_from_wire
from octavo.wire.insight import audit_from_wire
from tests.support import books
from tests.support.mirror import Mirror

LEASE_SECONDS = 5.0

GRACE_SECONDS = 60
"""Of a manager's process. Longer than any test may take: what ends sooner did not wait for it."""


class Clock:
    """Seconds since 1970, which pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class ManagerService:
    """The service and what stands behind it."""

    def __init__(self, manager: Manager, changes: ChangeQueue, clock: Clock, channel: Any) -> None:
        self.manager = manager
        self.changes = changes
        self.clock = clock
        self.channel = channel
        self.stub = v1_grpc.CacheManagerStub(channel)

    async def audit(self, worker: str) -> PoolAudit:
        with translated():
            return audit_from_wire(await self.stub.Audit(v1.AuditRequest(worker_id=worker), timeout=10))

    @asynccontextmanager
    async def fleet(self) -> AsyncGenerator["FleetWatch"]:
        """A subscriber, past its snapshot."""
        watch = FleetWatch(self.stub.WatchFleet(v1.WatchFleetRequest()))
        await watch.next()
        try:
            yield watch
        finally:
            watch.close()

    @asynccontextmanager
    async def worker(
        self,
        worker_id: str = "w",
        *,
        inventory: Sequence[Inventory] = (),
        last: "WorkerStandIn | None" = None,
        **pool: Any,
    ) -> AsyncGenerator["WorkerStandIn"]:
        """A worker that has registered, for the first time or again; its stream is dropped at the end."""
        worker = WorkerStandIn(self.stub, worker_id)
        epochs = {} if last is None else {"first_epoch": last.epoch, "last_epoch": last.epoch}
        await worker.register(books.pool_spec(**pool), inventory, **epochs)
        try:
            yield worker
        finally:
            worker.drop()


class FleetWatch:
    """The updates of one subscription."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def next(self) -> FleetUpdate:
        with translated():
            return fleet_from_wire(await asyncio.wait_for(self._call.read(), 10))

    def close(self) -> None:
        self._call.cancel()

    async def until(self, wanted: Callable[[FleetUpdate], bool]) -> FleetUpdate:
        """The first update that is as wanted."""
        while True:
            update = await self.next()
            if wanted(update):
                return update


class WorkerStandIn:
    """A worker's side of `Attend`, without a pool."""

    def __init__(self, stub: Any, worker_id: str = "w") -> None:
        self._call = stub.Attend()
        self.worker_id = WorkerId(worker_id)
        self.epoch = Epoch(0)
        self.step = 0
        self.mirror = Mirror(books.pool_spec().block_size)

    @property
    def index(self) -> str:
        """Its key in Redis."""
        return index_key(self.worker_id, self.epoch)

    async def say(self, message: v1.AttendRequest) -> v1.AttendReply:
        """Send anything; raises what the manager raises."""
        with translated():
            await self._call.write(message)
            return await asyncio.wait_for(self._call.read(), 10)

    async def write(self, message: v1.AttendRequest) -> None:
        """Send anything that is not answered."""
        await self._call.write(message)

    async def hear(self) -> v1.AttendReply:
        """Wait for a word of the manager; raises what it raises."""
        with translated():
            return await asyncio.wait_for(self._call.read(), 10)

    def registration(self, pool: PoolSpec, **fields: Any) -> Registration:
        fields = {"incarnation": Incarnation(7), "address": "127.0.0.1:1"} | fields
        return Registration(worker_id=self.worker_id, pool=pool, **fields)

    async def register(self, pool: PoolSpec, inventory: Sequence[Inventory] = (), **fields: Any) -> Registered:
        registration = self.registration(pool, inventory_parts=len(inventory), **fields)
        messages = [
            v1.AttendRequest(register=registration_to_wire(registration)),
            *(v1.AttendRequest(inventory=inventory_to_wire(part)) for part in inventory),
        ]
        with translated():
            for message in messages[:-1]:
                await self._call.write(message)
        registered = registered_from_wire((await self.say(messages[-1])).registered)
        self.epoch, self.step = registered.epoch, 0
        return registered

    async def exchange(self, *, load: WorkerLoad | None = None, draining: bool = False, **parts: Any) -> Grant:
        """The next exchange, from plain numbers as in `books.exchange`."""
        self.step += 1
        exchange = books.exchange(step=self.step, **parts)._replace(load=load or WorkerLoad(), draining=draining)
        self.mirror.does(exchange)
        grant = await self.send(exchange)
        self.mirror.hears(exchange, grant)
        return grant

    async def send(self, exchange: Exchange) -> Grant:
        """An exchange of this worker's epoch with the step that it says."""
        message = exchange_to_wire(exchange._replace(epoch=self.epoch))
        return grant_from_wire((await self.say(v1.AttendRequest(exchange=message))).grant)

    async def compute(self, sequence: int, tokens: list[int]) -> int:
        """Attach a prompt, reserve and commit all of it. Returns the tokens reused."""
        grant = await self.exchange(attaches={sequence: tokens}, reserves=[(sequence, len(tokens))])
        reused = dict(grant.attached)[SequenceId(sequence)]
        await self.exchange(commits={sequence: tokens[reused:]})
        return reused

    async def close(self) -> None:
        """Say that no more will come, and hear the stream's end."""
        await self._call.done_writing()
        assert await asyncio.wait_for(self._call.read(), 10) is grpc.aio.EOF

    def drop(self) -> None:
        """Reset the stream, as a dying process does."""
        self._call.cancel()


@asynccontextmanager
async def manager_service(
    redis_url: str | None = None, *, ttl_seconds: float = 60, max_pending: int = MAX_PENDING
) -> AsyncGenerator[ManagerService]:
    """The service for the time of the context, with a mirror if it is told of a Redis; every exchange is audited."""
    clock, changes = Clock(), ChangeQueue(max_pending)
    manager = Manager(changes, lease_seconds=LEASE_SECONDS, audit_every_exchange=True)
    service = Service("127.0.0.1:0", [SERVICE_NAME])
    v1_grpc.add_CacheManagerServicer_to_server(CacheManagerServicer(manager, clock), service.server)
    mirror = (
        None
        if redis_url is None
        else RedisMirror(open_client(redis_url), changes, ttl_seconds=ttl_seconds, pace_seconds=0)
    )
    following = None if mirror is None else asyncio.create_task(mirror.run())
    port = await service.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield ManagerService(manager, changes, clock, channel)
    finally:
        await service.stop(0)
        if mirror is not None and following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await mirror.close()


def manager_process(**settings: object) -> Process:
    """`python -m cache_manager`, not started; its Redis is away unless the settings say where it is."""
    env = {"OCTAVO_REDIS_URL": "redis://127.0.0.1:1/0", "OCTAVO_GRACE_SECONDS": str(GRACE_SECONDS)}
    env |= {f"OCTAVO_{name.upper()}": str(value) for name, value in settings.items()}
    return Process("manager", lambda _: [sys.executable, "-m", "cache_manager"], env=env, served_port=announced_port)


def announced_port(line: str) -> int | None:
    """The port that a line of a service's log says it serves on."""
    event = log_event(line)
    return event["port"] if event is not None and event.get("event") == "serving" else None


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    """Return when the condition (a coroutine function) holds; fails after a minute."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110  # Redis tells nobody that a key has changed
            await asyncio.sleep(0.005)
