"""Errors in one line for the person at the keyboard; what is not listed here is a bug and keeps its traceback."""

import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException

from deploy.process import StartFailed
from octavo.commands import defaults
from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed, readable
from octavo.commands.key import VARIABLE
from octavo.errors import OctavoError, Unauthenticated, UnknownModel
from octavo.settings import PREFIX, split_address
from octavo.transport import FLEET_KEY

_LOOK_SECONDS = 1.0
"""For whoever listens where no gateway answers."""

_BELIEVE = f"{PREFIX}TLS_CA names the PEM file of the authorities to believe"

_EXPECTED = (CommandFailed, OctavoError, OSError)


def explained(error: Exception) -> str | None:
    """What to tell the user; None for an error that nobody expected."""
    if isinstance(error, StartFailed):
        return "\n    ".join([error.what, *(readable(line).plain for line in error.last_lines)])
    if isinstance(error, Unauthenticated) and FLEET_KEY not in str(error):
        return f"{error}; a key is taken from {VARIABLE}"
    if isinstance(error, UnknownModel):
        return f"{error}; --model says which"
    return str(error) if isinstance(error, _EXPECTED) else None


@contextmanager
def speaking_to(address: str) -> Generator[None]:
    """Say where nothing answered and what would change that, instead of what a socket thought of it.

    Raises CommandFailed also where `address` is none.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise CommandFailed(f"--address: {error}") from error
    try:
        yield
    except BrokenPipeError:  # the reader of our output has left, and no gateway
        raise
    except ConnectionError as error:
        raise CommandFailed(_why_unanswered(host, port, error)) from error


def _why_unanswered(host: str, port: int, error: ConnectionError) -> str:
    """Nobody is there; or somebody who speaks HTTP, as the gateway's other port does, or whom TLS keeps from us."""
    name, believing = host.strip("[]"), bool(transport().authorities)
    try:
        encrypted = _speaks_tls(name, port)
    except OSError:
        return f"nothing answers at {host}:{port}; `octavo up` starts it"
    if encrypted:
        return str(error) if believing else f"what answers at {host}:{port} speaks TLS; {_BELIEVE}"
    connection = HTTPConnection(name, port, timeout=_LOOK_SECONDS)
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, HTTPException):
        in_clear = f"what answers at {host}:{port} speaks no TLS, which {PREFIX}TLS_CA asks for"
        return in_clear if believing else str(error)
    finally:
        connection.close()
    elsewhere = f"{defaults.PORT} where OpenAI's API is at {defaults.PORT + 1}"
    return f"what answers at {host}:{port} speaks HTTP; wanted the gateway's port for gRPC: {elsewhere}"


def _speaks_tls(host: str, port: int) -> bool:
    """Whether who listens there answers as TLS begins; who it is matters not. Raises OSError where nobody listens."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection((host, port), timeout=_LOOK_SECONDS) as connection:
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except OSError:
            return False
    return True
