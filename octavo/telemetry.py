"""Structured logs: one JSON object a line on standard output, with a fixed event name and fields.

    log = logging.getLogger("octavo.worker")
    log.info("sequence_preempted", extra={"sequence": 7, "blocks": 12})

Shells log; the core never does. Prompts and tokens are never logged.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

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
