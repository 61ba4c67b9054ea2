"""A TCP proxy in front of a server: it may delay every byte, hold all of them back, and end TLS."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
TLS_HANDSHAKE = b"\x16"
"""The first byte of every connection over TLS, and of no command of Redis'."""


class TcpProxy:
    """Listens at `port`, and passes on what comes to the server, and back, `delay` seconds later."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self.flows = asyncio.Event()
        """While it is not set, nothing passes, no end of a connection either, and nobody is told: a partition."""
        self.flows.set()
        self.port = 0
        self.target = target
        """The port that it leads to."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.flows.wait()
            target, begun = await self._way(reader)
            there, back = await asyncio.open_connection(LOOPBACK, target)
            back.write(begun)
        except OSError:
            writer.close()
            return
        try:
            await _either(self._pass(reader, back), self._pass(there, writer))
        finally:
            self._tasks.discard(task)
            for end in (writer, back):
                end.close()

    async def _way(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """The port to lead to, and what was read to find out."""
        return self.target, b""

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(1 << 16):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self.flows.wait()
                sink.write(chunk)
                await sink.drain()
        await self.flows.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class TcpSwitch(TcpProxy):
    """Leads those who begin with TLS to another port: one place for both, as servers have two."""

    def __init__(self, target: int, tls_target: int) -> None:
        super().__init__(target)
        self.tls_target = tls_target

    async def _way(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        begun = await reader.read(1)
        return self.tls_target if begun == TLS_HANDSHAKE else self.target, begun


async def _either(*passing: object) -> None:
    tasks = [asyncio.ensure_future(each) for each in passing]  # pyright: ignore
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def tcp_proxy(target: int, certificate: Path | None = None) -> AsyncGenerator[TcpProxy]:
    """A proxy at a free port before the server at port `target`; speaks TLS if it is given a certificate."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    async with _listening(TcpProxy(target), context) as proxy:
        yield proxy


@asynccontextmanager
async def tcp_switch(target: int, certificate: Path) -> AsyncGenerator[TcpProxy]:
    """A proxy at a free port before the server at port `target`, for those who speak TLS and for those who do not."""
    async with tcp_proxy(target, certificate) as encrypted, _listening(TcpSwitch(target, encrypted.port)) as switch:
        yield switch


@asynccontextmanager
async def _listening(proxy: TcpProxy, context: ssl.SSLContext | None = None) -> AsyncGenerator[TcpProxy]:
    server = await asyncio.start_server(proxy.serve, LOOPBACK, 0, ssl=context)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
