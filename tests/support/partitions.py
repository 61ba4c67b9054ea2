"""A network between the processes of a cluster in which every way can be cut, each for itself and without a word.

Loopback knows no partitions. So each process is told to find each other one at a proxy of its own, which passes on all
bytes until it is cut: then it holds them back, connections stay open, and new ones come to nothing. Only a worker has
one address for all gateways, as it has in a fleet.
"""

import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from deploy.local import Cluster
from deploy.process import Process
from tests.support.tcp_proxy import LOOPBACK, TcpProxy, tcp_proxy


def kind_of(process: Process) -> str:
    """What it is one of: worker, manager, gateway or redis."""
    return process.name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Way:
    """From whoever opens a connection to whoever takes it."""

    clients: tuple[Process, ...]
    server: Process
    proxy: TcpProxy


class Network:
    """The ways between the processes of a cluster."""

    def __init__(self, ways: Iterable[Way]) -> None:
        self._ways = tuple(ways)

    def reach(self, client: Process, server: Process) -> str:
        """Where the one finds the other: host:port."""
        [way] = [way for way in self._ways if client in way.clients and way.server is server]
        return f"{LOOPBACK}:{way.proxy.port}"

    def between(self, process: Process, kind: str) -> tuple[TcpProxy, ...]:
        """The ways between a process and all those of another kind."""
        return tuple(
            way.proxy
            for way in self._ways
            if (process in way.clients and kind_of(way.server) == kind)
            or (process is way.server and kind_of(way.clients[0]) == kind)
        )


@asynccontextmanager
async def network(cluster: Cluster) -> AsyncIterator[Network]:
    """Lay the ways of a cluster that has not been started, and lead its processes there."""
    for server in (*cluster.workers, *cluster.managers):
        server.port = _free_port()
    gateways = tuple(cluster.gateways)
    ends: list[tuple[Sequence[Process], Process]] = [
        *((gateways, worker) for worker in cluster.workers),
        *(((client,), manager) for client in (*cluster.workers, *gateways) for manager in cluster.managers),
        *(((client,), cluster.redis) for client in (*cluster.managers, *gateways)),
    ]
    async with AsyncExitStack() as stack:
        ways = Network(
            [
                Way(tuple(clients), server, await stack.enter_async_context(tcp_proxy(server.port)))
                for clients, server in ends
            ]
        )
        for worker in cluster.workers:
            worker.env["OCTAVO_ADVERTISE"] = ways.reach(cluster.gateway, worker)
        cluster.reach = ways.reach
        yield ways


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]
