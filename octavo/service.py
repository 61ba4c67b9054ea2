"""Run one gRPC service: port, health, reflection, SIGTERM -> not ready -> drain -> stop. And open channels.

The channel and server settings are the ones that were seen to work: a frozen peer is found by HTTP/2 pings within
two seconds (gRPC's keepalive time-out does nothing in Python), a new connection has as long to come about, and
reconnecting backs off 100 to 200 ms.

    python -m octavo.service probe HOST:PORT      exits 0 when the service there is ready
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

import grpc
import grpc_health.v1.health
import grpc_health.v1.health_pb2_grpc
import uvloop
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from octavo.settings import TransportSettings, is_loopback, split_address
from octavo.status import StatusInterceptor
from octavo.transport import PLAINTEXT, FleetGuard, Transport

log = logging.getLogger("octavo.service")

health: Any = grpc_health.v1.health  # its published types leave the asyncio half out
health_pb2_grpc: Any = grpc_health.v1.health_pb2_grpc

MAX_MESSAGE_BYTES = 64 << 20
"""Of one message on any stream, unless a service takes less. Fields have limits of their own, checked where they are
read."""

_LIVENESS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
_SIZES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [*_LIVENESS, *_SIZES, ("grpc.so_reuseport", 0)]
CHANNEL_OPTIONS = [
    *_LIVENESS,
    *_SIZES,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # not a pause: what an attempt, handshakes included, has to succeed in
    ("grpc.max_reconnect_backoff_ms", 200),
]


def open_channel(address: str, transport: Transport = PLAINTEXT, *, proxied: bool = False) -> grpc.aio.Channel:
    """A channel to one of our services; it connects when it is first used.

    Within a fleet it leads there directly, whatever the environment says of HTTP proxies (`http_proxy`). A client's
    channel is `proxied`: it goes by that, but never to its own machine.
    """
    options = _channel_options(address, transport, proxied=proxied)
    credentials = transport.client_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking_channel(address: str, transport: Transport = PLAINTEXT, *, proxied: bool = False) -> grpc.Channel:
    """The same without asyncio."""
    options = _channel_options(address, transport, proxied=proxied)
    credentials = transport.client_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _channel_options(address: str, transport: Transport, *, proxied: bool) -> list[tuple[str, int | str]]:
    host, _, _ = address.rpartition(":")
    through = proxied and not is_loopback(host.strip("[]"))
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(through)), *transport.client_options()]


class CannotListen(OSError):
    """The address is taken, or none of this machine's."""


class Service:
    """One gRPC server of this process.

    Add servicers to `server`, `start()`, then `await until_asked_to_stop()`, finish what is running, `stop()`.
    """

    def __init__(
        self,
        listen: str,
        names: Sequence[str],
        *,
        transport: Transport = PLAINTEXT,
        internal: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Describe the server; `start` serves.

        Args:
            listen: host:port.
            names: the full names of the services, for health and reflection.
            transport: what is shown to callers.
            internal: only the fleet may call: with a certificate and with the fleet's key, where `transport` has them.
            max_message_bytes: of one message that is read.
        """
        self._listen = listen
        self._names = ("", *names)
        self._credentials = transport.server_credentials(ask_callers=internal)
        guards = [FleetGuard(transport.fleet_key)] if internal and transport.fleet_key else []
        options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": max_message_bytes}
        self.server = grpc.aio.server(interceptors=[StatusInterceptor(), *guards], options=[*options.items()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        self._asked_to_stop = asyncio.Event()
        self.port = 0
        self.ready = False
        """Whether new requests are welcome."""

    async def start(self, *, ready: bool = True) -> int:
        """Bind and serve; returns the port. Raises CannotListen when the address is taken or unknown."""
        host, _ = split_address(self._listen)
        try:
            self.port = self._bind(self._listen)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {self._listen}") from error
        await self.server.start()
        await self.set_ready(ready)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop.set)
        log.info("serving", extra={"host": host, "port": self.port})
        return self.port

    def _bind(self, address: str) -> int:
        if self._credentials is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, self._credentials)

    async def set_ready(self, ready: bool) -> None:
        """Tell health checks whether new requests are welcome."""
        self.ready = ready
        state = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, state.SERVING if ready else state.NOT_SERVING)

    async def until_asked_to_stop(self) -> None:
        """Return at the first SIGTERM or SIGINT, when readiness has already fallen."""
        await self._asked_to_stop.wait()
        await self.set_ready(False)
        log.info("stopping")

    async def stop(self, grace_seconds: float) -> None:
        """Take no new call; give the running ones `grace_seconds`, then cancel them."""
        await self.server.stop(grace_seconds)
        log.info("stopped")


def run(main: Coroutine[None, None, None]) -> NoReturn:
    """Run a service's main coroutine to its end, on uvloop, and end the process with it.

    A port that is taken is said in one line, with exit 1. The interpreter's own end is left out: it would take apart
    piece by piece what the service has in memory, for seconds beyond the grace that an operator has given it, and while
    gRPC's threads are still there.
    """
    code = 0
    try:
        uvloop.run(main)
    except* CannotListen as errors:  # in a group of groups, where it was raised among tasks
        for error in _leaves(errors):
            log.error("cannot_serve", extra={"reason": str(error)})
        code = 1
    with suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
    os._exit(code)


def _leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    """The exceptions of a group that are no groups themselves, in order."""
    found: list[Exception] = []
    for error in group.exceptions:
        found += _leaves(cast("ExceptionGroup[Exception]", error)) if isinstance(error, ExceptionGroup) else [error]
    return found


def probe(address: str, timeout_seconds: float = 2.0, transport: Transport = PLAINTEXT) -> bool:
    """Whether the service at `address` says that it is ready."""
    with open_blocking_channel(address, transport) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING


async def is_ready(channel: grpc.aio.Channel, timeout_seconds: float = 2.0) -> bool:
    """Whether the service at the other end of a channel says that it is ready."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # published without types
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "probe":
        sys.exit("usage: python -m octavo.service probe HOST:PORT")
    try:
        own = TransportSettings().transport()
    except ValueError as error:
        sys.exit(str(error))
    sys.exit(0 if probe(sys.argv[2], transport=own) else 1)
