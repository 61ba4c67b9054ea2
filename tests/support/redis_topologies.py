"""Real Redis servers in every way that they can stand to one another, behind one face."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.process import LOOPBACK, Process, running
from deploy.redis_binary import redis_server_path
from tests.support.certificates import Authority
from tests.support.redis_server import RedisServer, redis_server
from tests.support.tcp_proxy import TcpProxy, tcp_proxy, tcp_switch

SERVICE = "rumour"
PASSWORD = "fold: sixteen/pages"
USER_PASSWORD = "leaf"
QUOTED = "fold%3A%20sixteen%2Fpages"
NODES = 3
SLOTS = 16_384


@dataclass
class Servers:
    """What a service is told, and the servers behind it."""

    url: str
    servers: list[RedisServer]
    """Those that hold data; in the order of their slots in a cluster, the first master first under a sentinel."""
    proxy: TcpProxy | None = None
    start: Callable[[], Awaitable[None]] | None = None
    """What to do to the servers, once they run, before they can be used."""

    @property
    def writable(self) -> list[RedisServer]:
        """Those that take writes, as long as none has failed over."""
        return self.servers if len(self.servers) in (1, NODES) else self.servers[:1]

    async def stop(self) -> None:
        """Kill all of them."""
        for server in self.servers:
            await server.stop()

    async def begin_again(self) -> None:
        """Start them again, empty."""
        for server in self.servers:
            await server.start()
        if self.start is not None:
            await self.start()

    def freeze(self) -> None:
        for server in self.servers:
            server.process.freeze()

    def thaw(self) -> None:
        for server in self.servers:
            server.process.thaw()

    async def everywhere(self, *words: Any) -> list[Any]:
        """A command to every server."""
        return [await server.client.execute_command(*words) for server in self.servers]

    async def holder(self, key: str) -> RedisServer:
        """The server that takes writes to a key."""
        if len(self.servers) < NODES:
            return self.servers[0]
        slot = await self.servers[0].client.execute_command("CLUSTER KEYSLOT", key)
        return self.servers[slot * NODES // SLOTS]


@asynccontextmanager
async def standalone(folder: Path) -> AsyncGenerator[Servers]:
    async with redis_server() as server:
        yield Servers(server.url, [server])


@asynccontextmanager
async def with_password(folder: Path) -> AsyncGenerator[Servers]:
    async with redis_server(password=PASSWORD) as server:
        yield Servers(f"redis://:{QUOTED}@{LOOPBACK}:{server.port}/0", [server])


@asynccontextmanager
async def over_tls(folder: Path) -> AsyncGenerator[Servers]:
    """The server's own binary may have been built without TLS, so a proxy speaks it for the server."""
    authority = Authority(folder)
    certificate = authority.issue("redis").both
    async with redis_server(password=PASSWORD) as server, tcp_proxy(server.port, certificate) as proxy:
        url = f"rediss://default:{QUOTED}@{LOOPBACK}:{proxy.port}?ssl_ca_certs={authority.file}"
        yield Servers(url, [server], proxy)


@asynccontextmanager
async def behind_proxy(folder: Path) -> AsyncGenerator[Servers]:
    async with redis_server() as server, tcp_proxy(server.port) as proxy:
        yield Servers(f"redis://{LOOPBACK}:{proxy.port}", [server], proxy)


@asynccontextmanager
async def under_sentinel(folder: Path) -> AsyncGenerator[Servers]:
    """A master, a replica, and one sentinel, all with the same password."""
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(redis_server(password=PASSWORD))
        follow = ("--replicaof", LOOPBACK, str(master.port))
        replica = await stack.enter_async_context(redis_server(*follow, password=PASSWORD))
        sentinel = _sentinel(folder / "sentinel.conf", master.port)
        stack.push_async_callback(sentinel.kill)
        await sentinel.start()
        await sentinel.serving()

        async def in_step() -> bool:
            links = [await server.client.info("replication") for server in (master, replica)]
            return any(link.get("master_link_status") == "up" for link in links)

        async def synchronised() -> None:
            await until(in_step)

        await synchronised()
        login = f"default:{QUOTED}@"
        url = f"redis+sentinel://{login}{LOOPBACK}:{sentinel.port}/{SERVICE}/0?sentinel_password={QUOTED}"
        yield Servers(url, [master, replica], start=synchronised)


