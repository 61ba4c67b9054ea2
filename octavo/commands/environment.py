"""The user's own environment: settings as services have them, and one line where a variable is wrong."""

from typing import TypeVar

from pydantic import ValidationError

from octavo.commands.console import CommandFailed
from octavo.settings import PREFIX, Settings

S = TypeVar("S", bound=Settings)


def settings(kind: type[S]) -> S:
    """What the environment says. Raises CommandFailed, which names the variable, where it is wrong."""
    try:
        return kind()
    except ValidationError as error:
        problem = error.errors()[0]
        reason = problem["msg"].removeprefix("Value error, ")
        raise CommandFailed(f"{PREFIX}{str(problem['loc'][0]).upper()}: {reason}") from error
