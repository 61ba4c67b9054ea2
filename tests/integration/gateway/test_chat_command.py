"""`octavo chat` and Ctrl-C: what it stops."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.records.serve import StepReport, Tokens
from tests.support.fake_fleet import FakeFleet, FakeWorker, fake_fleet
from tests.support.gateway_service import gateway, words_pool

QUESTION = "An octavo is a book"


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    """One worker, which says nothing by itself."""
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        running.workers[0].gate.clear()
        yield running


@asynccontextmanager
async def chat(fleet: FakeFleet, folder: Path, *arguments: str) -> AsyncGenerator[Process]:
    """The command, at a gateway of its own."""
    async with gateway(fleet, folder) as front:
        command = [sys.executable, "-m", "octavo", "chat", "--address", front.address, *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def interrupt_an_answer(process: Process, worker: FakeWorker) -> None:
    """Ctrl-C when its first words are there; return when the worker has heard that nobody wants the rest."""
    assert process.stdout is not None
    await worker.until(lambda worker: bool(worker.submissions))
    worker.say(StepReport(tokens=(Tokens(worker.submissions[0].request, 0, (5, 6, 7, 5)),)))
    assert await process.stdout.readexactly(1)
    process.send_signal(signal.SIGINT)
    await worker.until(lambda worker: worker.cancelled == [worker.submissions[0].request])


async def test_ctrl_c_stops_one_answer_and_with_it_the_command(fleet: FakeFleet, tmp_path: Path) -> None:
    async with chat(fleet, tmp_path, QUESTION) as process:
        await interrupt_an_answer(process, fleet.workers[0])
        assert await process.wait() == 130


async def test_ctrl_c_stops_an_answer_of_a_conversation_which_goes_on(fleet: FakeFleet, tmp_path: Path) -> None:
    [worker] = fleet.workers
    async with chat(fleet, tmp_path, "--max-tokens", "4") as process:
        assert process.stdin is not None
        process.stdin.write(f"{QUESTION}\n".encode())
        await interrupt_an_answer(process, worker)
        worker.gate.set()
        said, _ = await process.communicate(f"{QUESTION}\n".encode())

    assert process.returncode == 0
    assert " …\n" in said.decode()
    assert [submission.max_tokens for submission in worker.submissions] == [4, 4]
    assert len(worker.cancelled) == 1
