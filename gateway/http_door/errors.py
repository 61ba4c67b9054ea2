"""Errors -> HTTP: one table, and OpenAI's error object, in which every answer that is no success comes.

    {"error": {"message": "temperature: -1, wanted at least 0 and finite", "type": "invalid_request_error",
               "param": "temperature", "code": null}}

Messages name fields as the gRPC schema does; here they get the names that they have in a request over HTTP.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from typing import Any

from pydantic import BaseModel

from octavo import errors
from octavo.status import shortened


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    """The field of the request at fault."""
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as HTTP tells it."""

    status: int
    error: ErrorObject
    retry_after_seconds: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """That belong to the answer."""
        return {} if self.retry_after_seconds is None else {"retry-after": str(self.retry_after_seconds)}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object. What it shows of the request may be megabytes there, and is short here."""
        said = self.error.model_dump()
        return {"error": {name: None if value is None else shortened(value) for name, value in said.items()}}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all errors of a class have in common."""

    status: HTTPStatus
    type: str
    code: str | None = None


_INVALID = "invalid_request_error"
_RATE = "rate_limit_error"
_SERVER = "server_error"

KIND_OF: dict[type[Exception], _Kind] = {
    errors.InvalidRequest: _Kind(HTTPStatus.BAD_REQUEST, _INVALID),
    errors.Unauthenticated: _Kind(HTTPStatus.UNAUTHORIZED, _INVALID, "invalid_api_key"),
    errors.UnknownModel: _Kind(HTTPStatus.NOT_FOUND, _INVALID, "model_not_found"),
    errors.Overloaded: _Kind(HTTPStatus.TOO_MANY_REQUESTS, _RATE, "rate_limit_exceeded"),
    errors.NoWorker: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER, "no_worker"),
    errors.Draining: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER, "draining"),
    errors.WorkerLost: _Kind(HTTPStatus.SERVICE_UNAVAILABLE, _SERVER, "worker_lost"),
    TimeoutError: _Kind(HTTPStatus.GATEWAY_TIMEOUT, _SERVER, "deadline_exceeded"),
}
"""A class that is not here is told as the nearest class above it that is; one without any is a bug of ours."""

_BUG = _Kind(HTTPStatus.INTERNAL_SERVER_ERROR, _SERVER, "internal_error")

_FIELD = re.compile(r"[a-z_]+(\[\d+\])*(\.[a-z_]+(\[\d+\])*)*(?=: )")
_NAMES = (
    ("prompt.chat.messages", "messages"),
    ("prompt.chat.tools", "tools"),
    ("prompt.chat", "messages"),
    ("prompt.tokens.ids", "prompt"),
    ("prompt.text", "prompt"),
    ("requests", "prompt"),
    ("ids", "tokens"),
    ("beam.width", "best_of"),
    ("beam.", ""),
)
"""The gRPC schema's name of a field -> its name here."""
_RELATED = ((" with beam.width ", " with best_of "), (" with beam,", " with use_beam_search,"))
"""The same of a second field, in the words of rules about two."""


def problem_of(error: Exception) -> Problem:
    """An error that the gateway raised, as HTTP tells it."""
    kind = next((KIND_OF[cls] for cls in type(error).__mro__ if cls in KIND_OF), _BUG)
    message = "internal error; see the server's log" if kind is _BUG else str(error)
    param, message = _named_here(message)
    seconds = error.retry_after_seconds if isinstance(error, errors.OctavoError) else None
    return Problem(
        status=kind.status,
        error=ErrorObject(message=message, type=kind.type, param=param, code=kind.code),
        retry_after_seconds=None if seconds is None else max(1, ceil(seconds)),
    )


def problem_of_status(status: int, message: str) -> Problem:
    """A refusal that HTTP itself gives: no such path, no such method, too large a body."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    kind = _INVALID if status < HTTPStatus.INTERNAL_SERVER_ERROR else _SERVER
    return Problem(status=status, error=ErrorObject(message=message, type=kind, code=code))


def problem_of_fields(found: Sequence[Mapping[str, Any]]) -> Problem:
    """A body that is not as the API describes it. Of a field with several forms, the closest one says what is wrong."""
    # Closest is the form that was followed farthest into the body.
    told = max(found, key=lambda problem: len(problem["loc"]))
    param = _path(told["loc"][1:]) or None
    reason = told["msg"].removeprefix("Value error, ")
    if told["type"] == "extra_forbidden":
        reason = "no such field here"
    if param is None and _FIELD.match(reason):  # a rule about several fields names the one at fault by itself
        param, message = _named_here(reason)
    else:
        message = f"{param or 'body'}: {reason[:1].lower()}{reason[1:]}"
    return Problem(status=HTTPStatus.BAD_REQUEST, error=ErrorObject(message=message, type=_INVALID, param=param))


def _named_here(message: str) -> tuple[str | None, str]:
    """(field at fault, message), where the message begins with a field."""
    found = _FIELD.match(message)
    if found is None:
        return None, message
    field = found[0]
    for theirs, ours in _NAMES:
        if field.startswith(theirs):
            field = ours + field.removeprefix(theirs)
            break
    rule = message[found.end() :]
    for theirs, ours in _RELATED:
        rule = rule.replace(theirs, ours)
    return field, field + rule


def _path(parts: Sequence[str | int]) -> str:
    """`messages[0].content` of ("messages", 0, "content"). What pydantic adds for a branch of a union is left out."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            path += f".{part}" if path else part
    return path


_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict"})
