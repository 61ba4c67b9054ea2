"""Why a call went unanswered: what listens there instead, and which variable would change that."""

import ssl
from enum import Enum, auto
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import create_connection

import grpc

from octavo.commands import defaults
from octavo.settings import PREFIX, split_address
from octavo.transport import Transport

_LOOK_SECONDS = 1.0
"""For whoever listens there."""

_BELIEVED = f"{PREFIX}TLS_CA names the PEM file of the authorities to believe"
_SHOWN = f"{PREFIX}TLS_CERT and {PREFIX}TLS_KEY name the files of a certificate to show, which cache managers ask for"
_NAMED = f"{PREFIX}TLS_PEER_NAME says which name the certificates of all services bear"

_WRONG_NAME_CODES = (62, 64)
"""OpenSSL's, for a certificate of another host or address (X509_V_ERR_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH)."""


class _Heard(Enum):
    """What listens at an address."""

    NOBODY = auto()
    TLS = auto()
    HTTP = auto()
    """In clear or over TLS, and not gRPC's."""
    OTHER = auto()
    """In clear."""


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
            return _about_tls(address, heard, own) or str(error)


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
            return _about_tls(address, heard, own) or _failed(address, error)


def _about_tls(address: str, heard: _Heard, own: Transport) -> str | None:
    """For those who have authorities to believe: why these are of no use there; None if they are, or there are none."""
    if not own.authorities:
        return None
    if heard is not _Heard.TLS:
        return f"what answers at {address} speaks no TLS, which {PREFIX}TLS_CA asks for"
    host, port = split_address(address)
    context = ssl.create_default_context(cadata=own.authorities.decode())
    try:
        with create_connection((host, port), timeout=_LOOK_SECONDS) as connection:
            context.wrap_socket(connection, server_hostname=own.peer_name or host).close()
    except ssl.SSLCertVerificationError as error:
        what_helps = _NAMED if error.verify_code in _WRONG_NAME_CODES else _BELIEVED
        why = error.verify_message.rstrip(".")
        return f"the certificate of what answers at {address} is not believed: {why}; {what_helps}"
    except OSError:
        pass  # the call has found out more
    return None


def _failed(address: str, error: grpc.RpcError) -> str:
    if not isinstance(error, grpc.Call):
        return f"cache manager {address}: {error}"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} is no cache manager; {PREFIX}CACHE_MANAGER or --cache-manager names one"
    return f"cache manager {address}: {error.details() or error.code().name}"


def _heard_at(address: str) -> _Heard:
    host, port = split_address(address)
    try:
        in_tls = _spoken_in_tls(host, port)
    except OSError:
        return _Heard.NOBODY
    if in_tls is None:
        return _Heard.HTTP if _speaks_http(HTTPConnection(host, port, timeout=_LOOK_SECONDS)) else _Heard.OTHER
    if in_tls == "h2":
        return _Heard.TLS
    encrypted = HTTPSConnection(host, port, timeout=_LOOK_SECONDS, context=_whoever())
    return _Heard.HTTP if _speaks_http(encrypted) else _Heard.TLS


def _speaks_http(connection: HTTPConnection) -> bool:
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def _spoken_in_tls(host: str, port: int) -> str | None:
    """What who listens there speaks in TLS: "h2", "http/1.1", or "" where it does not say; None: it speaks no TLS.

    Raises OSError where nobody listens.
    """
    context = _whoever()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with create_connection((host, port), timeout=_LOOK_SECONDS) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=host) as encrypted:
                return encrypted.selected_alpn_protocol() or ""
        except OSError:
            return None


def _whoever() -> ssl.SSLContext:
    """For looking: who it is matters not."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
