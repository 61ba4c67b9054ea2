"""The cache manager on the wire: translate, call the manager, translate back. Protobuf ends here."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc

from cache_manager.core.restoration import Restoration
from cache_manager.manager import Manager
from octavo.collector import collector_at_rest
from octavo.errors import InvalidRequest, OctavoError, StaleEpoch
from octavo.ids import SequenceId, WorkerId
from octavo.records.attend import Registration
from octavo.status import Context
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from octavo.wire.attend import (
    exchange_from_wire,
    grant_to_wire,
    inventory_from_wire,
    registered_to_wire,
    registration_from_wire,
)
from octavo.wire.fleet import fleet_to_wire
from octavo.wire.insight import (
    audit_to_wire,
    description_to_wire,
    explanation_to_wire,
    prompt_to_explain_from_wire,
    reset_to_wire,
)

SERVICE_NAME = v1.DESCRIPTOR.services_by_name["CacheManager"].full_name

Now = Callable[[], float]
"""Seconds since 1970; never goes back."""


class CacheManagerServicer(v1_grpc.CacheManagerServicer):
    """octavo.v1.CacheManager."""

    def __init__(self, manager: Manager, now: Now) -> None:
        self._manager = manager
        self._now = now
        self._restoring = asyncio.Semaphore(1)

    async def Attend(  # pyright: ignore[reportIncompatibleMethodOverride]  # it reads and writes by itself: half the cost
        self, request_iterator: AsyncIterator[v1.AttendRequest], context: Context
    ) -> None:
        """One worker's stream. Dropped by the worker, it takes the books along; ended by an error, it leaves them."""
        stream = _Stream(context)
        registration = registration_from_wire(await _register_message(stream))
        restoration = await self._restore(registration, stream)
        registered = self._manager.register(registration, self._now(), stream.end, restoration)
        refused = False
        try:
            await context.write(v1.AttendReply(registered=registered_to_wire(registered)))
            async for request in stream:
                reply = self._answer(registration.worker_id, request)
                del request  # now it is still in the core's cache; when the next one comes it is not
                await context.write(reply)
                del reply
        except Exception:
            refused = True
            raise
        finally:
            if not refused:
                self._manager.stream_lost(registration.worker_id, registered.epoch)

    def _answer(self, worker: WorkerId, request: v1.AttendRequest) -> v1.AttendReply:
        """One exchange."""
        exchange = exchange_from_wire(_exchange_message(request))
        return grant_to_wire(self._manager.exchange(worker, exchange, self._now()))

    async def _restore(
        self, registration: Registration, requests: AsyncIterator[v1.AttendRequest]
    ) -> Restoration | None:
        """Read the inventory that was announced, and make books of it in steps, between which others are answered.

        One after the other where many come at once: those that attend wait for one step, not for one of each.
        """
        if not registration.inventory_parts:
            return None
        patience = self._manager.lease_seconds
        parts = _inventory(requests, registration, patience)
        try:
            restoration = self._manager.restoration(registration, self._now())
            async for part in parts:
                restoration.add(inventory_from_wire(part))
        except OctavoError:
            # Who is still sending may see its stream break before it sees why: gRPC reports whatever comes first.
            with contextlib.suppress(OctavoError, TimeoutError):
                async with asyncio.timeout(patience):
                    async for _ in parts:
                        pass
            raise
        async with self._restoring:
            with collector_at_rest():
                for _ in restoration.steps():
                    await asyncio.sleep(0)
        return restoration

    async def WatchFleet(self, request: v1.WatchFleetRequest, context: Context) -> AsyncGenerator[v1.FleetUpdate]:
        """The fleet, then its changes, until the caller goes."""
        with self._manager.subscribe() as subscription:
            async with contextlib.aclosing(subscription.updates()) as updates:
                async for update in updates:
                    yield fleet_to_wire(update)

    async def Audit(self, request: v1.AuditRequest, context: Context) -> v1.AuditReply:
        """One worker's books, recomputed: 4 s for a million blocks, which may not cost the others their leases."""
        began = self._now()
        audit = self._manager.audit(WorkerId(request.worker_id))
        self._manager.was_busy(began, self._now())
        return audit_to_wire(audit)

    async def DescribeSequence(self, request: v1.DescribeSequenceRequest, context: Context) -> v1.DescribeSequenceReply:
        """One sequence's table."""
        worker, sequence = WorkerId(request.worker_id), SequenceId(request.sequence)
        return description_to_wire(self._manager.describe(worker, sequence))

    async def ExplainPrompt(self, request: v1.ExplainPromptRequest, context: Context) -> v1.PromptExplanation:
        """What one worker has of a prompt."""
        return explanation_to_wire(self._manager.explain(*prompt_to_explain_from_wire(request)))

    async def ResetPrefixCache(self, request: v1.ResetPrefixCacheRequest, context: Context) -> v1.ResetPrefixCacheReply:
        """One worker's published blocks forgotten, or everybody's."""
        worker = WorkerId(request.worker_id) if request.worker_id else None
        return reset_to_wire(self._manager.reset(worker, self._now()))


