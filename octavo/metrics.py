"""What a service can be asked over plain HTTP: its metrics by Prometheus, and by anybody whether it is ready.

    async with metrics_endpoint(config.metrics_listen, GatewayMetrics(dispatcher), lambda: service.ready):
        ...

`GET /metrics` collects at each scrape, and nothing in between; `GET /health` is 200 while the service is ready, else
503: what its gRPC health check says, for a probe that costs no gRPC client.

A service declares its metrics in one file, as a collector that reads them from their owners. Scrapes run on the
service's own event loop, so no owner is read while it changes, and the paths of requests pay nothing.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from math import isinf

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.durations import Durations
from octavo.service import CannotListen
from octavo.settings import split_address

log = logging.getLogger("octavo.metrics")

PATH = "/metrics"
HEALTH_PATH = "/health"
_PATIENCE_SECONDS = 5.0
_MAX_REQUEST_BYTES = 1 << 14


def histogram(name: str, meaning: str, durations: Durations) -> HistogramMetricFamily:
    """Durations as Prometheus has them."""
    family = HistogramMetricFamily(name, meaning)
    buckets = [("+Inf" if isinf(bound) else str(bound), float(count)) for bound, count in durations.cumulative()]
    family.add_metric([], buckets, durations.sum_seconds)
    return family


class Everything(Collector):
    """A service's own metrics, and those of its process (CPU seconds, memory, open files)."""

    def __init__(self, own: Collector) -> None:
        self._own = own
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        """Every family once."""
        yield from self._own.collect()
        yield from self._process.collect()


@contextlib.asynccontextmanager
async def metrics_endpoint(listen: str | None, collector: Collector, ready: Callable[[], bool]) -> AsyncGenerator[int]:
    """Answer on `listen` (host:port) for the time of the context; None: nowhere.

    Gives the port, 0 if there is none. Raises CannotListen when the address is taken or unknown.
    """
    if listen is None:
        yield 0
        return
    everything, answers = Everything(collector), set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.add(task := asyncio.create_task(_answer(reader, writer, everything, ready)))
        task.add_done_callback(answers.discard)

    host, wanted = split_address(listen)
    try:
        server = await asyncio.start_server(connected, host, wanted, limit=_MAX_REQUEST_BYTES)
    except OSError as error:
        raise CannotListen(f"cannot listen on {listen}: {os.strerror(error.errno or 0)}") from error
    port: int = server.sockets[0].getsockname()[1]
    log.info("metrics_served", extra={"host": host, "port": port})
    try:
        yield port
    finally:
        server.close()
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, collector: Collector, ready: Callable[[], bool]
) -> None:
    """One request on one connection; who does not ask in time, or asks too much, is hung up on."""
    with contextlib.suppress(OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, collector, ready))
                await writer.drain()
        finally:
            writer.close()
            await writer.wait_closed()


def _response(head: bytes, collector: Collector, ready: Callable[[], bool]) -> bytes:
    method, _, rest = head.partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0].decode(errors="replace")
    if target not in (PATH, HEALTH_PATH):
        return _reply("404 Not Found", b"metrics are at /metrics, readiness is at /health\n", "text/plain")
    if method not in (b"GET", b"HEAD"):
        return _reply("405 Method Not Allowed", b"this is there to GET\n", "text/plain", "Allow: GET, HEAD\r\n")
    if target == PATH:
        reply = _reply("200 OK", generate_latest(collector), CONTENT_TYPE_LATEST)
    elif ready():
        reply = _reply("200 OK", b"ready\n", "text/plain")
    else:
        reply = _reply("503 Service Unavailable", b"not ready\n", "text/plain")
    return reply if method == b"GET" else reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _reply(status: str, body: bytes, content_type: str, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n".encode() + body
