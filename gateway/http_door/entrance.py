"""How a request comes in, and how a refusal goes out."""

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException as StarletteHTTPException

from gateway.http_door.connection import ClientLeft
from gateway.http_door.errors import Problem, problem_of, problem_of_fields, problem_of_status
from gateway.tenancy import Tenancy
from octavo.errors import OctavoError

BODY_SECONDS = 30.0
"""For a request's body to arrive in."""

_SHOWN_CHARACTERS = 60
"""Of a header."""

_CLIENT_LEFT = 499
"""nginx's number for it; nobody reads the answer."""


def guard(app: FastAPI, tenancy: Tenancy, max_body_bytes: int) -> None:
    """Let those in whom `tenancy` knows, with bodies of so many bytes at most, and have all refusals told alike."""
    app.state.tenancy = tenancy
    app.state.max_body_bytes = max_body_bytes
    app.add_exception_handler(RequestValidationError, _refuse_fields)
    app.add_exception_handler(StarletteHTTPException, _refuse_by_status)
    app.add_exception_handler(ClientLeft, _answer_nobody)
    for error in (OctavoError, TimeoutError, Exception):
        app.add_exception_handler(error, _refuse)


class StrictRequest(Request):
    """A request whose body is read within bounds, and its JSON strictly: no NaN, no half characters."""

    _whole: bytes | None = None

    async def body(self) -> bytes:
        """The whole of it. Raises HTTPException 413 where it is too long, 408 where it takes too long."""
        if self._whole is None:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    self._whole = await self._read(self.app.state.max_body_bytes)
            except TimeoutError as error:
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, f"body: not whole after {BODY_SECONDS:g} s") from error
        return self._whole

    async def _read(self, most: int) -> bytes:
        body = bytearray()
        async for piece in self.stream():
            body += piece
            if len(body) > most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: more than {most} bytes")
        return bytes(body)

    async def json(self) -> Any:
        """The body. Raises HTTPException 400 where it is no JSON."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"body: not JSON: {error}") from error


class TenantsRoute(APIRoute):
    """A path for those who show a key that is known; it is looked at before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler behind the key."""
        handle = super().get_route_handler()

        async def identify_and_handle(request: Request) -> Response:
            request.state.account = request.app.state.tenancy.account(request.headers.items())
            if request.method == "POST":
                _require_json(request)
            return await handle(StrictRequest(request.scope, request.receive))

        return identify_and_handle


def _require_json(request: Request) -> None:
    """Raises HTTPException 415 for a body that is said to be something else, as curl says it by itself."""
    sent = request.headers.get("content-type")
    if sent is None or sent.partition(";")[0].strip().lower() != "application/json":
        found = "absent" if sent is None else repr(sent[:_SHOWN_CHARACTERS])
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type: {found}, wanted application/json")


def told(problem: Problem) -> JSONResponse:
    """A problem as an answer."""
    return JSONResponse(problem.body, problem.status, problem.headers)


async def _refuse(request: Request, error: Exception) -> Response:
    return told(problem_of(error))


async def _refuse_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return told(problem_of_fields(error.errors()))


async def _refuse_by_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    unsaid = error.detail == HTTPStatus(error.status_code).phrase
    message = f"{request.method} {request.url.path}: {error.detail.lower()}" if unsaid else error.detail
    response = told(problem_of_status(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)
