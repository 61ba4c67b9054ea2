"""`octavo audit` and `octavo reset` where they ask the wrong door, or in the wrong way."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cache_manager.servicer import SERVICE_NAME
from octavo.commands.audit import audit
from octavo.commands.console import CommandFailed
from octavo.commands.reset import reset
from octavo.service import Service
from octavo.transport import PLAINTEXT, Transport, read_transport
from tests.support.certificates import Authority

VARIABLES = ("OCTAVO_TLS_CA", "OCTAVO_TLS_CERT", "OCTAVO_TLS_KEY", "OCTAVO_TLS_PEER_NAME", "OCTAVO_FLEET_KEY")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@asynccontextmanager
async def serving(transport: Transport = PLAINTEXT) -> AsyncGenerator[str]:
    """An internal service at this address, which answers health checks alone."""
    service = Service("127.0.0.1:0", [SERVICE_NAME], transport=transport, internal=True)
    await service.start()
    try:
        yield f"127.0.0.1:{service.port}"
    finally:
        await service.stop(0)


def secured(authority: Authority) -> Transport:
    own = authority.issue("manager")
    return read_transport(own.certificate, own.key, authority.file)


ASKED = pytest.mark.parametrize(
    "ask", [lambda address: audit([address]), lambda address: reset([address], None)], ids=["audit", "reset"]
)
Ask = Callable[[str], None]


@ASKED
async def test_a_cache_manager_that_speaks_tls_is_told_with_the_variables_that_were_forgotten(
    ask: Ask, tmp_path: Path
) -> None:
    async with serving(secured(Authority(tmp_path))) as address:
        why = f"^what answers at {address} speaks TLS; OCTAVO_TLS_CA names .*, OCTAVO_TLS_CERT and OCTAVO_TLS_KEY "
        with pytest.raises(CommandFailed, match=why):
            await asyncio.to_thread(ask, address)


@ASKED
async def test_who_shows_a_cache_manager_no_certificate_is_told_where_one_is_taken_from(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("OCTAVO_TLS_CA", str(authority.file))
    async with serving(secured(authority)) as address:
        why = (
            f"^what answers at {address} speaks TLS, and wants to know its callers; OCTAVO_TLS_CERT and .*KEY name the "
        )
        with pytest.raises(CommandFailed, match=why):
            await asyncio.to_thread(ask, address)


@pytest.mark.parametrize(
    ("identity", "authority", "why"),
    [
        ("manager.internal", "own", ".*mismatch.*; OCTAVO_TLS_PEER_NAME says which name"),
        ("127.0.0.1", "another", ".*; OCTAVO_TLS_CA names the PEM file"),
    ],
)
async def test_a_certificate_that_is_not_believed_is_told_with_the_variable_that_helps(
    identity: str, authority: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorities = {name: Authority(tmp_path / name) for name in ("own", "another") if (tmp_path / name).mkdir() is None}
    serves = authorities["own"].issue("manager", identity)
    for variable, value in authorities[authority].variables("caller").items():
        monkeypatch.setenv(variable, value)
    async with serving(read_transport(serves.certificate, serves.key, authorities["own"].file)) as address:
        with pytest.raises(
            CommandFailed, match=f"^the certificate of what answers at {address} is not believed: {why}"
        ):
            await asyncio.to_thread(audit, [address])


async def test_what_went_wrong_is_one_line_and_nothing_else(tmp_path: Path) -> None:
    """gRPC has lines of its own for handshakes."""
    for name in ("own", "another"):
        (tmp_path / name).mkdir()
    caller = os.environ | Authority(tmp_path / "another").variables("caller")
    async with serving(secured(Authority(tmp_path / "own"))) as address:
        command = [sys.executable, "-m", "octavo", "audit", "--cache-manager", address]
        ended = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env=caller, check=False
        )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"octavo: the certificate of what answers at {address} is not believed: ")


async def test_a_cache_manager_in_clear_is_told_to_who_asks_for_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_TLS_CA", str(Authority(tmp_path).file))
    async with serving() as address:
        with pytest.raises(CommandFailed, match=f"^what answers at {address} speaks no TLS, which OCTAVO_TLS_CA asks"):
            await asyncio.to_thread(audit, [address])


async def test_another_service_and_nobody_are_both_named_after_all_were_asked() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        nobody = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with serving() as address:
        why = f"^what answers at {address} is no cache manager; .*; no cache manager answers at {nobody};"
        with pytest.raises(CommandFailed, match=why):
            await asyncio.to_thread(audit, [address, nobody])


async def test_one_that_listens_and_says_nothing_is_told_as_what_the_call_says_of_it() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CommandFailed, match=f"^cache manager {address}: "):
            await asyncio.to_thread(reset, [address], None)


def test_an_address_that_is_none_is_shown_before_anybody_is_called() -> None:
    with pytest.raises(CommandFailed, match=r"--cache-manager: wanted host:port .* got 'manager'"):
        audit(["127.0.0.1:1", "manager"])
