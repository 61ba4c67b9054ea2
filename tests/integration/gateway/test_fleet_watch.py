"""How a gateway watches a cache manager that is not there."""

import asyncio
import logging
from contextlib import aclosing

import pytest

from gateway.fleet_watch import watch
from octavo.settings import split_address
from tests.support.fake_fleet import PATIENCE_SECONDS, fake_fleet
from tests.support.tcp_proxy import tcp_proxy

NOBODY = 1
TRIES = 10


async def test_a_manager_that_is_away_is_said_once_a_reason_and_again_when_it_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "octavo.gateway")
    tries, enough = 0, asyncio.Event()

    def draw() -> float:
        nonlocal tries
        tries += 1
        if tries == TRIES:
            enough.set()
        return 0.0

    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        fake_fleet() as fleet,
        tcp_proxy(NOBODY) as proxy,
        aclosing(watch(f"127.0.0.1:{proxy.port}", draw)) as updates,
    ):
        first = asyncio.ensure_future(anext(updates))
        await enough.wait()
        _, proxy.target = split_address(fleet.manager.address)
        update = await first

    assert update is not None
    assert update.snapshot
    said = [record for record in caplog.records if record.name == "octavo.gateway"]
    assert [record.message for record in said][-1:] == ["fleet_watch_found"]
    reasons = [vars(record)["reason"] for record in said[:-1]]
    assert 1 <= len(reasons) == len(set(reasons)) < TRIES
