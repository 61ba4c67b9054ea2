"""Why a call went unanswered: what listens there instead, and which variable would change that."""

import ssl
from enum import Enum, auto
from http.client import HTTPConnection, HTTPException
from socket import create_connection

import grpc

from octavo.commands import defaults
from octavo.settings import PREFIX, split_address
from octavo.transport import Transport

_LOOK_SECONDS = 1.0
"""For whoever listens there."""

_BELIEVED = f"{PREFIX}TLS_CA names the PEM file of the authorities to believe"
_SHOWN = f"{PREFIX}TLS_CERT and {PREFIX}TLS_KEY those of a certificate to show, which cache managers ask for"


class _Heard(Enum):
    """What listens at an address."""

    NOBODY = auto()
    TLS = auto()
    HTTP = auto()
    """In clear, and not gRPC's."""
    OTHER = auto()


def why_no_gateway(address: str, own: Transport, error: Exception) -> str:
    """Why no gateway answered at host:port, in one line, where a call failed with `error`."""
    match heard := _heard_at(address):
        case _Heard.NOBODY:
            return f"nothing answers at {address}; `octavo up` starts it"
        case _Heard.HTTP:
            elsewhere = f"{defaults.PORT} where OpenAI's API is at {defaults.PORT + 1}"
            return f"what answers at {address} speaks HTTP; wanted the gateway's port for gRPC: {elsewhere}"
        case _Heard.TLS if not own.authorities:
            return f"what answers at {address} speaks TLS; {_BELIEVED}"
        case _:
            return _in_clear(address, heard, own) or str(error)


def why_no_manager(address: str, own: Transport, error: grpc.RpcError) -> str:
    """Why no cache manager answered at host:port, in one line, where a call failed with `error`."""
    match heard := _heard_at(address):
        case _Heard.NOBODY:
            return (
                f"no cache manager answers at {address}; `octavo up` says where its own is, --cache-manager or "
                f"{PREFIX}CACHE_MANAGER names it"
            )
        case _Heard.TLS if not own.authorities:
            return f"what answers at {address} speaks TLS; {_BELIEVED}, {_SHOWN}"
        case _Heard.TLS if not own.certificate:
            return f"what answers at {address} speaks TLS, and wants to know its callers; {_SHOWN}"
        case _:
            return _in_clear(address, heard, own) or _failed(address, error)


def _in_clear(address: str, heard: _Heard, own: Transport) -> str | None:
    """For those who ask for TLS of somebody who does not speak it."""
    if heard is _Heard.TLS or not own.authorities:
        return None
    return f"what answers at {address} speaks no TLS, which {PREFIX}TLS_CA asks for"


def _failed(address: str, error: grpc.RpcError) -> str:
    if not isinstance(error, grpc.Call):
        return f"cache manager {address}: {error}"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} is no cache manager; {PREFIX}CACHE_MANAGER or --cache-manager names one"
    return f"cache manager {address}: {error.details() or error.code().name}"


def _heard_at(address: str) -> _Heard:
    host, port = split_address(address)
    try:
        if _speaks_tls(host, port):
            return _Heard.TLS
    except OSError:
        return _Heard.NOBODY
    return _Heard.HTTP if _speaks_http(host, port) else _Heard.OTHER


def _speaks_http(host: str, port: int) -> bool:
    connection = HTTPConnection(host, port, timeout=_LOOK_SECONDS)
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def _speaks_tls(host: str, port: int) -> bool:
    """Whether who listens there answers as TLS begins; who it is matters not. Raises OSError where nobody listens."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with create_connection((host, port), timeout=_LOOK_SECONDS) as connection:
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except OSError:
            return False
    return True
