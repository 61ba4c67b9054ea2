"""What the control plane costs: one exchange's round trip, and the cache manager's CPU at 8 and 32 workers x 64.

    python -m bench.control_plane [--steps 250] [--compiled]

The workers say what a worker of ours says (worker/core/tables.py): of each sequence, once a block, the tokens of the
block that has become full, and that it needs the next one. So with 64 sequences, which fill their blocks at different
times, nearly every step has an exchange, about four sequences in each; a sequence alone has one every sixteen steps.

Both against a real `python -m cache_manager` with a real Redis, and against a null server: the same stream, the same
messages, an empty reply. Times move with the machine; the ratio to the null server, which costs what gRPC costs, moves
less. With `--compiled` the manager's books are compiled first, as in what is shipped (ADR 38). One JSON object a line.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from deploy.compiled_core import compile_core
from deploy.process import LOOPBACK, Process, log_event, running
from deploy.redis_binary import redis_command
from octavo.ids import Epoch, Incarnation, SequenceId, WorkerId
from octavo.records.attend import Attach, Commit, Exchange, Registration, Reservation
from octavo.records.fleet import PoolSpec, WorkerLoad
from octavo.service import SERVER_OPTIONS, open_channel
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from octavo.wire.attend import exchange_to_wire, registration_to_wire

FLEETS = (8, 32)
"""Workers that decode at the same time."""

SEQUENCES = 64
"""Of each worker."""

STEP_SECONDS = 0.02
PROMPT_TOKENS = 256
WARM_UP_STEPS = 25
"""Not measured."""

QUIET_STEPS = 2000
"""Of one worker alone, back to back."""

QUIET_SEQUENCES = (1, 8, SEQUENCES)

POOL = PoolSpec(
    model="bench",
    model_digest=bytes(32),
    tokenizer_digest=bytes(32),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=16,
    num_blocks=16384,
    max_model_tokens=8192,
    vocab_size=49152,
)


class Decoder:
    """A worker that decodes. Its sequences fill their blocks at different times, as those of strangers do."""

    def __init__(self, channel: grpc.aio.Channel, number: int, sequences: int) -> None:
        self._call: Any = v1_grpc.CacheManagerStub(channel).Attend()
        self._name = WorkerId(f"worker-{number}")
        dice = random.Random(number)
        self._prompts = {
            SequenceId(1 + sequence): PROMPT_TOKENS + dice.randrange(POOL.block_size) for sequence in range(sequences)
        }
        """Their lengths."""
        self._steps = 0
        self._epoch = Epoch(0)
        self._exchanges = 0

    async def join(self) -> None:
        """Register and compute every sequence's prompt; no two prompts are alike."""
        registration = Registration(worker_id=self._name, incarnation=Incarnation(1), address="127.0.0.1:1", pool=POOL)
        reply = await self._say(v1.AttendRequest(register=registration_to_wire(registration)))
        self._epoch = Epoch(reply.registered.epoch)
        prompts = {sequence: (sequence,) * length for sequence, length in self._prompts.items()}
        await self._exchange(
            attaches=tuple(Attach(sequence, prompt) for sequence, prompt in prompts.items()),
            reserves=tuple(Reservation(sequence, len(prompt)) for sequence, prompt in prompts.items()),
        )
        await self._exchange(
            commits=tuple(Commit(sequence, prompt) for sequence, prompt in prompts.items()),
            reserves=tuple(Reservation(sequence, 1) for sequence in prompts),
        )

    async def decode(self) -> float | None:
        """One step. Returns the round trip of its exchange in seconds, serialising included; None if it needs none."""
        self._steps += 1
        full = [s for s, prompt in self._prompts.items() if (prompt + self._steps) % POOL.block_size == 0]
        if not full:
            return None
        tokens = (self._steps % POOL.vocab_size,) * min(self._steps, POOL.block_size)
        started = time.perf_counter()
        await self._exchange(
            commits=tuple(Commit(sequence, tokens) for sequence in full),
            reserves=tuple(Reservation(sequence, 1) for sequence in full),
            load=WorkerLoad(running_sequences=len(self._prompts), output_tokens=self._steps * len(self._prompts)),
        )
        return time.perf_counter() - started

    def leave(self) -> None:
        """Drop the stream."""
        self._call.cancel()

    async def _exchange(self, **parts: Any) -> None:
        self._exchanges += 1
        exchange = Exchange(epoch=self._epoch, step=self._exchanges, **parts)
        await self._say(v1.AttendRequest(exchange=exchange_to_wire(exchange)))

    async def _say(self, message: v1.AttendRequest) -> v1.AttendReply:
        await self._call.write(message)
        return await self._call.read()


