"""Calls of tools in a model's text: text in, cut anywhere; text and whole calls out.

How a model writes its calls is a habit of its training, and its chat template shows which:

    HERMES      <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number among text (Hermes, Qwen, SmolLM)
    MISTRAL     text[TOOL_CALLS][{"name": …, "arguments": {…}}, …], up to the end
    LLAMA_JSON  {"name": …, "parameters": {…}}; …, behind <|python_tag|> or as the whole text, up to the end

Invariants: what comes out depends on the text only, never on how it was cut; text without a call comes out as it is,
and so does what begins like a call and is none. Only white space beside a call is lost.
"""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from octavo.errors import InvalidRequest


class ToolForm(Enum):
    """The marks before and behind calls; nothing behind them where they go on to the end of the text."""

    HERMES = ("<tool_call>", "</tool_call>")
    MISTRAL = ("[TOOL_CALLS]", "")
    LLAMA_JSON = ("<|python_tag|>", "")

    @property
    def marks(self) -> tuple[str, ...]:
        """Those that there are."""
        return tuple(mark for mark in self.value if mark)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, whole."""

    name: str
    arguments: str
    """The JSON text of an object."""


Piece = str | ToolCall


def form_in(template: str) -> ToolForm | None:
    """How the model of a chat template writes its calls, or None where the template tells of none that is known."""
    if ToolForm.MISTRAL.marks[0] in template:
        return ToolForm.MISTRAL
    if ToolForm.HERMES.marks[0] in template and "<function=" not in template:  # with it, the call is no JSON
        return ToolForm.HERMES
    if ToolForm.LLAMA_JSON.marks[0] in template or '"parameters": dictionary' in template:
        return ToolForm.LLAMA_JSON
    return None


class ToolCallParser:
    """Parts the text of one sample."""

    def __init__(self, form: ToolForm) -> None:
        """Look for calls of that form."""
        self._opening, self._closing = form.value
        self._bare = form is ToolForm.LLAMA_JSON  # text that begins as JSON may be a call without a mark
        self._held = ""
        self._searched = 0  # characters of what is held in which no closing mark begins
        self._in_call = False
        self._at_start = True
        self._after_call = False
        self.calls = 0
        """Found so far."""

    def push(self, text: str) -> list[Piece]:
        """What is now known to be text, or a call."""
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def flush(self) -> list[Piece]:
        """What is left when no more text comes. A call that was not closed counts if it is whole."""
        held, self._held = self._held, ""
        found: list[Piece] = []
        if self._in_call:
            self._take_call(held, held.removeprefix(self._opening), found)
        else:
            self._take_text(held, found)
        return found

    def _step(self, found: list[Piece]) -> bool:
        """Settle one text or call; False when more must come first."""
        return self._step_in_call(found) if self._in_call else self._step_in_text(found)

    def _step_in_text(self, found: list[Piece]) -> bool:
        if self._bare and self._at_start:
            begin = self._held.lstrip()
            if not begin:
                return False
            if begin.startswith("{"):
                self._in_call, self._at_start = True, False
                return True
        at = self._held.find(self._opening)
        if at < 0:
            end = len(self._held) - self._undecided()
            self._take_text(self._held[:end], found)
            self._held = self._held[end:]
            return False
        self._take_text(self._held[:at].rstrip(), found)
        self._held = self._held[at:]
        self._in_call, self._searched = True, len(self._opening)
        return True

    def _undecided(self) -> int:
        """Characters at the end of what is held that may belong to a mark, or are white space before one."""
        for size in range(min(len(self._opening) - 1, len(self._held)), 0, -1):
            if self._opening.startswith(self._held[-size:]):
                before = self._held[:-size]
                return size + len(before) - len(before.rstrip())
        return len(self._held) - len(self._held.rstrip())

    def _step_in_call(self, found: list[Piece]) -> bool:
        if not self._closing:
            return False
        at = self._held.find(self._closing, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._held) - len(self._closing) + 1)
            return False
        end = at + len(self._closing)
        call, self._held = self._held[:end], self._held[end:]
        self._in_call = False
        self._take_call(call, call[len(self._opening) : at], found)
        return True

    def _take_call(self, whole: str, body: str, found: list[Piece]) -> None:
        """The calls of a body; where it is none, the text that it was found in."""
        calls = calls_in(body)
        if not calls:
            self._take_text(whole, found)
            return
        found += calls
        self.calls += len(calls)
        self._after_call = True

    def _take_text(self, text: str, found: list[Piece]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            found.append(text)
            self._at_start = self._after_call = False


def calls_in(body: str) -> list[ToolCall]:
    """The calls that a text consists of: JSON objects, one after the other or in a list. None where it has another."""
    calls: list[ToolCall] = []
    try:
        for value in _values_in(body):
            calls += [_call_of(each) for each in (cast("list[Any]", value) if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []
    return calls


def _values_in(body: str) -> list[Any]:
    """JSON values with white space or semicolons between them. Raises ValueError at anything else."""
    values: list[Any] = []
    at = 0
    while rest := body[at:].lstrip("; \t\r\n"):
        value, end = _DECODER.raw_decode(rest)
        values.append(value)
        at = len(body) - len(rest) + end
    return values


def _call_of(value: object) -> ToolCall:
    """Raises ValueError where it is none."""
    if not isinstance(value, dict):
        raise ValueError("no object")
    call = cast("dict[str, Any]", value)
    _written(call)
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _read(arguments)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("no name with an object of arguments")
    return ToolCall(name, _written(cast("dict[str, Any]", arguments)))


# ---- what a client sends of tools ----------------------------------------------------------------------------


def objects_in(field: str, text: str) -> list[dict[str, Any]]:
    """The objects of a JSON list that a client sent; none for no text.

    Raises:
        InvalidRequest: naming the field, and what is wrong with it.
    """
    if not text:
        return []
    try:
        value = _read(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: no JSON: {error}") from error
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}: {type(value).__name__}, wanted a list of objects")
    for at, each in enumerate(cast("list[object]", value)):
        if not isinstance(each, dict):
            raise InvalidRequest(f"{field}[{at}]: {type(each).__name__}, wanted an object")
    return cast("list[dict[str, Any]]", value)


def for_template(call: dict[str, Any]) -> dict[str, Any]:
    """An earlier call as templates want it: OpenAI writes its arguments as JSON text, and templates take an object."""
    function: object = call.get("function")
    if not isinstance(function, dict):
        return call
    named = cast("dict[str, Any]", function)
    try:
        arguments = _read(named["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**named, "arguments": arguments}} if isinstance(arguments, dict) else call


def _read(text: str) -> object:
    """The value of a JSON text. Raises ValueError where it is none, or stands for what `_written` cannot write."""
    value: object = _DECODER.decode(text)
    _written(value)
    return value


def _written(value: object) -> str:
    """A value as JSON. Raises ValueError for what JSON may stand for and not hold: half a character, and 1e999."""
    text = _ENCODER.encode(value)
    text.encode()
    return text


def _no_constant(name: str) -> None:
    """JSON has no NaN and no infinities; Python's reader would take them."""
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
