"""What the user's own environment says of how to call a fleet: OCTAVO_TLS_CA and its like (octavo.transport)."""

from pydantic import ValidationError

from octavo.commands.console import CommandFailed
from octavo.settings import PREFIX, TransportSettings
from octavo.transport import Transport


def transport() -> Transport:
    """Raises CommandFailed, which names the variable, where the environment is wrong."""
    try:
        return TransportSettings().transport()
    except ValidationError as error:
        problem = error.errors()[0]
        raise CommandFailed(
            f"{PREFIX}{str(problem['loc'][0]).upper()}: {problem['msg'].removeprefix('Value error, ')}"
        ) from error
    except ValueError as error:
        raise CommandFailed(str(error)) from error
