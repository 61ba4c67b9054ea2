"""A real redis-server at a free port of this machine, which a test may stop, freeze and start again."""

import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from deploy.process import LOOPBACK, Process
from deploy.redis_binary import redis_command

CLUSTER_BUS = 10_000
"""From a server's port to the one that it talks to the rest of its cluster at."""


class RedisServer:
    """The process, and a client of it."""

    def __init__(self, *arguments: str, password: str | None = None) -> None:
        """`arguments` are put behind those that every server gets."""
        self.port = _free_port()
        login = () if password is None else ("--requirepass", password, "--masterauth", password)
        self.password = password
        self.process = Process(
            "redis",
            lambda port: [*redis_command(port), *login, *arguments],
            served_port=lambda line: self.port if "Ready to accept connections" in line else None,
            port=self.port,
        )
        self.client: Any = Redis(
            host=LOOPBACK, port=self.port, password=password, socket_timeout=5, socket_connect_timeout=5
        )

    @property
    def url(self) -> str:
        """What services are given."""
        login = "" if self.password is None else f":{self.password}@"
        return f"redis://{login}{LOOPBACK}:{self.port}/0"

    async def start(self) -> None:
        """Return when it answers. It remembers nothing of an earlier start."""
        await self.process.start()
        await self.process.serving()

    async def stop(self) -> None:
        """Kill it."""
        await self.process.kill()

    async def close(self) -> None:
        """Kill it for good."""
        await self.client.aclose()
        await self.stop()


@asynccontextmanager
async def redis_server(*arguments: str, password: str | None = None) -> AsyncGenerator[RedisServer]:
    """A server for the time of the context."""
    server = RedisServer(*arguments, password=password)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def _free_port() -> int:
    """A port that nobody listens at, nor at the one that belongs to it in a cluster.

    Both lie below those that Linux gives to whoever asks for any, so nobody gets them between here and the start. Drawn
    by the system's dice: hypothesis sets Python's own, to the same in every process that runs tests.
    """
    while True:
        port = 11_000 + secrets.randbelow(11_000)
        try:
            with socket.create_server((LOOPBACK, port)), socket.create_server((LOOPBACK, port + CLUSTER_BUS)):
                return port
        except OSError:
            continue
