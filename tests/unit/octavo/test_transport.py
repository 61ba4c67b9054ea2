"""TLS, certificates of callers, and the fleet's key, on one service over real sockets."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.errors import Unauthenticated
from octavo.service import Service, open_channel, probe
from octavo.status import translated
from octavo.transport import FLEET_KEY, PLAINTEXT, Transport, read_transport
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from tests.support.certificates import Authority

NAME = "octavo.v1.CacheManager"
KEY = "a key of one fleet"


class Servicer(v1_grpc.CacheManagerServicer):
    """Answers one method of each kind that the schema has."""

    async def Attend(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802  # the schema's name
        async for _ in request_iterator:
            yield v1.AttendReply()

    async def WatchFleet(self, request: Any, context: Any) -> Any:  # noqa: N802  # the schema's name
        yield v1.FleetUpdate()

    async def Audit(self, request: Any, context: Any) -> v1.AuditReply:  # noqa: N802  # the schema's name
        return v1.AuditReply(sequences=3)


@asynccontextmanager
async def serving(transport: Transport, *, internal: bool = True) -> AsyncGenerator[str]:
    service = Service("127.0.0.1:0", [NAME], transport=transport, internal=internal)
    v1_grpc.add_CacheManagerServicer_to_server(Servicer(), service.server)
    await service.start()
    try:
        yield f"127.0.0.1:{service.port}"
    finally:
        await service.stop(0)


async def audited(address: str, transport: Transport) -> int:
    """How many sequences the service says it has."""
    async with open_channel(address, transport) as channel:
        stub: Any = v1_grpc.CacheManagerStub(channel)
        with translated():
            reply = await stub.Audit(v1.AuditRequest(), timeout=10, metadata=transport.fleet_metadata)
        return reply.sequences


def transport_of(authority: Authority, *, name: str = "own", peer_name: str = "", fleet_key: str = "") -> Transport:
    """Of a process that has a certificate of the authority."""
    own = authority.issue(name)
    return read_transport(own.certificate, own.key, authority.file, peer_name, fleet_key)


def refused(failure: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> bool:
    return failure.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class TestTls:
    async def test_a_process_of_the_fleet_is_answered(self, tmp_path: Path) -> None:
        own = transport_of(Authority(tmp_path))
        async with serving(own) as address:
            assert await audited(address, own) == 3

    async def test_whoever_shows_no_certificate_is_not_heard_by_an_internal_service(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        async with serving(transport_of(authority)) as address:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await audited(address, read_transport(None, None, authority.file))
            assert refused(failure)

    async def test_whoever_shows_one_of_another_authority_is_not_heard(self, tmp_path: Path) -> None:
        authority, other = Authority(tmp_path), tmp_path / "other"
        other.mkdir()
        stranger = Authority(other).issue("stranger")
        async with serving(transport_of(authority)) as address:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await audited(address, read_transport(stranger.certificate, stranger.key, authority.file))
            assert refused(failure)

    async def test_a_service_that_only_pretends_is_not_believed(self, tmp_path: Path) -> None:
        authority, other = Authority(tmp_path), tmp_path / "other"
        other.mkdir()
        async with serving(transport_of(Authority(other)), internal=False) as address:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await audited(address, read_transport(None, None, authority.file))
            assert refused(failure)

    async def test_a_front_door_asks_nobody_for_a_certificate(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        async with serving(transport_of(authority), internal=False) as address:
            assert await audited(address, read_transport(None, None, authority.file)) == 3

    async def test_nobody_is_answered_in_clear(self, tmp_path: Path) -> None:
        async with serving(transport_of(Authority(tmp_path)), internal=False) as address:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await audited(address, PLAINTEXT)
            assert refused(failure)

    async def test_peers_may_all_bear_one_name(self, tmp_path: Path) -> None:
        """Of services that are called by addresses which no certificate foresees."""
        authority = Authority(tmp_path)
        named = authority.issue("named", "octavo.internal")
        server = read_transport(named.certificate, named.key, authority.file)
        async with serving(server) as address:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await audited(address, server)
            assert refused(failure)
            caller = read_transport(named.certificate, named.key, authority.file, "octavo.internal")
            assert await audited(address, caller) == 3

    async def test_a_probe_shows_its_own_certificate(self, tmp_path: Path) -> None:
        own = transport_of(Authority(tmp_path))
        async with serving(own) as address:
            assert await asyncio.to_thread(probe, address, transport=own)
            assert not await asyncio.to_thread(probe, address, 1.0)


class TestFleetKey:
    async def test_whoever_shows_it_is_answered(self) -> None:
        async with serving(Transport(fleet_key=KEY)) as address:
            assert await audited(address, Transport(fleet_key=KEY)) == 3

    @pytest.mark.parametrize("shown", ["", "another key", KEY[:-1]])
    async def test_whoever_does_not_is_refused(self, shown: str) -> None:
        async with serving(Transport(fleet_key=KEY)) as address:
            with pytest.raises(Unauthenticated, match=f"{FLEET_KEY}: the call shows no key of this fleet"):
                await audited(address, Transport(fleet_key=shown))

    async def test_it_is_asked_for_in_streams_as_well(self) -> None:
        async with serving(Transport(fleet_key=KEY)) as address, open_channel(address) as channel:
            stub: Any = v1_grpc.CacheManagerStub(channel)
            for call in (stub.WatchFleet(v1.WatchFleetRequest(), timeout=10), stub.Attend(timeout=10)):
                with pytest.raises(Unauthenticated), translated():
                    async for _ in call:
                        pass
            shown = stub.WatchFleet(v1.WatchFleetRequest(), timeout=10, metadata=((FLEET_KEY, KEY),))
            assert [update async for update in shown] == [v1.FleetUpdate()]

    async def test_health_is_told_to_everybody_and_nothing_else_is(self) -> None:
        async with serving(Transport(fleet_key=KEY)) as address, open_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
            call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(timeout=10)
            with pytest.raises(Unauthenticated), translated():
                async for _ in call:
                    pass

    async def test_a_front_door_asks_nobody_for_it(self) -> None:
        async with serving(Transport(fleet_key=KEY), internal=False) as address:
            assert await audited(address, PLAINTEXT) == 3

    def test_it_is_not_shown_in_words(self) -> None:
        assert KEY not in repr(Transport(fleet_key=KEY, private_key=KEY.encode()))


class TestFiles:
    def test_a_certificate_wants_its_key(self, tmp_path: Path) -> None:
        own = Authority(tmp_path).issue("own")
        with pytest.raises(ValueError, match="OCTAVO_TLS_KEY: unset, OCTAVO_TLS_CERT wants it beside itself"):
            read_transport(own.certificate, None, None)
        with pytest.raises(ValueError, match="OCTAVO_TLS_CERT: unset, OCTAVO_TLS_KEY wants it beside itself"):
            read_transport(None, own.key, None)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"OCTAVO_TLS_CA: .*absent.pem: No such file"):
            read_transport(None, None, tmp_path / "absent.pem")

    def test_a_file_of_something_else_is_named(self, tmp_path: Path) -> None:
        own = Authority(tmp_path).issue("own")
        with pytest.raises(ValueError, match=r"OCTAVO_TLS_CERT: .*own-key.pem of \d+ bytes is no PEM file"):
            read_transport(own.key, own.certificate, None)
