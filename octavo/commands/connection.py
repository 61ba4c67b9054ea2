"""What the user's own environment says of how to call a fleet: OCTAVO_TLS_CA and its like (octavo.transport)."""

from octavo.commands.console import CommandFailed
from octavo.commands.environment import settings
from octavo.settings import TransportSettings
from octavo.transport import Transport


def transport() -> Transport:
    """Raises CommandFailed, which names the variable, where the environment is wrong."""
    try:
        return settings(TransportSettings).transport()
    except ValueError as error:
        raise CommandFailed(str(error)) from error
