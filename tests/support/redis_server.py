"""A real redis-server at a free port of this machine, which a test may stop, freeze and start again."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from deploy.process import LOOPBACK, Process
from deploy.redis_binary import redis_command


class RedisServer:
    """The process, and a client of it."""

    def __init__(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.process = Process(
            "redis",
            redis_command,
            served_port=lambda line: self.port if "Ready to accept connections" in line else None,
            port=self.port,
        )
        self.client = Redis(host=LOOPBACK, port=self.port, socket_timeout=5, socket_connect_timeout=5)

    @property
    def url(self) -> str:
        """What services are given."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    async def start(self) -> None:
        """Return when it answers. It remembers nothing of an earlier start."""
        await self.process.start()
        await self.process.serving()

    async def stop(self) -> None:
        """Kill it."""
        await self.process.kill()


@asynccontextmanager
async def redis_server() -> AsyncGenerator[RedisServer]:
    """A server for the time of the context."""
    server = RedisServer()
    await server.start()
    try:
        yield server
    finally:
        await server.client.aclose()
        await server.stop()
