"""Child processes: start, last words, stop, and the promise that none is left behind."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import pytest

from deploy.process import Process, StartFailed, log_event, running
from tests.support.processes import gone

ANNOUNCES = """
import json, os, signal, sys
port = int(os.environ["OCTAVO_LISTEN"].rpartition(":")[2]) or 4711
print("hello")
print(json.dumps({"event": "serving", "port": port}), flush=True)
"""
SLEEPS = ANNOUNCES + "signal.pause()"
IS_DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + ANNOUNCES + "while True: signal.pause()"


def served_port(line: str) -> int | None:
    event = log_event(line)
    return event["port"] if event is not None else None


def python(code: str, on_line: Callable[[str, str], None] | None = None) -> Process:
    return Process("child", lambda _: [sys.executable, "-c", code], served_port=served_port, on_line=on_line)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_serves_when_its_log_announces_the_port() -> None:
    async with running(python(SLEEPS)) as process:
        assert process.address == "127.0.0.1:4711"
        assert process.events("serving") == [{"event": "serving", "port": 4711}]
        assert process.lines[0] == "hello"


async def test_a_process_that_ends_before_it_serves_fails_with_its_last_words() -> None:
    process = python("import sys; print('no model here'); sys.exit(3)")
    await process.start()

    with pytest.raises(StartFailed, match=r"child exited with 3 before it was ready\n    no model here") as failed:
        await process.serving()

    assert failed.value.last_lines == ("no model here",)


async def test_every_line_is_handed_on_with_the_name_of_its_process() -> None:
    seen: list[tuple[str, str]] = []
    async with running(python(SLEEPS, lambda name, line: seen.append((name, line)))):
        assert seen[0] == ("child", "hello")


async def test_a_line_without_bound_does_not_end_the_log() -> None:
    process = python("print('x' * (3 << 20)); print('after')")
    await process.start()
    await process.exited()

    assert process.lines[-1] == "after"


async def test_stop_ends_a_process_that_listens() -> None:
    async with running(python(SLEEPS)) as process:
        await process.stop(grace_seconds=30)

        assert await process.exited() == -signal.SIGTERM
        assert not exists(process.pid)


async def test_stop_kills_a_process_that_does_not_listen() -> None:
    async with running(python(IS_DEAF)) as process:
        await process.stop(grace_seconds=0.1)

        assert await process.exited() == -signal.SIGKILL
        assert not exists(process.pid)


async def test_stop_ends_a_frozen_process() -> None:
    async with running(python(SLEEPS)) as process:
        process.freeze()
        await process.stop(grace_seconds=30)

        assert await process.exited() == -signal.SIGTERM


async def test_a_restarted_process_listens_at_its_first_port() -> None:
    async with running(python(SLEEPS)) as process:
        first = process.pid
        await process.kill()
        await process.start()
        await process.serving()

        assert process.pid != first
        assert [event["port"] for event in process.events("serving")] == [4711, 4711]


async def test_a_crash_is_told_from_a_stop() -> None:
    async with running(python(SLEEPS)) as process:
        os.kill(process.pid, signal.SIGKILL)
        await process.exited()
        assert process.wanted

        await process.start()
        await process.serving()
        await process.kill()
        assert not process.wanted


PARENT = """
import asyncio, sys
from deploy.process import Process

async def main():
    child = Process("child", lambda _: [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
                    served_port=lambda line: 1 if line == "up" else None)
    await child.start()
    await child.serving()
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_process_dies_with_a_parent_that_is_killed() -> None:
    """The kernel ends it: its parent had no chance to."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert exists(pid)

    parent.kill()
    await parent.wait()

    async with asyncio.timeout(10):
        await gone(pid)
