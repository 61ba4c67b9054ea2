"""`octavo stats` where it asks the wrong door, or in the wrong way."""

import asyncio
import re
import ssl
from pathlib import Path

import pytest

from gateway.servicer import SERVICE_NAME
from octavo.commands.console import CommandFailed
from octavo.commands.stats import stats
from octavo.service import Service
from octavo.transport import read_transport
from tests.support.certificates import Authority
from tests.support.fake_fleet import fake_fleet
from tests.support.gateway_service import gateway, words_pool


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


async def test_a_gateway_that_speaks_tls_is_told_with_the_variable_that_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCTAVO_TLS_CA", raising=False)
    own = Authority(tmp_path).issue("own")
    service = Service("127.0.0.1:0", [SERVICE_NAME], transport=read_transport(own.certificate, own.key, None))
    await service.start()
    try:
        address = f"127.0.0.1:{service.port}"
        with pytest.raises(CommandFailed, match=f"^what answers at {address} speaks TLS; OCTAVO_TLS_CA names "):
            await asyncio.to_thread(stats, address, as_json=False)
    finally:
        await service.stop(0)


async def test_the_port_of_the_http_api_is_told_over_tls_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("OCTAVO_TLS_CA", str(authority.file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue("http").both)

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CommandFailed, match=f"answers at {address} speaks HTTP; .*port for gRPC"):
            await asyncio.to_thread(stats, address, as_json=False)


async def test_a_gateway_in_clear_is_told_to_who_asks_for_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_TLS_CA", str(Authority(tmp_path).file))
    async with fake_fleet() as fleet, gateway(fleet, tmp_path) as front:
        with pytest.raises(CommandFailed, match=f"answers at {front.address} speaks no TLS, which OCTAVO_TLS_CA asks"):
            await asyncio.to_thread(stats, front.address, as_json=False)


async def test_where_there_are_several_models_each_worker_is_shown_with_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fake_fleet() as fleet:
        await fleet.add("a", words_pool())
        async with gateway(fleet, tmp_path) as front:
            await asyncio.to_thread(stats, front.address, as_json=False)
            alone = capsys.readouterr().out
            await fleet.add("b", words_pool(model="other"))
            await front.until_fleet(lambda names: names == ["a", "b"])
            await asyncio.to_thread(stats, front.address, as_json=False)
    table = capsys.readouterr().out

    models = [re.findall(rf"^ ?{worker} +(\S+)", table, re.M) for worker in ("worker", "a", "b")]
    assert models == [["model"], ["words"], ["other"]]
    assert not re.search(r"^ ?worker +model", alone, re.M)
