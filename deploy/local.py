"""A whole Octavo on this machine: redis-server, cache managers, workers and gateway as child processes.

    async with Cluster(workers=2) as cluster:
        print(cluster.address)

Everything listens on loopback at free ports. Start-up is over when every service says that it is healthy and every
gateway sees every worker; a service that dies before that fails the start at once, with its last words. Shut-down
goes against the flow of requests: gateway, workers, cache managers, Redis. No file is written, so none is left.

`octavo up`, the demo, the benches and the tests all use this class.
"""

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import octavo
from deploy.handshake import why_unbelieved
from deploy.process import LOOPBACK, OnLine, Process, StartFailed, how_it_ended, log_event
from deploy.redis_binary import redis_command
from octavo.errors import Unauthenticated
from octavo.service import open_channel
from octavo.settings import PREFIX, TransportSettings, split_address
from octavo.status import translated
from octavo.tenants import FILE_VARIABLE, api_key_in, credentials, read_tenants
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import gateway_pb2, gateway_pb2_grpc

START_SECONDS = 300.0
"""For everything to be healthy. Loading a large model takes most of it."""

GRACE_SECONDS = 10.0
"""For what runs to end after SIGTERM, each service."""

_KILL_AFTER_SECONDS = 3.0
"""Beyond its grace, until a service that still runs is killed."""

_RESTART_FIRST_SECONDS = 0.5
_RESTART_MOST_SECONDS = 30.0
_STEADY_SECONDS = 60.0
"""A service that ran this long before it crashed starts again with the first, short delay."""

_POLL_SECONDS = 0.05

_OURS = {
    f"{PREFIX}{name}"
    for name in ("LISTEN", "HTTP_LISTEN", "ADVERTISE", "WORKER_ID", "REDIS_URL", "CACHE_MANAGER", "METRICS_LISTEN")
}
"""Variables that the cluster decides; what the caller's environment holds under these names is not passed on."""


class Ports(NamedTuple):
    """Where the gateway listens, and the cache manager; 0 takes a free port."""

    grpc: int = 0
    http: int = 0
    manager: int = 0


