"""The `octavo` command as a user types it, and what it leaves behind: nothing."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.support.processes import command_of, descendants, gone

pytestmark = [pytest.mark.cluster, pytest.mark.model]

START_SECONDS = 120.0
STOP_SECONDS = 30.0
RUN_SECONDS = 60.0
DEMO_SECONDS = 180.0
NOBODY = "127.0.0.1:9"
FRANCE = "What is the capital of France?"


@dataclass
class Command:
    """A running `octavo`, in a process group of its own, like a terminal's foreground job."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def until(self, pattern: str) -> re.Match[str]:
        """The first line from now on that matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode())
                if match := re.search(pattern, self.lines[-1]):
                    return match
        raise AssertionError("".join(["it ended without saying so:\n", *self.lines]))

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    async def ends(self, seconds: float = STOP_SECONDS) -> int:
        """Its exit code; what it still writes is kept."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                self.lines += (await self.process.stdout.read()).decode().splitlines(keepends=True)
                return await self.process.wait()
        except TimeoutError:
            self.process.send_signal(signal.SIGABRT)  # it tells where it stands
            stands = (await self.process.stdout.read()).decode()
            raise AssertionError("".join(["it does not end:\n", *self.lines, stands])) from None


@asynccontextmanager
async def octavo(*arguments: str, **env: str) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,
        env={**os.environ, "OCTAVO_THREADS": "1", "PYTHONFAULTHANDLER": "1", **env},
    )
    try:
        yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(*arguments: str, typed: str = "") -> tuple[int, str]:
    """Exit code and output of one `octavo` that finds `typed` on its standard input."""
    async with octavo(*arguments) as command:
        assert command.process.stdin is not None
        command.process.stdin.write(typed.encode())
        command.process.stdin.close()
        code = await command.ends(RUN_SECONDS)
        return code, "".join(command.lines)


async def interrupted_chat(address: str) -> tuple[int, str]:
    """Exit code and output of a chat that gets Ctrl-C in the middle of its answer."""
    async with octavo("chat", "--address", address, "--max-tokens", "3000", "Tell a long story.") as chat:
        assert chat.process.stdout is not None
        first = await chat.process.stdout.readexactly(1)
        chat.press_ctrl_c()
        code = await chat.ends()
        return code, "".join([first.decode(), *chat.lines])


def left_in(folder: Path) -> list[str]:
    """What lies in a folder for temporary files, but for the cache that torch keeps there for its next run."""
    return [entry.name for entry in folder.iterdir() if not entry.name.startswith("torchinductor_")]


async def all_gone(pids: Sequence[int]) -> None:
    async with asyncio.timeout(STOP_SECONDS):
        for pid in pids:
            await gone(pid)


async def test_up_serves_chat_and_stats_until_ctrl_c(tmp_path: Path) -> None:
    async with octavo("up", "--workers", "1", "--port", "0", TMPDIR=str(tmp_path)) as up:
        address = (await up.until(r"serves smollm2 at (\S+) with 1 worker, which remembers [\d,]+ tokens"))[1]
        manager = (await up.until(r"octavo reset --cache-manager (\S+)"))[1]
        openai_url = (await up.until(r"OpenAI's API is at (http://\S+/v1):"))[1]
        pids = descendants(up.process.pid)

        said = await run("chat", "--address", address, "--max-tokens", "12", FRANCE)
        again = await run("chat", "--address", address, "--max-tokens", "12", FRANCE)
        talked = await run("chat", "--address", address, typed=f"{FRANCE}\nAnd what is the capital of Italy?\n")
        code_when_interrupted, said_when_interrupted = await interrupted_chat(address)
        async with AsyncOpenAI(base_url=openai_url, api_key="any") as client:
            over_http = await client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": FRANCE}], max_tokens=12, temperature=0
            )
        table = await run("stats", "--address", address)
        numbers = await run("stats", "--address", address, "--json")
        unknown = await run("chat", "--address", address, "--model", "gpt-17", "Hello?")
        explained = await run("explain", "--address", address, FRANCE)
        audited = await run("audit", "--cache-manager", manager)
        forgot = await run("reset", "--cache-manager", f"{NOBODY},{manager}")
        stranger = await run("reset", "--cache-manager", manager, "--worker", "nobody")
        os.kill(next(pid for pid in pids if "redis" in command_of(pid)), signal.SIGKILL)
        await up.until("redis was killed by SIGKILL; starting it again")
        await up.until("redis is back")
        pids += descendants(up.process.pid)
        up.press_ctrl_c()
        code = await up.ends()

    assert len(set(pids)) == 4 + 2, "redis twice, and one that renders the chat template"
    await all_gone(pids)
    assert left_in(tmp_path) == []
    assert code == 0
    assert said[0] == 0
    assert "Paris" in said[1]
    assert again == said
    assert over_http.choices[0].message.content == said[1].partition("\n")[0]
    assert talked[0] == 0
    assert re.search(r"Paris(.|\n)*Rome", talked[1])
    assert code_when_interrupted == 130
    assert "Traceback" not in said_when_interrupted
    assert explained[0] == 0
    assert re.search(r"worker-0: \d+ of \d+ tokens would be reused\. ", explained[1])
    assert audited[0] == 0
    assert "worker-0: the books balance." in audited[1]
    assert table[0] == 0
    assert "worker-0" in table[1]
    [worker] = json.loads(numbers[1])["workers"]
    assert worker["load"]["output_tokens"] > 0
    assert worker["load"]["cached_tokens"] > 0
    assert forgot[0] == 1
    assert re.search(rf"^{manager}: 1 worker forgot [1-9]\d* blocks; the cache epoch is \d+ now.$", forgot[1], re.M)
    assert f"octavo: no cache manager answers at {NOBODY}; `octavo up` says where its own is" in forgot[1]
    assert stranger == (1, "octavo: worker nobody is not in the fleet of 1\n")
    assert unknown[0] == 1
    assert len(unknown[1].splitlines()) == 1
    assert "gpt-17" in unknown[1]


