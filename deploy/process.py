"""One child process: started, watched, frozen, stopped, and started again at the same port.

Invariants:
- It never outlives this process, not even when this process is killed with SIGKILL (see `deploy/tether.py`).
- It leads a session of its own. Ctrl-C in a terminal therefore reaches only this process, which stops its children
  in the order it wants, and what the child itself starts is killed together with it.
- The port of its first start is the port of every later one, so that others find it again.
"""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"

Command = Callable[[int], list[str]]
"""The command line for a port; 0 stands for any free one."""

ServedPort = Callable[[str], int | None]
"""The port that a line of the log announces, if it is the line that does."""

OnLine = Callable[[str, str], None]
"""Takes a process's name and one line of its log."""

_TETHER = str(Path(__file__).with_name("tether.py"))
_KEPT_LINES = 2000
_SHOWN_LINES = 12
_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_SECONDS = 1.0
"""How long to go on reading a dead child's output, which somebody it left behind may hold open."""


class StartFailed(Exception):
    """A process did not come up."""

    def __init__(self, what: str, last_lines: Sequence[str] = ()) -> None:
        """`what` happened; `last_lines` are what the process wrote before, as it wrote them."""
        super().__init__("\n    ".join([what, *last_lines]))
        self.what = what
        self.last_lines = tuple(last_lines)


class Process:
    """A child process and its log."""

    def __init__(
        self,
        name: str,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        served_port: ServedPort,
        port: int = 0,
        on_line: OnLine | None = None,
    ) -> None:
        """Describe the process; nothing runs before `start()`. A change of `env` counts from the next start on."""
        self.name = name
        self.env = dict(os.environ if env is None else env)
        self.port = port
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.wanted = False
        """Whether it should run: False after `stop()` and `kill()`, which tells a stop from a crash."""
        self._command = command
        self._served_port = served_port
        self._on_line = on_line
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[int] | None = None
        self._served: asyncio.Event = asyncio.Event()

    # ---- what it is ------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """host:port, once it serves."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the process is there, frozen or not."""
        return self._child is not None and self._child.returncode is None

    @property
    def pid(self) -> int:
        """Of the last start."""
        assert self._child is not None, f"{self.name} was never started"
        return self._child.pid

    def events(self, name: str) -> list[dict[str, Any]]:
        """Every log line of that event that is still kept, oldest first."""
        return [event for line in self.lines if (event := log_event(line)) is not None and event.get("event") == name]

    # ---- start -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start it; returns when the process exists. Raises OSError when the command cannot be run."""
        assert not self.running, f"{self.name} runs already"
        self.wanted = True
        self._served = asyncio.Event()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-IS",
            _TETHER,
            str(os.getpid()),
            *self._command(self.port),
            env={**self.env, "OCTAVO_LISTEN": self.address},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._reading = asyncio.create_task(self._read(self._child, self._served), name=f"log of {self.name}")

    async def serving(self) -> None:
        """Return when it has announced its port. Raises StartFailed when it ends before."""
        await self.or_fail(self._served.wait())

    async def or_fail(self, awaitable: Any) -> None:
        """Wait for something that a running process will bring about. Raises StartFailed when it ends before."""
        wanted = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({wanted, self._reader()}, return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                wanted.result()
                return
            how = how_it_ended(self._reader().result())
            raise StartFailed(f"{self.name} {how} before it was ready", list(self.lines)[-_SHOWN_LINES:])
        finally:
            wanted.cancel()

    async def exited(self) -> int:
        """Return its exit code when it has ended (negative: the number of the signal that killed it)."""
        return await asyncio.shield(self._reader())

    # ---- stop ------------------------------------------------------------------------------------------------

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL to what is left after `grace_seconds`."""
        self.wanted = False
        if not self.running:
            return
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # a frozen process hears nothing
        with suppress(TimeoutError):
            await asyncio.wait_for(self.exited(), grace_seconds)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to it and to everything it started; returns when it is gone."""
        self.kill_now()
        if self._reading is not None:
            await self.exited()

    def kill_now(self) -> None:
        """SIGKILL to it and to everything it started, without waiting."""
        self.wanted = False
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and does nothing."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: it goes on after a `freeze()`."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    # ---- log -------------------------------------------------------------------------------------------------

    def _reader(self) -> asyncio.Task[int]:
        assert self._reading is not None, f"{self.name} was never started"
        return self._reading

    async def _read(self, child: asyncio.subprocess.Process, served: asyncio.Event) -> int:
        """Keep the child's output until it has ended; returns its exit code."""
        assert child.stdout is not None
        output = asyncio.create_task(self._keep_lines(child.stdout, served))
        try:
            code = await child.wait()
            await asyncio.wait({output}, timeout=_LAST_WORDS_SECONDS)
        finally:
            output.cancel()
        return code

    async def _keep_lines(self, output: asyncio.StreamReader, served: asyncio.Event) -> None:
        while raw := await _next_line(output):
            line = raw.decode(errors="replace").rstrip()
            self.lines.append(line)
            if self._on_line is not None:
                self._on_line(self.name, line)
            if not served.is_set() and (port := self._served_port(line)) is not None:
                self.port = port
                served.set()


@asynccontextmanager
async def running(process: Process) -> AsyncGenerator[Process]:
    """The process, which serves, for the time of the context; it is killed in the end.

    Raises:
        StartFailed: it ended before it served.
    """
    await process.start()
    try:
        await process.serving()
        yield process
    finally:
        await process.kill()


async def _next_line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # longer than the limit: readline has dropped it
        return b"(a line longer than 1 MiB)\n"


def log_event(line: str) -> dict[str, Any] | None:
    """The fields of a structured log line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None  # pyright: ignore[reportUnknownVariableType]: any JSON object


def how_it_ended(code: int) -> str:
    """An exit code in words: "exited with 1", "was killed by SIGKILL"."""
    return f"exited with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
