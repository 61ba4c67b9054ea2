"""`octavo stats` where it asks the wrong door."""

import asyncio
from pathlib import Path

import pytest

from octavo.commands.console import CommandFailed
from octavo.commands.stats import stats
from tests.support.fake_fleet import fake_fleet
from tests.support.gateway_service import gateway


async def test_the_port_of_the_http_api_is_told_from_a_gateway_that_is_away(tmp_path: Path) -> None:
    async with fake_fleet() as fleet, gateway(fleet, tmp_path) as front:
        address = front.http.removeprefix("http://")
        with pytest.raises(CommandFailed, match=f"answers at {address} speaks HTTP; .*port for gRPC: 8500 where"):
            await asyncio.to_thread(stats, address, as_json=False)


async def test_who_listens_and_is_no_gateway_is_told_as_what_the_call_says_of_it() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CommandFailed, match=f"^gateway {address}: .*"):
            await asyncio.to_thread(stats, address, as_json=False)
