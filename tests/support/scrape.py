"""Prometheus's side of a scrape."""

import asyncio
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[tuple[str, ...], float]
"""(name, label values in the order of their names) -> value."""


async def ask(port: int, request: str) -> tuple[str, str, str]:
    """Status line, headers and body of the answer to a request's first line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{request}\r\nHost: here\r\n\r\n".encode())
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    status, _, headers = head.partition("\r\n")
    return status, headers, body


async def scrape(port: int) -> Samples:
    """Every sample that the endpoint gives."""
    status, _, body = await ask(port, "GET /metrics HTTP/1.1")
    assert status == "HTTP/1.1 200 OK", status
    families = list(text_string_to_metric_families(body))
    assert all(family.name.startswith(("octavo_", "process_")) for family in families)
    assert len({family.name for family in families}) == len(families), "a family came twice"
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
