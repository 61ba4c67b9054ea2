"""`octavo model fetch`: a model into the models folder. `up` and `demo` do it first, so that they work at once."""

from pathlib import Path

from octavo.commands.console import CommandFailed
from octavo.commands.environment import settings
from octavo.settings import ModelsSettings


def fetch_model(model: str) -> Path:
    """The folder of the model, fetched first where it is not there yet.

    Raises:
        CommandFailed: it cannot be had, or this installation has no worker that could convert it.
    """
    try:
        from worker.model.fetch import fetch
    except ModuleNotFoundError as missing:
        raise CommandFailed(f"models need the extra `worker`, pip install 'octavo[worker]' ({missing})") from missing
    try:
        return fetch(model, models_dir())
    except (ValueError, OSError) as error:
        raise CommandFailed(f"model {model}: {error}") from error


def models_dir() -> Path:
    """Where models lie: OCTAVO_MODELS_DIR, or a folder of the user's cache.

    Raises:
        CommandFailed: it is unset, and the user has no home.
    """
    return settings(ModelsSettings).models_dir