async def _register_message(requests: AsyncIterator[v1.AttendRequest]) -> v1.Register:
    """The first message of a stream."""
    async for request in requests:
        match request.WhichOneof("kind"):
            case "register":
                return request.register
            case "exchange":
                raise StaleEpoch(f"exchange.epoch: {request.exchange.epoch}, nobody has registered on this stream")
            case _:
                break
    raise InvalidRequest("attend: nothing to act on, wanted a registration first")


async def _inventory(
    requests: AsyncIterator[v1.AttendRequest], registration: Registration, patience_seconds: float
) -> AsyncGenerator[v1.Inventory]:
    """All messages that the registration announced; ends with the first that is not one of them."""
    for part in range(1, registration.inventory_parts + 1):
        yield await _inventory_message(requests, part, registration, patience_seconds)


async def _inventory_message(
    requests: AsyncIterator[v1.AttendRequest], part: int, registration: Registration, patience_seconds: float
) -> v1.Inventory:
    """A message of those that the registration announced."""
    wanted = f"wanted part {part} of {registration.inventory_parts} of the inventory"
    try:
        async with asyncio.timeout(patience_seconds):
            request = await anext(requests, None)
    except TimeoutError as error:
        raise InvalidRequest(f"attend: nothing within {patience_seconds:g} s, {wanted}") from error
    if request is None:
        raise InvalidRequest(f"attend: the end of the stream, {wanted}")
    kind = request.WhichOneof("kind")
    if kind != "inventory":
        raise InvalidRequest(f"attend: {kind or 'an empty message'}, {wanted}")
    return request.inventory


def _exchange_message(request: v1.AttendRequest) -> v1.Exchange:
    """A message after the first."""
    kind = request.WhichOneof("kind")
    if kind != "exchange":
        raise InvalidRequest(f"attend: {kind or 'an empty message'} after the registration, wanted an exchange")
    return request.exchange


class _Stream:
    """A worker's messages, until the worker or the manager ends them. Belongs to the task that it is made in."""

    def __init__(self, context: Context) -> None:
        self._read = context.read
        self._task = asyncio.current_task()
        self._waits = False
        self._why: OctavoError | None = None

    def end(self, why: OctavoError) -> None:
        """Let the reader raise `why`, at once if it waits."""
        self._why = why
        if self._waits and self._task is not None:
            self._task.cancel()

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> v1.AttendRequest:
        """The next message. Raises what `end` was given."""
        if self._why is not None:
            raise self._why
        self._waits = True
        try:
            request = await self._read()
        except asyncio.CancelledError:
            # As asyncio.timeout does it, which for each message costs as much as reading it.
            if self._why is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._why from None
        finally:
            self._waits = False
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return request
