"""Serves the HTTP API on this process's event loop, and stops it as the gRPC server is stopped."""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Generator, MutableMapping
from math import ceil
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http_door.protocol import BoundedHttp
from octavo.service import CannotListen
from octavo.settings import join_address, split_address

log = logging.getLogger("octavo.gateway")

REQUEST_ID = b"x-request-id"

_KEEP_ALIVE_SECONDS = 75
"""A connection without a request stays open. Longer than the minute for which load balancers keep theirs."""
_BACKLOG = 2048


class HttpServer:
    """One HTTP/1.1 server. It listens from its construction on, and `serve` answers until `stop`."""

    def __init__(self, listen: str, app: ASGIApp, certificate: Path | None = None, key: Path | None = None) -> None:
        """Listen on `listen` (host:port) for `app`; over TLS where there is a certificate and its key, as PEM files.

        Raises CannotListen when the address is taken or unknown.
        """
        host, port = split_address(listen)
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            Named(app),
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # failures are told by our own events
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = _Server(config)
        self._ended = asyncio.Event()
        log.info("http_served", extra={"host": host, "port": self.port})

    async def serve(self) -> None:
        """Answer until `stop`."""
        try:
            await self._server.serve([self._socket])
        finally:
            self._ended.set()

    async def stop(self, grace_seconds: float) -> None:
        """Take no new request; give the running ones `grace_seconds`, then cancel them."""
        self._server.config.timeout_graceful_shutdown = ceil(grace_seconds)
        self._server.should_exit = True
        await self._ended.wait()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone: the service has its own handlers, and a drain comes before the end."""
        yield


class Named:
    """Gives every request an id, which its answer carries as `x-request-id`, and logs what fails unforeseen."""

    def __init__(self, app: ASGIApp) -> None:
        """Before `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request_id = uuid.uuid4().hex
        if scope["method"] == "HEAD":  # is GET, but for the answer's body, which uvicorn leaves out
            scope = {**scope, "method": "GET"}
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:  # Starlette has answered 500 already, unless the answer had begun
            log.error("call_failed", exc_info=error, extra={"method": scope["path"], "request": request_id})


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen on {join_address(host, port)}: {os.strerror(error.errno or 0)}") from error