Decode = Callable[[], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class Busy:
    """What one server did for a fleet."""

    seconds: list[float]
    """Round trips."""
    cpu_seconds: float
    """Of the server's process, meanwhile."""


@dataclass(slots=True)
class Figures:
    """What one server did."""

    quiet_seconds: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Sequences -> round trips of one worker alone."""
    busy: dict[int, Busy] = field(default_factory=dict[int, Busy])
    """By the number of workers."""


async def measure(server: Process, steps: int) -> Figures:
    """All measurements against one server."""
    figures = Figures()
    async with open_channel(server.address) as channel:
        for sequences in QUIET_SEQUENCES:
            worker = Decoder(channel, 0, sequences)
            await worker.join()
            await _repeat(worker.decode, WARM_UP_STEPS)
            figures.quiet_seconds[sequences] = await _repeat(worker.decode, QUIET_STEPS)
            worker.leave()
        for fleet in FLEETS:
            figures.busy[fleet] = await _measure_fleet(channel, server.pid, fleet, steps)
    return figures


async def _measure_fleet(channel: grpc.aio.Channel, pid: int, fleet: int, steps: int) -> Busy:
    workers = [Decoder(channel, number, SEQUENCES) for number in range(fleet)]
    for worker in workers:
        await worker.join()
    await _together(workers, WARM_UP_STEPS)
    before = cpu_seconds(pid)
    runs = await _together(workers, steps)
    used = cpu_seconds(pid) - before
    for worker in workers:
        worker.leave()
    return Busy([seconds for run in runs for seconds in run], used)


async def _repeat(decode: Decode, steps: int) -> list[float]:
    taken = [await decode() for _ in range(steps)]
    return [seconds for seconds in taken if seconds is not None]


async def _together(workers: Sequence[Decoder], steps: int) -> list[list[float]]:
    """All workers at once, their steps spread over the time of a step as those of strangers would be."""
    apart = STEP_SECONDS / len(workers)
    return await asyncio.gather(*(_paced(worker.decode, steps, at * apart) for at, worker in enumerate(workers)))


async def _paced(decode: Decode, steps: int, after: float) -> list[float]:
    """One step every 20 ms; a late one is not made up for."""
    now = asyncio.get_running_loop().time
    taken: list[float] = []
    await asyncio.sleep(after)
    for _ in range(steps):
        due = now() + STEP_SECONDS
        if (seconds := await decode()) is not None:
            taken.append(seconds)
        await asyncio.sleep(max(0.0, due - now()))
    return taken


def cpu_seconds(pid: int) -> float:
    """CPU that a process has used, all its threads, user and system."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


# ---- servers --------------------------------------------------------------------------------------------------


class NullServicer(v1_grpc.CacheManagerServicer):
    """Reads each message and answers it with an empty one."""

    async def Attend(  # noqa: N802  # the schema's name
        self, request_iterator: AsyncIterator[v1.AttendRequest], context: Any
    ) -> AsyncGenerator[v1.AttendReply]:
        """One empty reply a message."""
        async for _ in request_iterator:
            yield v1.AttendReply()

    def WatchFleet(self, request: v1.WatchFleetRequest, context: Any) -> Any:  # noqa: N802
        """Nobody asks."""
        raise NotImplementedError

    def Audit(self, request: v1.AuditRequest, context: Any) -> Any:  # noqa: N802
        """Nobody asks."""
        raise NotImplementedError

    def ResetPrefixCache(self, request: v1.ResetPrefixCacheRequest, context: Any) -> Any:  # noqa: N802
        """Nobody asks."""
        raise NotImplementedError

    def DescribeSequence(self, request: v1.DescribeSequenceRequest, context: Any) -> Any:  # noqa: N802
        """Nobody asks."""
        raise NotImplementedError

    def ExplainPrompt(self, request: v1.ExplainPromptRequest, context: Any) -> Any:  # noqa: N802
        """Nobody asks."""
        raise NotImplementedError


async def serve_null() -> None:
    """The null server, until it is killed."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    v1_grpc.add_CacheManagerServicer_to_server(NullServicer(), server)
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    await server.start()
    print(json.dumps({"event": "serving", "port": port}), flush=True)
    await server.wait_for_termination()


def _announced_port(line: str) -> int | None:
    event = log_event(line)
    return event["port"] if event is not None and event.get("event") == "serving" else None


def redis_process() -> Process:
    """A redis-server on a free port; start it with `running`."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
    ready = "Ready to accept connections"
    return Process("redis", redis_command, served_port=lambda line: port if ready in line else None, port=port)


def python_process(name: str, *arguments: str, **env: str) -> Process:
    """A service of ours; start it with `running`."""
    command = [sys.executable, *arguments]
    return Process(name, lambda _: command, env={**os.environ, **env}, served_port=_announced_port)


# ---- the report -----------------------------------------------------------------------------------------------


def report(manager: Figures, null: Figures, steps: int) -> Iterable[dict[str, object]]:
    """One object a figure."""
    for sequences in manager.quiet_seconds:
        taken = manager.quiet_seconds[sequences]
        own, least = _median_us(taken), _median_us(null.quiet_seconds[sequences])
        name = "exchange_p50_us" if sequences == SEQUENCES else f"exchange_p50_us_{sequences}_sequence"
        yield _line(name, own, "us", sequences=sequences, null_server_us=round(least), ratio=round(own / least, 2))
        yield _line(
            f"exchanges_per_100_steps_{sequences}",
            100 * len(taken) / QUIET_STEPS,
            "exchanges",
            block_size=POOL.block_size,
        )
    for fleet in manager.busy:
        yield from _report_fleet(manager.busy[fleet], null.busy[fleet], fleet, steps)


def _report_fleet(manager: Busy, null: Busy, fleet: int, steps: int) -> Iterable[dict[str, object]]:
    run = {"workers": fleet, "sequences": SEQUENCES, "step_ms": 1000 * STEP_SECONDS, "steps": steps}
    own, least = (1e6 * busy.cpu_seconds / len(busy.seconds) for busy in (manager, null))
    name = f"manager_cpu_us_per_exchange_{fleet}x{SEQUENCES}"
    yield _line(name, own, "us", **run, null_server_us=round(least), ratio=round(own / least, 2))
    for share, figure in (("p50", 0.5), ("p99", 0.99)):
        value, at_null = (1e6 * _quantile(busy.seconds, figure) for busy in (manager, null))
        yield _line(f"exchange_{share}_us_{fleet}x{SEQUENCES}", value, "us", **run, null_server_us=round(at_null))


def _line(name: str, value: float, unit: str, **more: object) -> dict[str, object]:
    return {"name": name, "value": round(value), "unit": unit, **more}


def _median_us(seconds: Sequence[float]) -> float:
    return 1e6 * statistics.median(seconds)


def _quantile(seconds: Sequence[float], share: float) -> float:
    return sorted(seconds)[int(share * (len(seconds) - 1))]


@contextlib.contextmanager
def python_path(*, compiled: bool) -> Generator[str]:
    """Where the manager is imported from. Raises RuntimeError where its books cannot be compiled."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        if compiled:
            compile_core(root, Path(folder))
        yield os.pathsep.join((folder, str(root)))


async def measure_both(steps: int, path: str) -> tuple[Figures, Figures]:
    """A manager imported from `path`, and the null server after it."""
    async with running(redis_process()) as redis:
        settings = {"OCTAVO_REDIS_URL": f"redis://{redis.address}/0", "PYTHONPATH": path}
        async with running(python_process("manager", "-P", "-m", "cache_manager", **settings)) as server:
            manager = await measure(server, steps)
    async with running(python_process("null", "-m", "bench.control_plane", "--null-server")) as server:
        null = await measure(server, steps)
    return manager, null


def main() -> None:
    """Run the bench, or be its null server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="of 20 ms, measured with each fleet (default: 250)")
    parser.add_argument("--null-server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help="measure a manager whose books are compiled")
    arguments = parser.parse_args()
    if arguments.null_server:
        uvloop.run(serve_null())
        return
    with python_path(compiled=arguments.compiled) as path:
        manager, null = uvloop.run(measure_both(arguments.steps, path))
    for line in report(manager, null, arguments.steps):
        print(json.dumps({**line, "compiled": arguments.compiled}))


if __name__ == "__main__":
    main()
