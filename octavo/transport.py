"""How the processes of a fleet know one another: TLS on every hop, and the fleet's own key.

- **TLS.** With a certificate and its key a process is served over TLS. With authorities it calls others over TLS and
  believes those alone whom these vouch for; and an internal service then lets nobody call it who shows no certificate
  of theirs (mTLS). All files are PEM, and are read once, at the start: a rolling restart changes them.
- **The fleet's key.** A long random string that all processes of a fleet are told. Cache managers and workers answer
  nobody who does not show it, but for health checks, which tell nothing else. It is shown over TLS or inside a network
  that nobody else listens to.

Neither is asked for where it is not set, as on one's own machine.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Any

import grpc

from octavo.errors import Unauthenticated

FLEET_KEY = "octavo-fleet-key"
"""The metadata of a call within the fleet that holds the key."""

_CERTIFICATE, _KEY, _AUTHORITIES = "OCTAVO_TLS_CERT", "OCTAVO_TLS_KEY", "OCTAVO_TLS_CA"
"""Where a process is told of its files (octavo.settings)."""

OPEN_METHODS = ("/grpc.health.v1.Health/",)
"""What anybody may ask an internal service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What one process shows of itself, and whom it believes."""

    certificate: bytes = b""
    """PEM: its own, and those between it and an authority."""
    private_key: bytes = field(default=b"", repr=False)
    """PEM."""
    authorities: bytes = b""
    """PEM: whoever these vouch for is believed."""
    peer_name: str = ""
    """Who stands in the certificates of all peers, in place of the host that is called; empty: that host."""
    fleet_key: str = field(default="", repr=False)
    """Empty: nobody is asked for one."""

    @property
    def fleet_metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call within the fleet."""
        return ((FLEET_KEY, self.fleet_key),) if self.fleet_key else ()

    def client_options(self) -> list[tuple[str, str]]:
        """Of a channel, for gRPC."""
        return [("grpc.ssl_target_name_override", self.peer_name)] if self.authorities and self.peer_name else []

    def client_credentials(self) -> grpc.ChannelCredentials | None:
        """To call others with; None: in clear."""
        if not self.authorities:
            return None
        return grpc.ssl_channel_credentials(self.authorities, self.private_key or None, self.certificate or None)

    def server_credentials(self, *, ask_callers: bool) -> grpc.ServerCredentials | None:
        """To be called with; None: in clear. `ask_callers`: each must show a certificate of our authorities."""
        if not self.certificate:
            return None
        asks = ask_callers and bool(self.authorities)
        pair = [(self.private_key, self.certificate)]
        return grpc.ssl_server_credentials(pair, self.authorities if asks else None, require_client_auth=asks)


PLAINTEXT = Transport()
"""In clear, and believing everybody."""


def read_transport(
    certificate: Path | None,
    private_key: Path | None,
    authorities: Path | None,
    peer_name: str = "",
    fleet_key: str = "",
) -> Transport:
    """A transport of files.

    Raises:
        ValueError: a file cannot be read, or is there without the one that belongs to it; names its variable.
    """
    if (certificate is None) != (private_key is None):
        missing, there = (_KEY, _CERTIFICATE) if private_key is None else (_CERTIFICATE, _KEY)
        raise ValueError(f"{missing}: unset, {there} wants it beside itself")
    return Transport(
        certificate=_read(_CERTIFICATE, certificate, b"-----BEGIN CERTIFICATE-----"),
        private_key=_read(_KEY, private_key, b"PRIVATE KEY-----"),
        authorities=_read(_AUTHORITIES, authorities, b"-----BEGIN CERTIFICATE-----"),
        peer_name=peer_name,
        fleet_key=fleet_key,
    )


def _read(variable: str, file: Path | None, mark: bytes) -> bytes:
    if file is None:
        return b""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{variable}: {file}: {error.strerror}") from error
    if mark not in content:  # gRPC would only say that nobody can connect
        raise ValueError(f"{variable}: {file} of {len(content)} bytes is no PEM file with {mark.decode()!r} in it")
    return content


class FleetGuard(grpc.aio.ServerInterceptor):
    """Lets only those call an internal service who show the fleet's key."""

    def __init__(self, fleet_key: str) -> None:
        self._fleet_key = fleet_key.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Go on, or answer with `Unauthenticated`, in whichever of the four ways the method has."""
        handler: Any = await continuation(handler_call_details)
        metadata: Iterable[tuple[str, str | bytes]] = handler_call_details.invocation_metadata or ()
        if handler is None or handler_call_details.method.startswith(OPEN_METHODS) or self._is_shown(metadata):
            return handler
        return same_kind(handler)(_refuse, handler.request_deserializer, handler.response_serializer)

    def _is_shown(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        shown = [value.encode() if isinstance(value, str) else value for key, value in metadata if key == FLEET_KEY]
        return any(compare_digest(value, self._fleet_key) for value in shown)


async def _refuse(_: object, __: object) -> None:
    raise Unauthenticated(f"{FLEET_KEY}: the call shows no key of this fleet (OCTAVO_FLEET_KEY)")


def same_kind(handler: Any) -> Callable[..., Any]:
    """What makes a handler that takes one message or a stream of them, and gives one or a stream, as this one does."""
    return _MAKERS[handler.request_streaming, handler.response_streaming]


_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