@asynccontextmanager
async def under_sentinel_over_tls(folder: Path, *, server_tls: bool) -> AsyncGenerator[Servers]:
    """A sentinel that is spoken to over TLS, and a server at the place that it names, in clear or over TLS.

    Both ask for a user's password. Among themselves they speak in clear, at the same places.
    """
    authority = Authority(folder)
    certificate = authority.issue("redis").both
    async with (
        redis_server("--user", *f"octavo on >{USER_PASSWORD} ~* &* +@all".split(), password=PASSWORD) as server,
        tcp_switch(server.port, certificate) as named,
    ):
        sentinel = _sentinel(folder / "sentinel.conf", named.port)
        async with running(sentinel), tcp_proxy(sentinel.port, certificate) as asked:
            scheme, more = ("rediss", "") if server_tls else ("redis", "&sentinel_tls=yes")
            login = f"sentinel_username=default&sentinel_password={QUOTED}"
            options = f"{login}&ssl_ca_certs={authority.file}{more}"
            url = f"{scheme}+sentinel://octavo:{USER_PASSWORD}@{LOOPBACK}:{asked.port}/{SERVICE}/0?{options}"
            yield Servers(url, [server], asked)


def _sentinel(config: Path, master_port: int) -> Process:
    """A process at a free port; it writes its own file."""
    port = RedisServer().port
    config.write_text(
        f"port {port}\nbind {LOOPBACK}\ndir {config.parent}\n"
        f'requirepass "{PASSWORD}"\n'
        f"sentinel monitor {SERVICE} {LOOPBACK} {master_port} 1\n"
        f'sentinel auth-pass {SERVICE} "{PASSWORD}"\n'
        f"sentinel down-after-milliseconds {SERVICE} 500\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    return Process(
        "sentinel",
        lambda _: [str(redis_server_path()), str(config), "--sentinel"],
        served_port=lambda line: port if "+monitor" in line else None,
        port=port,
    )


@asynccontextmanager
async def in_cluster(folder: Path) -> AsyncGenerator[Servers]:
    """Three nodes with a third of the slots each, and no replicas."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(_node(folder, number)) for number in range(NODES)]
        await _join(nodes)
        hosts = ",".join(f"{LOOPBACK}:{node.port}" for node in nodes)
        yield Servers(f"redis+cluster://:{QUOTED}@{hosts}", nodes, start=lambda: until(lambda: _all_joined(nodes)))


@asynccontextmanager
async def in_cluster_over_tls(folder: Path) -> AsyncGenerator[Servers]:
    """The same behind a proxy each, which speaks TLS and is where its node says that it is."""
    authority = Authority(folder)
    certificate = authority.issue("redis").both
    async with AsyncExitStack() as stack:
        nodes, hosts = list[RedisServer](), list[str]()
        for number in range(NODES):
            proxy = await stack.enter_async_context(tcp_proxy(0, certificate))
            announced = ("--cluster-announce-port", str(proxy.port))
            nodes.append(await stack.enter_async_context(_node(folder, number, *announced)))
            proxy.target = nodes[-1].port
            hosts.append(f"{LOOPBACK}:{proxy.port}")
        await _join(nodes)
        yield Servers(f"rediss+cluster://:{QUOTED}@{','.join(hosts)}?ssl_ca_certs={authority.file}", nodes)


@asynccontextmanager
async def _node(folder: Path, number: int, *more: str) -> AsyncGenerator[RedisServer]:
    """Of a cluster, alone."""
    place = folder / str(number)
    place.mkdir()
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--dir", str(place))
    options = (*options, "--cluster-require-full-coverage", "no", *more)
    async with redis_server(*options, password=PASSWORD) as node:
        yield node


async def _join(nodes: list[RedisServer]) -> None:
    """Share the slots among the nodes, and let them meet."""
    borders = [-(-SLOTS * number // NODES) for number in range(NODES + 1)]
    for number, node in enumerate(nodes):
        await node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        await node.client.execute_command("CLUSTER", "ADDSLOTS", *range(borders[number], borders[number + 1]))
        if number > 0:
            await node.client.execute_command("CLUSTER", "MEET", LOOPBACK, nodes[0].port)
    await until(lambda: _all_joined(nodes))


async def _all_joined(nodes: list[RedisServer]) -> bool:
    for node in nodes:
        info: dict[str, str] = await node.client.execute_command("CLUSTER INFO")
        if (int(info["cluster_slots_ok"]), int(info["cluster_known_nodes"])) != (SLOTS, NODES):
            return False
    return True


TOPOLOGIES = {
    "standalone": standalone,
    "password": with_password,
    "tls": over_tls,
    "sentinel": under_sentinel,
    "cluster": in_cluster,
}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds; fails after 20 seconds."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  # servers tell nobody what they have settled among them
            await asyncio.sleep(0.02)
