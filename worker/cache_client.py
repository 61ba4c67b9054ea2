"""Adapter: the cache manager as seen by one worker. One Attend stream, on which one question is open at a time.

A stream that cannot be used any more, for whatever reason, is a ConnectionError; what the manager refuses is the very
error that it raised. After either, only `register` helps: it opens a new stream.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc

from octavo.errors import OctavoError
from octavo.records.attend import Exchange, Grant, Inventory, Registered, Registration
from octavo.service import is_ready, open_channel
from octavo.status import translated
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from octavo.wire.attend import (
    exchange_to_wire,
    grant_from_wire,
    inventory_to_wire,
    registered_from_wire,
    registration_to_wire,
)


class CacheClient(Protocol):
    """A cache manager, near or far."""

    async def register(self, registration: Registration, inventory: Sequence[Inventory] = ()) -> Registered:
        """Join, or join anew: the pool then holds what the inventory says, which is nothing if it has no parts.

        Raises:
            ConnectionError: the manager is not there.
            OctavoError: it refuses the worker, or the inventory.
        """
        ...

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the stream of the last registration has ended: the next exchange will say why."""
        ...

    async def exchange(self, exchange: Exchange) -> Grant:
        """Tell and ask.

        Raises:
            ConnectionError: the manager, or the stream to it, is gone; whether it heard is not known.
            StaleEpoch: the registration is over.
            OctavoError: it refuses the exchange, and nothing of it has happened.
        """
        ...

    async def is_there(self) -> bool:
        """Whether the manager answers and takes workers. Asks beside whatever else is asked."""
        ...

    def leave(self) -> None:
        """End the stream, if there is one: the manager frees all that this worker held."""
        ...

    async def close(self) -> None:
        """Leave for good."""
        ...


class AttendClient:
    """A cache manager over gRPC."""

    def __init__(self, address: str, deadline_seconds: float, transport: Transport = PLAINTEXT) -> None:
        """`address` is host:port; a question without an answer for `deadline_seconds` ends the stream."""
        self._channel = open_channel(address, transport)
        self._metadata = transport.fleet_metadata
        self._stub: v1_grpc.CacheManagerAsyncStub = v1_grpc.CacheManagerStub(self._channel)
        self._deadline_seconds = deadline_seconds
        self._call: Any = None

    async def register(self, registration: Registration, inventory: Sequence[Inventory] = ()) -> Registered:
        """See CacheClient."""
        self.leave()
        self._call = self._stub.Attend(metadata=self._metadata)
        counted = replace(registration, inventory_parts=len(inventory))
        messages = [v1.AttendRequest(register=registration_to_wire(counted))]
        messages += [v1.AttendRequest(inventory=inventory_to_wire(part)) for part in inventory]
        reply = await self._ask(messages, "registered")
        return registered_from_wire(reply.registered)

    def when_ended(self, tell: Callable[[], None]) -> None:
        """See CacheClient."""

        def ended(_: object) -> None:
            tell()

        if self._call is not None:
            self._call.add_done_callback(ended)

    async def exchange(self, exchange: Exchange) -> Grant:
        """See CacheClient."""
        reply = await self._ask([v1.AttendRequest(exchange=exchange_to_wire(exchange))], "grant")
        return grant_from_wire(reply.grant)

    async def is_there(self) -> bool:
        """See CacheClient."""
        return await is_ready(self._channel)

    def leave(self) -> None:
        """See CacheClient."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def close(self) -> None:
        """See CacheClient."""
        self.leave()
        await self._channel.close()

    async def _ask(self, messages: Sequence[v1.AttendRequest], wanted: str) -> v1.AttendReply:
        """Say all messages and hear the one answer, which may take the deadline for each of them."""
        if self._call is None:
            raise ConnectionError("no stream to the cache manager: register first")
        seconds = self._deadline_seconds * len(messages)
        try:
            with translated():
                async with asyncio.timeout(seconds):
                    reply = await self._say_and_hear(messages)
        except OctavoError:
            self.leave()
            raise
        except TimeoutError as error:
            self.leave()
            raise ConnectionError(f"the cache manager did not answer within {seconds:g} s") from error
        except grpc.RpcError as error:
            self.leave()
            raise ConnectionError(f"the cache manager is lost: {_why(error)}") from error
        if reply is None or reply.WhichOneof("kind") != wanted:
            self.leave()
            raise ConnectionError("the cache manager ended the stream")
        return reply

    async def _say_and_hear(self, messages: Sequence[v1.AttendRequest]) -> v1.AttendReply | None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended; reading tells why
            for message in messages:
                await self._call.write(message)
        reply = await self._call.read()
        return reply if isinstance(reply, v1.AttendReply) else None


def _why(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
