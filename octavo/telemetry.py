"""Structured logs: one JSON object a line on standard output, with a fixed event name and fields.

    log = logging.getLogger("octavo.worker")
    log.info("sequence_preempted", extra={"sequence": 7, "blocks": 12})

Shells log; the core never does. Prompts and tokens are never logged.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

SAY_AGAIN_SECONDS = 60.0
"""Of something that stays away."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A log record as one line of JSON: time, level, service, event, then the event's own fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; a value that JSON does not know is written as text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(service: str, level: str = "info") -> None:
    """Send every log record of this process to standard output as JSON lines; libraries speak from warning on."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("octavo").setLevel(level.upper())


class Outage:
    """Says that something is away: each reason once, and again every SAY_AGAIN_SECONDS. It is looked for more often.

    Say `away` at every try that fails, and `back` when one succeeds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is away yet."""
        self._clock = clock
        self._began: float | None = None
        self._next = 0.0
        self._said: set[str] = set()

    def away(
        self, log: logging.Logger, event: str, *, reason: str, level: int = logging.WARNING, **fields: Any
    ) -> None:
        """A try has failed; the event has the reason and the fields, and the seconds since the first that failed."""
        now = self._clock()
        if self._began is None or now >= self._next:
            self._began = now if self._began is None else self._began
            self._next = now + SAY_AGAIN_SECONDS
            self._said.clear()
        if reason not in self._said:
            self._said.add(reason)
            log.log(level, event, extra={**fields, "reason": reason, "seconds": round(now - self._began, 1)})

    def back(self, log: logging.Logger, event: str, **fields: Any) -> None:
        """A try has succeeded; says so where one had failed."""
        if self._began is not None:
            log.info(event, extra={**fields, "seconds": round(self._clock() - self._began, 1)})
        self._began = None
