"""python -m worker: read the environment, load the model and serve until SIGTERM."""

import logging
import sys

from octavo import settings, telemetry
from octavo.errors import OctavoError
from octavo.service import run
from worker.settings import WorkerSettings

log = logging.getLogger("octavo.worker")


def main() -> None:
    """Read the environment and serve."""
    config = settings.read(WorkerSettings, "An Octavo worker.")
    telemetry.configure("worker", config.log_level)
    from worker.composition import serve  # takes seconds, torch and transformers: a bad variable is said before

    try:
        run(serve(config))
    except* (FileNotFoundError, ValueError, OctavoError) as failures:  # said in one line; others are bugs
        for failure in failures.exceptions:
            log.error("cannot_serve", extra={"reason": str(failure)})
        sys.exit(1)


if __name__ == "__main__":
    main()
