"""How the `octavo` command speaks: two consoles, and the services' logs made readable."""

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.request import getproxies_environment

from rich.console import Console
from rich.text import Text

_PIPE_WIDTH = 132
"""Columns of a table where there is no terminal to say how many it has."""


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


out = _console(stderr=False)
"""What was asked for."""
err = _console(stderr=True)
"""Everything else: errors, progress, logs."""

_COLOURS = ("cyan", "magenta", "yellow", "blue", "green")
_LEVEL_STYLES = {"debug": "dim", "warning": "yellow", "error": "bold red"}
_UNSHOWN = frozenset({"time", "level", "service", "event", "traceback"})


def as_curl(http_url: str, model: str, *, with_key: bool, authorities: Path | None = None) -> str:
    """A question for OpenAI's API, to be pasted into a shell; with the user's own key where one is wanted.

    `authorities` is the PEM file of those who are believed over TLS; None: those whom the system trusts. A proxy that
    the environment names for other machines is passed by.
    """
    question = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
    believe = f"--cacert {shlex.quote(str(authorities))} " if authorities else ""
    past = "--noproxy '*' " if getproxies_environment() else ""
    ask = f"curl {past}{believe}{http_url}/v1/chat/completions -H 'content-type: application/json'"
    if with_key:
        ask += ' -H "authorization: Bearer $OCTAVO_API_KEY"'
    return f"  {ask} \\\n    -d {shlex.quote(json.dumps(question))}"


class CommandFailed(Exception):
    """The command cannot do what was asked; the message is one line for the user."""


class ServiceLog:
    """Prints lines of several processes, each behind its name, in a colour of its own on a terminal."""

    def __init__(self, names: list[str]) -> None:
        self._width = max(map(len, names))
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}

    def __call__(self, name: str, line: str) -> None:
        """Print one line of the process `name`."""
        prefix = Text(f"{name:<{self._width}} │ ", style=self._colours.get(name, "bold"))
        err.print(prefix + readable(line), soft_wrap=True)


def readable(line: str) -> Text:
    """A structured log line as time, event and fields; any other line as it is."""
    from deploy.process import log_event

    event = log_event(line)
    if event is None or "event" not in event:
        return Text(line)
    text = Text(f"{_clock(event.get('time'))} ", style="dim")
    text.append(str(event["event"]), style=_LEVEL_STYLES.get(str(event.get("level")), "bold"))
    for key, value in event.items():
        if key not in _UNSHOWN:
            text.append(f" {key}=", style="dim").append(str(value), style="default")
    if "traceback" in event:
        text.append(f"\n{event['traceback']}", style="red")
    return text


def _clock(time: Any) -> str:
    try:
        return f"{datetime.fromisoformat(time).astimezone():%H:%M:%S}"
    except (TypeError, ValueError):
        return "--:--:--"
