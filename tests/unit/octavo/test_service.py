"""One gRPC service: health, reflection, its port and its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.service import MAX_MESSAGE_BYTES, Service, is_ready, open_channel, probe
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from tests.support.tcp_proxy import tcp_proxy

NAME = "octavo.v1.CacheManager"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(v1_grpc.CacheManagerServicer):
    """Answers at once, or when it is told to."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.answer = asyncio.Event()

    async def Attend(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802  # the schema's name
        raise NotImplementedError

    async def WatchFleet(self, request: Any, context: Any) -> Any:  # noqa: N802  # the schema's name
        raise NotImplementedError

    async def Audit(self, request: v1.AuditRequest, context: Any) -> v1.AuditReply:  # noqa: N802  # the schema's name
        self.called.set()
        await self.answer.wait()
        return v1.AuditReply(sequences=3)


@asynccontextmanager
async def serving(
    *, ready: bool = True, servicer: Servicer | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncGenerator[Service]:
    service = Service("127.0.0.1:0", [NAME], max_message_bytes=max_message_bytes)
    v1_grpc.add_CacheManagerServicer_to_server(servicer or Servicer(), service.server)
    await service.start(ready=ready)
    try:
        yield service
    finally:
        await service.stop(0)


def address(service: Service) -> str:
    return f"127.0.0.1:{service.port}"


async def health(service: Service, name: str = "") -> int:
    async with open_channel(address(service)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status


@pytest.mark.parametrize("name", ["", NAME])
async def test_a_service_is_healthy_as_a_whole_and_by_its_name(name: str) -> None:
    async with serving() as service:
        assert await health(service, name) == SERVING


async def test_a_service_may_serve_before_it_is_ready() -> None:
    async with serving(ready=False) as service:
        assert await health(service) == NOT_SERVING
        await service.set_ready(True)
        assert await health(service, NAME) == SERVING


async def test_a_service_far_away_or_busy_is_connected_to() -> None:
    """Whose handshake takes a third of a second, longer than the pause between two attempts."""
    async with serving() as service, tcp_proxy(service.port) as way:
        way.delay = 0.3
        async with open_channel(f"127.0.0.1:{way.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
    assert reply.status == SERVING


@pytest.mark.parametrize("ready", [True, False])
async def test_a_probe_tells_readiness(ready: bool) -> None:
    async with serving(ready=ready) as service:
        assert await asyncio.to_thread(probe, address(service)) is ready


async def test_a_probe_of_nobody_says_no() -> None:
    assert not await asyncio.to_thread(probe, "127.0.0.1:1")


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
async def test_the_probe_command_tells_readiness_by_its_exit_code(ready: bool, code: int) -> None:
    """What container health checks run."""
    async with serving(ready=ready) as service:
        command = [sys.executable, "-m", "octavo.service", "probe", address(service)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_the_probe_command_says_which_variable_is_wrong() -> None:
    env = os.environ | {"OCTAVO_TLS_CA": "/absent.pem"}
    command = [sys.executable, "-m", "octavo.service", "probe", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (1, "OCTAVO_TLS_CA: /absent.pem: No such file or directory\n")


async def test_reflection_lists_what_is_served() -> None:
    async with serving() as service, open_channel(address(service)) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        reply = await call.read()
        call.cancel()
    names = {each.name for each in reply.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_describes_the_schema() -> None:
    async with serving() as service, open_channel(address(service)) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME)
        call = stub.ServerReflectionInfo(iter([request]), timeout=10)
        reply = await call.read()
        call.cancel()
    assert any(
        b"octavo/v1/cache_manager.proto" in file for file in reply.file_descriptor_response.file_descriptor_proto
    )


async def test_a_second_service_on_the_port_does_not_start() -> None:
    """gRPC would share the port between the two and say nothing."""
    async with serving() as first:
        second = Service(address(first), [NAME])
        with pytest.raises(OSError, match=f"cannot listen on {address(first)}"):
            await second.start()


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    """A service's process, to its end."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_a_port_that_is_taken_is_said_in_one_line_by_whatever_task_finds_out() -> None:
    ended = run_alone("""
import asyncio
from octavo import telemetry
from octavo.service import CannotListen, run

async def main():
    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup():
        outer.create_task(asyncio.Event().wait())
        raise CannotListen("cannot listen on 127.0.0.1:1")

telemetry.configure("gateway")
run(main())
""")

    assert (ended.returncode, ended.stderr) == (1, "")
    (line,) = ended.stdout.splitlines()
    said = json.loads(line)
    assert (said["event"], said["reason"]) == ("cannot_serve", "cannot listen on 127.0.0.1:1")
    assert "traceback" not in said


async def test_a_message_that_is_larger_than_the_service_takes_does_not_reach_it() -> None:
    async with serving(max_message_bytes=1000) as service, open_channel(address(service)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await v1_grpc.CacheManagerStub(channel).Audit(v1.AuditRequest(worker_id="w" * 1000), timeout=10)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1003 vs. 1000" in str(refused.value.details())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_readiness_has_fallen_when_the_service_hears_that_it_must_stop(number: signal.Signals) -> None:
    """S57: readiness falls first, while calls are still answered."""
    servicer = Servicer()
    async with serving(servicer=servicer) as service, open_channel(address(service)) as channel:
        running = asyncio.ensure_future(v1_grpc.CacheManagerStub(channel).Audit(v1.AuditRequest(), timeout=10))
        await servicer.called.wait()
        os.kill(os.getpid(), number)
        await service.until_asked_to_stop()
        assert await health(service) == NOT_SERVING
        assert await health(service, NAME) == NOT_SERVING
        servicer.answer.set()
        assert (await running).sequences == 3


async def test_a_call_that_ends_within_the_grace_is_answered() -> None:
    servicer = Servicer()
    async with serving(servicer=servicer) as service, open_channel(address(service)) as channel:
        running = asyncio.ensure_future(v1_grpc.CacheManagerStub(channel).Audit(v1.AuditRequest(), timeout=10))
        await servicer.called.wait()
        stopping = asyncio.create_task(service.stop(grace_seconds=60))
        servicer.answer.set()
        assert (await running).sequences == 3
        await stopping


async def test_a_call_that_outlives_the_grace_is_ended() -> None:
    servicer = Servicer()
    async with serving(servicer=servicer) as service, open_channel(address(service)) as channel:
        running = asyncio.ensure_future(v1_grpc.CacheManagerStub(channel).Audit(v1.AuditRequest(), timeout=10))
        await servicer.called.wait()
        await service.stop(grace_seconds=0)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await running
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_service_that_is_done_ends_without_taking_its_memory_apart() -> None:
    """What it has said is told all the same. A busy gateway's end took three seconds beyond its grace."""
    ended = run_alone("""
from octavo.service import run

class Piece:
    def __del__(self):
        print("taken apart")

async def main():
    print("served")

pieces = [Piece()]
run(main())
""")
    assert (ended.stdout, ended.returncode) == ("served\n", 0)


async def test_a_proxy_in_the_environment_is_for_clients_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.0.0.0 is this machine, and not by its name."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy, serving() as service:
        for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        for variable in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(variable, raising=False)

        async def reached(host: str, *, proxied: bool) -> bool:
            async with open_channel(f"{host}:{service.port}", proxied=proxied) as channel:
                return await is_ready(channel)

        assert await asyncio.to_thread(probe, address(service))
        assert [await reached(host, proxied=True) for host in ("127.0.0.1", "localhost")] == [True, True]
        assert await reached("0.0.0.0", proxied=False)
        assert asked == []
        assert not await reached("0.0.0.0", proxied=True)
    assert asked[0] == f"CONNECT 0.0.0.0:{service.port} HTTP/1.1\r\n".encode()