class Cluster:
    """The processes, and their common start and end. Each may be killed, frozen and restarted by itself."""

    def __init__(  # noqa: PLR0913 - each is a thing of its own that a caller may want otherwise
        self,
        *,
        workers: int = 2,
        managers: int = 1,
        gateways: int = 1,
        ports: Ports | None = None,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = GRACE_SECONDS,
        on_line: OnLine | None = None,
    ) -> None:
        """Describe the cluster; `start()` or `async with` starts it.

        Args:
            workers: how many.
            managers: how many cache managers; each worker attends one of them, and the next when that fails.
            gateways: how many; clients may ask any of them.
            ports: of the first gateway and the first cache manager; None takes free ones.
            env: `OCTAVO_*` variables for every service, on top of this process's environment. Of several models in
                `OCTAVO_MODEL`, separated by commas, the workers take one each, in turns.
            grace_seconds: for running requests when the cluster stops.
            on_line: called with (name of the process, line) for every line that a process writes.
        """
        assert workers > 0, f"workers: {workers}, wanted at least 1"
        assert managers > 0, f"managers: {managers}, wanted at least 1"
        assert gateways > 0, f"gateways: {gateways}, wanted at least 1"
        shared = _environment(env or {}, workers)
        self._credentials = credentials(shared.get("OCTAVO_API_KEY"))
        self._transport = PLAINTEXT
        """How to call the services; read from their files at the start."""
        grace = {"OCTAVO_GRACE_SECONDS": f"{grace_seconds:g}"}
        self._stop_seconds = grace_seconds + _KILL_AFTER_SECONDS
        self._on_line = on_line

        def service(name: str, module: str, more: Mapping[str, str], at: int = 0) -> Process:
            command = [sys.executable, "-P", "-m", module]  # -P: a folder `worker` where the user stands is not ours
            return Process(
                name,
                lambda _: command,
                env={**shared, **more},
                served_port=_announced_port,
                port=at,
                on_line=on_line,
            )

        self.reach: Callable[[Process, Process], str] = lambda _, server: server.address
        """Where a process is to find a service: host:port. Before the start it may be set to ways that lead there."""
        self.redis = _redis(on_line)
        first = ports or Ports()
        self.managers = [
            service(name, "cache_manager", {}, first.manager if at == 0 else 0)
            for at, name in enumerate(manager_names(managers))
        ]
        models = [model.strip() for model in shared.get("OCTAVO_MODEL", "").split(",")]
        self.workers = [
            service(name, "worker", {"OCTAVO_WORKER_ID": name, "OCTAVO_MODEL": model, **grace})
            for name, model in zip(worker_names(workers), itertools.cycle(models), strict=False)
        ]
        listening = [first, *[Ports()] * (gateways - 1)]
        self.gateways = [
            service(name, "gateway", {**grace, "OCTAVO_HTTP_LISTEN": f"{LOOPBACK}:{own.http}"}, own.grpc)
            for name, own in zip(gateway_names(gateways), listening, strict=True)
        ]

    @property
    def processes(self) -> list[Process]:
        """All of them, in the order in which they stop."""
        return [*self.gateways, *self.workers, *self.managers, self.redis]

    @property
    def manager(self) -> Process:
        """The first cache manager."""
        return self.managers[0]

    @property
    def gateway(self) -> Process:
        """The first gateway."""
        return self.gateways[0]

    @property
    def address(self) -> str:
        """host:port of the first gateway."""
        return self.gateway.address

    @property
    def asks_for_keys(self) -> bool:
        """Whether the first gateway knows its tenants by their API keys."""
        return bool(self.gateway.env.get(FILE_VARIABLE))

    @property
    def http_url(self) -> str:
        """Of the first gateway's HTTP API, up to the path."""
        scheme = "https" if self.gateway.env.get("OCTAVO_TLS_CERT") else "http"
        return f"{scheme}://{self.gateway.env['OCTAVO_HTTP_LISTEN']}"

    @property
    def http_authorities(self) -> Path | None:
        """The PEM file of those whom a caller of `http_url` must believe; None: in clear, or those of the system."""
        file = self.gateway.env.get("OCTAVO_TLS_CA")
        return Path(file).expanduser() if file and self.http_url.startswith("https:") else None

    # ---- start and stop --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything and wait until it is ready; what was started is killed again when that fails.

        Raises:
            StartFailed: a process ended before it was ready, or not all were in START_SECONDS; or, before anything is
                started, a port is taken, the services could not call one another over TLS, or there is a tenants file
                and OCTAVO_API_KEY holds no key of it.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._start()
        except TimeoutError:
            late = [process.name for process in self.processes if process.running]
            await self.kill()
            raise StartFailed(f"not ready after {START_SECONDS:g} s; still running: {', '.join(late)}") from None
        except BaseException:
            await self.kill()
            raise

    def check(self) -> None:
        """Look for what would fail the start, as the start does itself: nothing has been started or fetched yet.

        Raises:
            StartFailed: a port is taken, the services could not call one another over TLS, or there is a tenants file
                and OCTAVO_API_KEY holds no key of it.
        """
        self._check_key()
        self._transport = _transport_of(self.gateway.env)
        _, http_port = split_address(self.gateway.env["OCTAVO_HTTP_LISTEN"])
        _check_free(self.gateway.port, http_port, self.manager.port)

    async def _start(self) -> None:
        self.check()
        await self.redis.start()
        await self.redis.serving()
        for process in (*self.managers, *self.gateways):
            process.env["OCTAVO_REDIS_URL"] = f"redis://{self.reach(process, self.redis)}/0"
        await _together(map(self._start_healthy, self.managers))
        for process in (*self.workers, *self.gateways):
            process.env["OCTAVO_CACHE_MANAGER"] = ",".join(self.reach(process, manager) for manager in self.managers)
        await _together(self._start_healthy(process) for process in (*self.workers, *self.gateways))
        for gateway in self.gateways:
            # So that a gateway that starts again is found where it was.
            gateway.env["OCTAVO_HTTP_LISTEN"] = f"{LOOPBACK}:{gateway.events('http_served')[-1]['port']}"
            await gateway.or_fail(self._until_fleet_is_whole(gateway.address))

    def _check_key(self) -> None:
        """Say before the start, which may take minutes, what its end would say: that no gateway knows our key."""
        file = self.gateway.env.get(FILE_VARIABLE)
        if not file:
            return
        try:
            read_tenants(Path(file).expanduser()).with_key(api_key_in(self._credentials))
        except (OSError, ValueError) as error:
            raise StartFailed(str(error)) from error
        except Unauthenticated as error:
            raise StartFailed(
                f"OCTAVO_API_KEY: wanted a key of the tenants file {file}, to ask for the fleet: {error}"
            ) from error

    async def until_fleet_is_whole(self) -> None:
        """Return when every gateway sees every worker. Has no bound of its own.

        Raises:
            StartFailed: it has a tenants file, and OCTAVO_API_KEY holds no key of it.
        """
        await _together(self._until_fleet_is_whole(gateway.address) for gateway in self.gateways)

    async def _until_fleet_is_whole(self, address: str) -> None:
        async with open_channel(address, self._transport) as channel:
            gateway = gateway_pb2_grpc.InferenceStub(channel)
            while await self._workers_seen_by(gateway) < len(self.workers):  # noqa: ASYNC110 - nothing tells us
                await asyncio.sleep(_POLL_SECONDS)

    async def _workers_seen_by(self, gateway: Any) -> int:
        """How many it knows of; 0 while it does not answer."""
        request = gateway_pb2.GetFleetRequest()
        try:
            with translated():
                fleet = await gateway.GetFleet(request, timeout=2.0, wait_for_ready=True, metadata=self._credentials)
        except Unauthenticated as error:
            raise StartFailed(f"the gateway wants a key of its tenants file in OCTAVO_API_KEY: {error}") from error
        except grpc.aio.AioRpcError:
            return 0
        return len(fleet.workers)

    async def _start_healthy(self, process: Process) -> None:
        await process.start()
        await self._healthy(process)

    async def _healthy(self, process: Process) -> None:
        """Return when the service says that it is ready. Raises StartFailed when it ends before."""
        await process.serving()
        await process.or_fail(_until_healthy(process.address, self._transport))

    async def stop(self) -> None:
        """Let what runs finish, then end every process; each has its grace, and is killed after it."""
        await _together(gateway.stop(self._stop_seconds) for gateway in self.gateways)
        await _together(worker.stop(self._stop_seconds) for worker in self.workers)
        await _together(manager.stop(self._stop_seconds) for manager in self.managers)
        await self.redis.stop(self._stop_seconds)

    async def kill(self) -> None:
        """End every process at once."""
        self.kill_now()
        for process in self.processes:
            await process.kill()

    def kill_now(self) -> None:
        """Send every process its end without waiting for it; a `stop()` that is under way then returns at once."""
        for process in self.processes:
            process.kill_now()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            await self.kill()

    # ---- crashes ---------------------------------------------------------------------------------------------

    async def restart(self, process: Process) -> None:
        """Start a process that has ended again, at its port, and wait until it is healthy. Raises StartFailed."""
        await process.start()
        if process is self.redis:
            await process.serving()
        else:
            await self._healthy(process)

    async def keep_running(self) -> None:
        """Start every process that crashes again, after a delay that doubles. Runs until cancelled."""
        await _together(self._keep_running(process) for process in self.processes)

    async def _keep_running(self, process: Process) -> None:
        now = asyncio.get_running_loop().time
        delay, since = _RESTART_FIRST_SECONDS, now()
        while True:
            code = await process.exited()
            if not process.wanted:
                return
            if now() - since > _STEADY_SECONDS:
                delay = _RESTART_FIRST_SECONDS
            self._say(f"{process.name} {how_it_ended(code)}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)
            if not process.wanted:
                return
            delay, since = min(2 * delay, _RESTART_MOST_SECONDS), now()
            with suppress(StartFailed):  # its exit is seen above, and said there
                await self.restart(process)
                self._say(f"{process.name} is back")

    def _say(self, line: str) -> None:
        if self._on_line is not None:
            self._on_line("octavo", line)


async def _until_healthy(address: str, transport: Transport) -> None:
    async with open_channel(address, transport) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # published without types
        while not await _is_heard_to_serve(stub):  # noqa: ASYNC110 - the watch was lost, not the service
            await asyncio.sleep(_POLL_SECONDS)


async def _is_heard_to_serve(health: Any) -> bool:
    """Watch until a service says that it serves, or the watch is lost."""
    with suppress(grpc.aio.AioRpcError):
        async for reply in health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    return False


async def _together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def manager_names(managers: int) -> list[str]:
    """What the cache managers' processes are called."""
    return ["manager"] if managers == 1 else [f"manager-{i}" for i in range(managers)]


def gateway_names(gateways: int) -> list[str]:
    """What the gateways' processes are called."""
    return ["gateway"] if gateways == 1 else [f"gateway-{i}" for i in range(gateways)]


def worker_names(workers: int) -> list[str]:
    """What the workers of a cluster are called, by their processes and by the fleet."""
    return [f"worker-{i}" for i in range(workers)]


def _environment(env: Mapping[str, str], workers: int) -> dict[str, str]:
    """What every service of the cluster finds in its environment."""
    cores = len(os.sched_getaffinity(0))
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    return {
        "OCTAVO_THREADS": str(max(1, cores // workers)),
        "OCTAVO_LOOKUP_SECONDS": "0.05",  # the models take all cores here, so an answer may lie unread for a while
        "GRPC_VERBOSITY": "NONE",  # gRPC's own lines are no JSON, and say what our events say
        **inherited,
        "PYTHONPATH": str(Path(octavo.__file__).parent.parent),
        "PYTHONUNBUFFERED": "1",
        **env,
    }


def _transport_of(env: Mapping[str, str]) -> Transport:
    """How services that are all started with these variables are called, by one another as well.

    Raises:
        StartFailed: a file is not what it should be, or they would be served over TLS and called in clear, or the other
            way round, or with a certificate that they would not believe; names the variable.
    """
    names = {name: f"{PREFIX}{name.upper()}" for name in TransportSettings.model_fields}
    given = {name: env[variable] for name, variable in names.items() if env.get(variable)}
    try:
        settings = TransportSettings.model_validate(given)
        transport = settings.transport()
    except ValueError as error:
        raise StartFailed(str(error)) from error
    if bool(transport.certificate) != bool(transport.authorities):
        missing, there = ("CA", "CERT") if transport.certificate else ("CERT", "CA")
        why = "services that are all on one machine are served over TLS and call one another over TLS, or neither"
        raise StartFailed(f"{PREFIX}TLS_{missing}: unset, {PREFIX}TLS_{there} wants it beside itself: {why}")
    if settings.tls_cert and settings.tls_key and settings.tls_ca:
        _check_believed(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_peer_name or LOOPBACK)
    return transport


def _check_believed(certificate: Path, key: Path, authorities: Path, host: str) -> None:
    """Raise StartFailed where services with this certificate would not believe one another when called at `host`."""
    if why := why_unbelieved(certificate, key, authorities, host):
        raise StartFailed(
            f"{PREFIX}TLS_CERT: {certificate} with {PREFIX}TLS_KEY {key} is not believed at {host}, where the services "
            f"call one another ({PREFIX}TLS_PEER_NAME names another host), by {PREFIX}TLS_CA {authorities}: {why}"
        )


def _announced_port(line: str) -> int | None:
    event = log_event(line)
    return int(event["port"]) if event is not None and event.get("event") == "serving" else None


def _redis(on_line: OnLine | None) -> Process:
    """A redis-server that keeps nothing on disk and drops nothing by itself.

    Redis cannot be asked for any free port, so one is looked for here; another process may take it first, which is
    then a failed start.
    """
    port = _free_port()
    command = redis_command(port)
    return Process(
        "redis",
        lambda _: command,
        served_port=lambda line: port if "Ready to accept connections" in line else None,
        port=port,
        on_line=on_line,
    )


def _check_free(*ports: int) -> None:
    """Raises StartFailed where two services shall have a port, or somebody listens at it; 0 stands for any free one."""
    for port in filter(None, ports):
        if ports.count(port) > 1:
            all_three = "the gateway, its HTTP API and the cache manager have one each"
            raise StartFailed(f"port {port} is asked for {ports.count(port)} times; {all_three}")
    for port in ports:
        try:
            socket.create_server((LOOPBACK, port)).close()
        except OSError as error:
            why = os.strerror(error.errno or 0)  # without the address, which create_server adds
            raise StartFailed(f"port {port} cannot be used ({why}); is another Octavo running?") from error


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]
