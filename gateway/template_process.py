"""A process that renders one chat template, and can do nothing else.

A template is a program that came with a model's files. It runs in jinja2's sandbox, which keeps it from Python; and in
a process of its own, since no sandbox of Python bounds the time and the memory that `9**9**9`, a loop in a loop or a
string that doubles itself take. The process opens no file, no socket and no other process, knows nothing of the
gateway's environment, and is killed by the kernel when one rendering takes too long.

    stdin    JSON, a line each: the template's text; then what to render it with, again and again
    stdout   JSON, a line for each rendering: {"text": …} or {"error": …}
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_SECONDS = 2.0
"""Of one rendering. Long conversations take a hundredth of it."""
MAX_MEMORY_BYTES = 512 << 20
"""Of address space, of which Python takes a tenth."""
MAX_CHARACTERS = 16 << 20
"""Of a rendered text."""


def environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the settings, filter and functions that transformers gives them."""
    made: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    return made


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own words for training; for serving it is only a bracket."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        """Keep what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as it is, where jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    """The server's local time: some templates tell the model which day it is."""
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _confine() -> None:
    """No file, socket or process from now on, and only so much memory."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _answer(source: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """The text, or why there is none."""
    try:
        text = _compiled(source).render(variables)
        text.encode()
    except MemoryError:
        return {"error": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB"}
    except Exception as error:  # whatever a template does wrong
        return {"error": str(error) or type(error).__name__}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"{len(text)} characters, at most {MAX_CHARACTERS}"}
    return {"text": text}


@cache
def _compiled(source: str) -> jinja2.Template:
    """Part of the first rendering: jinja2 evaluates what is constant while it compiles."""
    return environment().from_string(source)


def main() -> None:
    """Answer until the gateway closes the pipe. SIGPROF ends the process when a rendering takes too long."""
    _answer("{{ strftime_now('%c') }}{{ 'a' | pprint }}{{ nothing.at.all }}", {})  # reads what is read when needed
    _confine()
    source = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        answer = json.dumps(_answer(source, json.loads(line))).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
