"""The one place where Redis is spoken to: commands about one key each, to whichever server holds that key.

One server, a server that Sentinels name, and a Cluster look alike from outside: commands in, one reply or exception
each out. A server that fails costs its own keys only. Nothing is tried twice, since whoever asks has a budget, or
truth of its own to send again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError

from octavo.redis_url import TLS_OPTIONS, RedisUrl, Topology, parse_redis_url

__all__ = ["Command", "NoScriptError", "RedisClient", "ResponseError", "open_client"]

SOCKET_SECONDS = 1.0
"""Bound of one socket operation. A paused server holds a connection open for ever; without this, so would we."""


CONNECTIONS = 8
"""To one server at once. Whoever comes in a crowd waits for a turn rather than for a connection, which takes longer."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command about one key."""

    key: str
    """A script may name others beside it, with the same part in braces, which lie at the same server."""
    words: tuple[str | bytes | int, ...]
    """All of it: its name, and the key where the command wants it."""


class _Servers(Protocol):
    """A redis-py client, and which of its servers a key is for."""

    async def connect(self) -> None:
        """Learn which servers there are, where that must be learned."""
        ...

    def server_of(self, key: str) -> str:
        """A name for the server that holds a key. Raises what redis-py raises when nobody does."""
        ...

    def pipeline(self) -> Any:
        """For commands about keys of one server."""
        ...

    async def failed(self) -> None:
        """A server did not answer: learn anew which servers there are."""
        ...

    async def close(self) -> None: ...


class RedisClient:
    """The commands of one process. Shared by all its tasks."""

    def __init__(self, servers: _Servers) -> None:
        """See `open_client`."""
        self._servers = servers
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(CONNECTIONS))
        self._background: asyncio.Task[None] | None = None
        """Learns which servers there are, after one failed."""

    async def execute(self, commands: Sequence[Command]) -> list[object]:
        """One reply or exception a command, in order; each server gets its own in one round trip.

        Never raises but when it is cancelled. Ends by itself, a few times SOCKET_SECONDS after its turn at each server
        has come.
        """
        replies: list[object] = [None] * len(commands)
        # In a task of its own: redis-py on Python 3.11 can lose a cancellation that meets a reply, gather does not.
        await asyncio.gather(self.fill(commands, replies))
        return replies

    async def fill(self, commands: Sequence[Command], replies: list[object]) -> None:
        """The same, each reply put into `replies`, which has a value for each command, as soon as it is there.

        For whoever cannot wait for all of them; it runs this in a task that nobody waits for, since a cancellation may
        be lost.
        """
        try:
            await self._servers.connect()
        except Exception as error:  # the library raises more than it says; all of it means the same here
            replies[:] = [error] * len(commands)
            return
        parts = self._by_server(commands, replies)
        sending = [self._send(server, commands, part, replies) for server, part in parts.items()]
        if len(sending) == 1:  # spares a task on the path of every request
            await sending[0]
        else:
            await asyncio.gather(*sending)

    async def close(self) -> None:
        """Give the connections back."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait({self._background})
        await self._servers.close()

    def _by_server(self, commands: Sequence[Command], replies: list[object]) -> dict[str, list[int]]:
        """Server -> where its commands are. A key that no server holds gets its reply here."""
        parts: dict[str, list[int]] = {}
        for at, command in enumerate(commands):
            try:
                parts.setdefault(self._servers.server_of(command.key), []).append(at)
            except Exception as error:
                replies[at] = error
                self._learn_anew()
        return parts

    async def _send(self, server: str, commands: Sequence[Command], part: list[int], replies: list[object]) -> None:
        """The commands of one server, in one round trip."""
        try:
            async with self._turns[server], self._servers.pipeline() as pipeline:
                for at in part:
                    pipeline.execute_command(*commands[at].words)
                answers: list[object] = await pipeline.execute(raise_on_error=False)
        except Exception as error:
            answers = [error] * len(part)
        for at, answer in zip(part, answers, strict=True):
            replies[at] = answer
        if any(isinstance(answer, Exception) and not isinstance(answer, ResponseError) for answer in answers):
            self._learn_anew()

    def _learn_anew(self) -> None:
        if self._background is None or self._background.done():
            self._background = asyncio.create_task(_quietly(self._servers.failed()))


async def _quietly(learning: Coroutine[Any, Any, None]) -> None:
    """A failure to learn is followed by the next failure of a command, which tries again."""
    try:
        await learning
    except Exception:
        return


def open_client(url: str) -> RedisClient:
    """A client of the Redis at `url` (octavo.redis_url); nothing is connected yet. Raises ValueError for a bad URL."""
    where = parse_redis_url(url)
    if where.topology is Topology.CLUSTER:
        return RedisClient(_Cluster(where))
    return RedisClient(_OneServer(where))


class _OneServer:
    """A server at a known place, or the one that the sentinels name; redis-py asks them at every connection."""

    def __init__(self, where: RedisUrl) -> None:
        self._sentinels: list[Any] = []
        kwargs: dict[str, Any] = {**_kwargs(where, tls=where.tls), "db": where.database}
        if where.topology is Topology.SENTINEL:
            login = {"username": where.options.get("sentinel_username")}
            login["password"] = where.options.get("sentinel_password")
            asking = {**_kwargs(where, tls=where.sentinel_tls), **login}
            sentinel = cast("Any", Sentinel)(where.hosts, sentinel_kwargs=asking, **kwargs)
            self._sentinels = sentinel.sentinels
            self._redis = sentinel.master_for(where.service)
        elif where.socket_path is not None:
            self._redis = cast("Any", Redis)(unix_socket_path=where.socket_path, **kwargs)
        else:
            ((host, port),) = where.hosts
            self._redis = cast("Any", Redis)(host=host, port=port, **kwargs)

    async def connect(self) -> None:
        pass

    def server_of(self, key: str) -> str:
        return ""

    def pipeline(self) -> Any:
        return self._redis.pipeline(transaction=False)

    async def failed(self) -> None:
        pass

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)
        for sentinel in self._sentinels:
            await sentinel.aclose()


class _Cluster:
    """A cluster: each of its nodes holds some of the keys, and says so when it is asked about another's."""

    def __init__(self, where: RedisUrl) -> None:
        nodes = [cast("Any", ClusterNode)(host, port) for host, port in where.hosts]
        # Where some nodes are away for good, the keys of the others are still worth having.
        kwargs = _kwargs(where, tls=where.tls)
        self._cluster = cast("Any", RedisCluster)(startup_nodes=nodes, require_full_coverage=False, **kwargs)

    async def connect(self) -> None:
        await self._cluster.initialize()

    def server_of(self, key: str) -> str:
        return self._cluster.get_node_from_key(key).name

    def pipeline(self) -> Any:
        return self._cluster.pipeline()

    async def failed(self) -> None:
        await self._cluster.nodes_manager.initialize()

    async def close(self) -> None:
        await self._cluster.aclose()


def _kwargs(where: RedisUrl, *, tls: bool) -> dict[str, Any]:
    """What every connection is made with."""
    files = {name: where.options[name] for name in TLS_OPTIONS if name in where.options}
    return {
        "username": where.username,
        "password": where.password,
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": SOCKET_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        **({"ssl": True, **files} if tls else {}),
    }
