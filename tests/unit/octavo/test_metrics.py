"""The endpoint that Prometheus asks, over real sockets."""

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.durations import Durations
from octavo.metrics import histogram, metrics_endpoint
from octavo.service import CannotListen
from tests.support.scrape import ask, scrape

ANYWHERE = "127.0.0.1:0"
HEALTHY = Path(__file__).parents[3] / "deploy/healthy.sh"


def always() -> bool:
    return True


class Own(Collector):
    """A service's metrics, counted as they are collected."""

    def __init__(self) -> None:
        self.durations = Durations((0.1, 1.0))
        self.scrapes = 0

    def collect(self) -> Iterable[Metric]:
        self.scrapes += 1
        yield CounterMetricFamily("octavo_scrapes", "So far.", self.scrapes)
        yield histogram("octavo_waits_seconds", "How long.", self.durations)


async def test_a_scrape_is_what_the_owner_says_at_that_moment() -> None:
    own = Own()
    async with metrics_endpoint(ANYWHERE, own, always) as port:
        assert (await scrape(port))["octavo_scrapes_total",] == 1
        for seconds in (0.05, 0.1, 0.5, 7.0):
            own.durations.add(seconds)
        samples = await scrape(port)

    assert samples["octavo_scrapes_total",] == own.scrapes == 2
    buckets = {bound: samples["octavo_waits_seconds_bucket", bound] for bound in ("0.1", "1.0", "+Inf")}
    assert buckets == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert (samples["octavo_waits_seconds_count",], samples["octavo_waits_seconds_sum",]) == (4, pytest.approx(7.65))
    assert samples["process_resident_memory_bytes",] > 0


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /metrics?name=x HTTP/1.1", "HTTP/1.1 200 OK"),
        ("HEAD /metrics HTTP/1.1", "HTTP/1.1 200 OK"),
        ("POST /metrics HTTP/1.1", "HTTP/1.1 405 Method Not Allowed"),
        ("GET / HTTP/1.1", "HTTP/1.1 404 Not Found"),
        ("nonsense", "HTTP/1.1 404 Not Found"),
    ],
)
async def test_what_is_asked_otherwise_is_answered_by_http(request_line: str, status: str) -> None:
    async with metrics_endpoint(ANYWHERE, Own(), always) as port:
        said, headers, body = await ask(port, request_line)
    assert said == status
    assert bool(body) == (not request_line.startswith("HEAD"))
    assert "Content-Length: " in headers


@pytest.mark.parametrize(
    ("ready", "status", "said"),
    [(True, "HTTP/1.1 200 OK", "ready\n"), (False, "HTTP/1.1 503 Service Unavailable", "not ready\n")],
)
async def test_readiness_is_told_without_a_scrape(ready: bool, status: str, said: str) -> None:
    own = Own()
    async with metrics_endpoint(ANYWHERE, own, lambda: ready) as port:
        answered, _, body = await ask(port, "GET /health HTTP/1.1")
    assert (answered, body, own.scrapes) == (status, said, 0)


# ---- the check of a container ----------------------------------------------------------------------------------


async def healthy(address: str) -> bool:
    """What deploy/healthy.sh exits with."""
    check = await asyncio.create_subprocess_exec("bash", HEALTHY, address, stderr=asyncio.subprocess.DEVNULL)
    return await check.wait() == 0


async def test_a_container_is_healthy_while_its_service_is_ready() -> None:
    """S57: and it is not from the moment at which readiness falls."""
    ready = True
    async with metrics_endpoint(ANYWHERE, Own(), lambda: ready) as port:
        address = f"127.0.0.1:{port}"
        assert await healthy(address)
        ready = False
        assert not await healthy(address)
    assert not await healthy(address), "nobody listens"


async def test_a_container_whose_service_hangs_up_is_not_healthy() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        assert not await healthy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


# ---- who asks badly --------------------------------------------------------------------------------------------


async def test_who_says_nothing_or_too_much_keeps_nobody_from_an_answer() -> None:
    async with metrics_endpoint(ANYWHERE, Own(), always) as port:
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        reader, endless = await asyncio.open_connection("127.0.0.1", port)
        endless.write(bytes(1 << 16))
        assert await reader.read() == b"", "it is hung up on"
        assert await scrape(port)
        for writer in (silent, endless):
            writer.close()


async def test_without_an_address_nothing_listens() -> None:
    async with metrics_endpoint(None, Own(), always) as port:
        assert port == 0


async def test_an_address_of_ipv6_is_one_as_any_other() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with metrics_endpoint("[::1]:0", Own(), always) as port:
        reader, writer = await asyncio.open_connection("::1", port)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_address_that_is_taken_is_told() -> None:
    async with metrics_endpoint(ANYWHERE, Own(), always) as port:
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            async with metrics_endpoint(f"127.0.0.1:{port}", Own(), always):
                pass
