"""Errors in one line for the person at the keyboard; what is not listed here is a bug and keeps its traceback."""

from collections.abc import Generator
from contextlib import contextmanager

from deploy.process import StartFailed
from octavo.commands.console import CommandFailed, readable
from octavo.commands.key import VARIABLE
from octavo.errors import OctavoError, Unauthenticated
from octavo.transport import FLEET_KEY

_EXPECTED = (CommandFailed, OctavoError, OSError)


def explained(error: Exception) -> str | None:
    """What to tell the user; None for an error that nobody expected."""
    if isinstance(error, StartFailed):
        return "\n    ".join([error.what, *(readable(line).plain for line in error.last_lines)])
    if isinstance(error, Unauthenticated) and FLEET_KEY not in str(error):
        return f"{error}; a key is taken from {VARIABLE}"
    return str(error) if isinstance(error, _EXPECTED) else None


@contextmanager
def speaking_to(address: str) -> Generator[None]:
    """Say where nothing answered and what would change that, instead of what a socket thought of it."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has left, and no gateway
        raise
    except ConnectionError as error:
        raise CommandFailed(f"nothing answers at {address}; `octavo up` starts it") from error
