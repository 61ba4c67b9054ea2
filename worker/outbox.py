"""What one gateway is to hear: a bounded line of reports between the engine, which never waits, and its stream.

A gateway reads a report in each turn of its event loop, however many tokens it has yet to tell its clients, so one that
leaves many unread does not run, or cannot be reached. Its stream ends, and with it its requests here; it is told why,
and goes on with them on another stream.
"""

import asyncio
from collections.abc import AsyncGenerator

from octavo.errors import QueueFull
from octavo.records.serve import StepReport
from worker.core.sequence import GatewayKey


class Outbox:
    """The reports for one gateway, in order. The engine puts and never waits."""

    def __init__(self, key: GatewayKey, limit: int) -> None:
        self.key = key
        self._limit = limit
        self._reports: asyncio.Queue[StepReport | None] = asyncio.Queue()
        self._error: Exception | None = None
        self.closed = False

    def put(self, report: StepReport) -> None:
        """Add a report. Closes the outbox when more than `limit` would be unread."""
        if self._reports.qsize() >= self._limit:
            self.close(QueueFull(f"{self._limit} reports are unread, at most {self._limit} may be"))
        if not self.closed:
            self._reports.put_nowait(report)

    def close(self, error: Exception | None = None) -> None:
        """Add nothing more; the reader gets what is there, then `error` or the end."""
        if not self.closed:
            self.closed, self._error = True, error
            self._reports.put_nowait(None)

    async def reports(self) -> AsyncGenerator[StepReport]:
        """Every report as it comes. Raises what `close` was given."""
        while (report := await self._reports.get()) is not None:
            yield report
        if self._error is not None:
            raise self._error
