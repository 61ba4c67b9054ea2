"""What the gateway adds: CPU and time of a relayed token, and requests routed a second.

    python -m bench.gateway [--steps 250]

A real `python -m gateway` with a real Redis, before a worker without a model (bench/stand_in_worker.py) that makes a
token of every stream in steps of 20 ms. Needs `octavo model fetch` once, for the tokenizer.

- `relay_tok_s_core_64`, `_512`: tokens relayed, over the CPU seconds of the gateway's process;
  `relay_cpu_us_per_token_64`, `_512` is the same as microseconds a token.
- `relay_added_ms_p50`, `_p99`, with `_512` at the end for 512 streams: from a step to its token at the client, less the
  same for a client that reads the worker's stream itself.
- `routed_per_s`: requests for one token that 64 callers send one after another, over the gateway's CPU seconds; beside
  it how many there were in a second.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.control_plane import cpu_seconds, python_process, redis_process, running
from bench.stand_in_worker import MODEL, seconds_since
from deploy.process import LOOPBACK, Process
from octavo.records import Submission
from octavo.service import open_channel
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from octavo.v1 import worker_pb2 as worker_v1
from octavo.v1 import worker_pb2_grpc as worker_v1_grpc
from octavo.wire.serve import report_from_wire, submission_to_wire

STREAMS = (64, 512)
CALLERS = 64
CALLS = 20
"""One after another, of each."""
PROMPT_TOKENS = 256
WARM_UP_STEPS = 25


@dataclass(frozen=True, slots=True)
class Relayed:
    """What a run of streams showed."""

    tokens: int
    cpu_seconds: float
    late: list[float]
    """Seconds from each token's step to its client."""


async def relay(gateway: Process, streams: int, steps: int) -> Relayed:
    """Streams through the gateway."""
    async with open_channel(gateway.address) as channel:
        stub = gateway_v1_grpc.InferenceStub(channel)
        await asyncio.gather(*(_read(stub, number, WARM_UP_STEPS, []) for number in range(streams)))
        late: list[float] = []
        before = cpu_seconds(gateway.pid)
        read = await asyncio.gather(*(_read(stub, number, steps, late) for number in range(streams)))
        return Relayed(sum(read), cpu_seconds(gateway.pid) - before, late)


async def _read(stub: Any, number: int, steps: int, late: list[float]) -> int:
    tokens = 0
    async for reply in stub.Generate(_request(number, steps)):
        if reply.HasField("delta") and reply.delta.token_ids:
            now = time.monotonic()
            late.extend(seconds_since(token, now) for token in reply.delta.token_ids)
            tokens += len(reply.delta.token_ids)
    return tokens


def _request(number: int, max_tokens: int) -> gateway_v1.GenerateRequest:
    return gateway_v1.GenerateRequest(
        tokens=gateway_v1.TokenIds(ids=[10_000 + number] * PROMPT_TOKENS), max_tokens=max_tokens, ignore_eos=True
    )


async def direct(worker: Process, streams: int, steps: int) -> list[float]:
    """Seconds from each token's step to a client of the worker's own stream."""
    late: list[float] = []
    left = streams * steps
    async with open_channel(worker.address) as channel:
        stub = worker_v1_grpc.WorkerStub(channel)
        async for message in stub.Serve(_submissions(streams, steps)):
            now = time.monotonic()
            for run in report_from_wire(message).tokens:
                late.extend(seconds_since(token, now) for token in run.tokens)
                left -= len(run.tokens)
            if left == 0:
                return late
    raise AssertionError(f"the stream ended with {left} tokens to come")


async def _submissions(streams: int, steps: int) -> AsyncIterator[worker_v1.ServeRequest]:
    for number in range(streams):
        submission = Submission(request=number, prompt=(number,) * PROMPT_TOKENS, max_tokens=steps)
        yield worker_v1.ServeRequest(submit=submission_to_wire(submission))
    await asyncio.Event().wait()


async def route(gateway: Process) -> tuple[float, float]:
    """(CPU seconds of the gateway, seconds) of CALLERS x CALLS requests for one token."""
    async with open_channel(gateway.address) as channel:
        stub = gateway_v1_grpc.InferenceStub(channel)

        async def call_in_turn(caller: int) -> None:
            for _ in range(CALLS):
                await _read(stub, caller, 1, [])

        await call_in_turn(0)
        before, began = cpu_seconds(gateway.pid), time.monotonic()
        await asyncio.gather(*map(call_in_turn, range(CALLERS)))
        return cpu_seconds(gateway.pid) - before, time.monotonic() - began


def report(relayed: Relayed, at_worker: list[float], streams: int) -> Iterable[dict[str, object]]:
    """One object a figure of the relay."""
    end = "" if streams == STREAMS[0] else f"_{streams}"
    run = {"streams": streams, "tokens": relayed.tokens}
    yield _line(f"relay_tok_s_core_{streams}", relayed.tokens / relayed.cpu_seconds, "tokens/s", **run)
    yield _line(f"relay_cpu_us_per_token_{streams}", 1e6 * relayed.cpu_seconds / relayed.tokens, "us", **run)
    for share, at in (("p50", 49), ("p99", 98)):
        through, straight = (1e3 * statistics.quantiles(late, n=100)[at] for late in (relayed.late, at_worker))
        yield _line(f"relay_added_ms_{share}{end}", through - straight, "ms", **run, direct_ms=round(straight, 2))


def _line(name: str, value: float, unit: str, **more: object) -> dict[str, object]:
    return {"name": name, "value": round(value, 2), "unit": unit, **more}


async def bench(steps: int, counts: Sequence[int]) -> None:
    """Measure and print."""
    async with (
        running(redis_process()) as redis,
        running(python_process("worker", "-m", "bench.stand_in_worker")) as worker,
    ):
        settings = {
            "OCTAVO_LISTEN": f"{LOOPBACK}:0",
            "OCTAVO_CACHE_MANAGER": worker.address,
            "OCTAVO_REDIS_URL": f"redis://{redis.address}/0",
            "OCTAVO_MODEL": MODEL,
            "OCTAVO_MAX_RUNNING_REQUESTS": "1024",
        }
        async with running(python_process("gateway", "-m", "gateway", **settings)) as gateway:
            await gateway.or_fail(until_served(gateway))
            for streams in counts:
                at_worker = await direct(worker, streams, steps)
                for line in report(await relay(gateway, streams, steps), at_worker, streams):
                    print(json.dumps(line), flush=True)
            cpu, wall = await route(gateway)
            requests = CALLERS * CALLS
            line = _line("routed_per_s", requests / cpu, "requests/s", of_a_core=True, at_once=round(requests / wall))
            print(json.dumps(line), flush=True)


async def until_served(gateway: Process) -> None:
    """Return when the gateway has heard of the worker."""
    async with open_channel(gateway.address) as channel:
        stub = gateway_v1_grpc.InferenceStub(channel)
        while not (await stub.ListModels(gateway_v1.ListModelsRequest(), wait_for_ready=True)).models:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="tokens of a stream")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="at once")
    given = parser.parse_args()
    uvloop.run(bench(given.steps, given.streams))


if __name__ == "__main__":
    main()
