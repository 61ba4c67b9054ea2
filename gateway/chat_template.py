"""Adapter: a model folder's chat template, rendered by a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import jinja2

from gateway import template_process
from gateway.core.request import ChatMessage, ChatPrompt
from gateway.core.tool_calls import for_template, form_in, objects_in
from octavo.errors import InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")
"""What the process may know of the gateway's environment: the time of day, and where Python's libraries lie."""


class Template:
    """A chat template and the special tokens that it may name. Renderings wait for one another."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Raises ValueError where the source is no template."""
        try:
            template_process.environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template does not parse: {error}") from error
        self.tool_form = form_in(source)
        self._takes_tools = "tools" in source
        self._source = source
        self._names = dict(names)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Template] | None = None

    def render(self, chat: ChatPrompt) -> str:
        """The conversation as text, up to where the assistant's next turn begins.

        Raises:
            InvalidRequest: the template knows no tools and there are some; or it refuses these messages, for example
                their order of roles, or it takes more
                time, memory or characters than a template may; or calls or tools are nested too deeply for it.
        """
        tools = objects_in("prompt.chat.tools", chat.tools)
        if tools and not self._takes_tools:
            raise InvalidRequest(f"prompt.chat.tools: {len(tools)} tools, the model's chat template takes none")
        variables = {
            "messages": [_turn(message) for message in chat.messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
            **self._names,
        }
        try:
            line = json.dumps(variables).encode()
        except RecursionError as error:  # what a client sent was shallow enough; it lies deeper in here
            raise InvalidRequest(f"prompt.chat: nested too deeply: {error}") from error
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise InvalidRequest(f"prompt.chat: the model's template refuses it: {answer['error']}")
        return answer["text"]

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._running()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                return json.loads(answer)
        except BrokenPipeError:
            pass  # it ended before it read all
        return {"error": self._why_ended(process)}

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started at the first rendering and after each that it did not survive."""
        if self._process is None:
            process = subprocess.Popen(
                [sys.executable, "-I", template_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # a Ctrl-C is meant for the gateway, which answers what it has
            )
            self._end = weakref.finalize(self, _end, process)
            self._process = process
            assert process.stdin is not None, "a pipe"
            process.stdin.write(json.dumps(self._source).encode() + b"\n")
        return self._process

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        """Forget the process, which is at its end."""
        assert self._end is not None, "a process runs"
        code = process.wait()
        self._end()
        self._process = self._end = None
        if code == -signal.SIGPROF:
            return f"it takes more than {template_process.MAX_CPU_SECONDS:g} s of processor time"
        return f"its process ended with {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "a pipe"
        with suppress(BrokenPipeError):  # something was written that nobody reads any more
            pipe.close()


def _turn(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it; what it has not is not there."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [for_template(call) for call in objects_in("tool_calls", message.tool_calls)]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    return turn


# ---- the files -----------------------------------------------------------------------------------------------


def read_template(folder: Path) -> Template | None:
    """The chat template of a model folder, or None where there is none.

    Raises:
        ValueError: a file of it cannot be understood; names the file or the folder.
    """
    own_file = folder / "chat_template.jinja"
    config = _read_config(folder / "tokenizer_config.json")
    try:
        source = own_file.read_text(encoding="utf-8") if own_file.is_file() else _template_in(config)
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder}: the chat template is not UTF-8: {error}") from error
    if source is None:
        return None
    names = {name: text for name in _SPECIAL_TOKENS if (text := _text_of(config.get(name)))}
    try:
        return Template(source, names)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _read_config(file: Path) -> dict[str, Any]:
    """The tokenizer's configuration, empty where there is none."""
    if not file.is_file():
        return {}
    try:
        config: object = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", config)


def _template_in(config: dict[str, Any]) -> str | None:
    """The template that a tokenizer's configuration holds: one, or several of which one is the default."""
    found: object = config.get("chat_template")
    if isinstance(found, list):
        named = [cast("dict[str, object]", entry) for entry in cast("list[object]", found) if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise ValueError(f"chat_template in tokenizer_config.json: {type(found).__name__}, wanted text")
    return found


def _text_of(token: object) -> str | None:
    """A special token is written as its text or as an object around it."""
    text = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
