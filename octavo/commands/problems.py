"""Errors in one line for the person at the keyboard; what is not listed here is a bug and keeps its traceback."""

from collections.abc import Generator
from contextlib import contextmanager

from deploy.process import StartFailed
from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed, readable
from octavo.commands.key import VARIABLE
from octavo.commands.unanswered import why_no_gateway
from octavo.errors import OctavoError, Unauthenticated, UnknownModel
from octavo.settings import split_address
from octavo.transport import FLEET_KEY

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
        split_address(address)
    except ValueError as error:
        raise CommandFailed(f"--address: {error}") from error
    try:
        yield
    except BrokenPipeError:  # the reader of our output has left, and no gateway
        raise
    except ConnectionError as error:
        raise CommandFailed(why_no_gateway(address, transport(), error)) from error