async def test_ctrl_c_twice_while_everything_starts_leaves_nothing(tmp_path: Path) -> None:
    async with octavo("up", "--workers", "2", "--port", "0", TMPDIR=str(tmp_path)) as up:
        await up.until(r"manager .*serving")
        pids = descendants(up.process.pid)
        up.press_ctrl_c()
        await up.until("stopping")
        up.press_ctrl_c()
        await up.ends()

    assert pids
    await all_gone(pids)
    assert left_in(tmp_path) == []


async def test_kill_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the parent: it cannot clean up, so the kernel does."""
    async with octavo("up", "--workers", "2", "--port", "0", TMPDIR=str(tmp_path)) as up:
        await up.until(r"gateway .*serving")
        pids = descendants(up.process.pid)
        up.process.kill()
        await up.process.wait()

        assert len(pids) == 5
        await all_gone(pids)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("option", ["--port", "--manager-port"])
async def test_a_port_that_is_taken_is_said_in_one_line(option: str) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        code, said = await run("up", "--port", "0", option, str(port))

    assert code == 1
    assert said.startswith(f"octavo: port {port} cannot be used")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
async def test_a_port_that_cannot_be_is_a_mistake_on_the_command_line(port: str) -> None:
    code, said = await run("up", "--port", port)

    assert code == 2
    assert "argument --port: " in said


@pytest.mark.parametrize("arguments", [("chat", "Hello?"), ("explain", "Hello?"), ("stats",)])
async def test_where_nobody_answers_one_line_says_so(arguments: tuple[str, ...]) -> None:
    code, said = await run(*arguments, "--address", NOBODY)

    assert code == 1
    assert said == f"octavo: nothing answers at {NOBODY}; `octavo up` starts it\n"


async def test_a_service_that_cannot_start_ends_everything_with_its_last_words() -> None:
    code, said = await run("up", "--workers", "1", "--port", "0", "--kv-memory", "lots")

    assert code == 1
    assert "octavo: worker-0 exited with 2 before it was ready\n    OCTAVO_KV_MEMORY=lots: " in said


async def test_a_model_that_does_not_exist_is_said_in_one_line() -> None:
    code, said = await run("up", "--model", "no such model")

    assert code == 1
    assert "no such model" in said
    assert len(said.splitlines()) == 1


async def test_the_demo_shows_what_was_saved_and_leaves_nothing() -> None:
    async with octavo("demo") as demo:
        await demo.until("The stack serves smollm2 at")
        pids = descendants(demo.process.pid)
        code = await demo.ends(DEMO_SECONDS)

    await all_gone(pids)
    said = "".join(demo.lines)
    assert code == 0, said
    assert re.search(r"Of [\d,]+ prompt tokens [\d,]+ \(\d\d%\) were remembered", said), said
    assert said.count("question") >= 4
