"""What the gateway adds: CPU and time of a relayed token, and requests routed a second.

    python -m bench.gateway [--steps 250]

A real `python -m gateway` with a real Redis, before a worker without a model (bench/stand_in_worker.py) that makes a
token of every stream in steps of 20 ms. Needs `octavo model fetch` once, for the tokenizer.

- `relay_tok_s_core_64`, `_512`: tokens relayed over gRPC, each as it comes, over the CPU seconds of the gateway's
  process, less what beginning and ending the streams costs; `relay_cpu_us_per_token_64`, `_512` is the same as
  microseconds a token. 512 streams ask for more than a core can relay one by one: `asked_tok_s` beside it says for how
  much, `told_tok_s` what came (over gRPC this client, which costs more than the gateway, is what lags), `a_message` how
  many tokens one had.
- `null_us`, `times_null` beside those that come one by one: what gRPC alone costs here, by bench/null_relay.py, which
  writes a finished message for each token and does nothing else; and how many times as much the gateway costs.
- `relay_full_tok_s_core_64`, `relay_full_cpu_us_per_token_64`, with `_512`: what a core carries that is asked for more
  than it can relay one by one, with a `stream_interval` of 1: steps of 1 ms, so 64,000 and 512,000 tokens a second.
  `busy` is how many cores the gateway had meanwhile.
- `relay_added_ms_p50`, `_p99`, with `_512` at the end for 512 streams: from a step to its token at the client, less the
  same for a client that reads the worker's stream itself.
- All of these with `_by_4`, `_by_8` at the end: the same with a `stream_interval` of so many. Of four tokens three wait
  for the last one.
- `relay_http_tok_s_core_64`, `relay_http_cpu_us_per_token_64`, with `_512`, `_by_4` and `_by_8`: the same over HTTP, as
  server-sent events on a connection a stream.
- `routed_per_s`: requests for one token that 64 callers send one after another, over the gateway's CPU seconds; beside
  it how many there were in a second.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.control_plane import cpu_seconds, python_process, redis_process
from bench.stand_in_worker import MODEL, STEP_SECONDS, seconds_since
from deploy.process import LOOPBACK, Process, running
from octavo.records.serve import Submission
from octavo.service import open_channel
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from octavo.v1 import worker_pb2 as worker_v1
from octavo.v1 import worker_pb2_grpc as worker_v1_grpc
from octavo.wire.serve import report_from_wire, submission_to_wire

STREAMS = (64, 512)
INTERVALS = (1, 4, 8)
CALLERS = 64
CALLS = 20
"""One after another, of each."""
PROMPT_TOKENS = 256
WARM_UP_STEPS = 25
FULL_STEP_SECONDS = 0.001
FULL_STEPS = 10
"""Times as many steps of it, which end as soon as the gateway is through."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at once."""

    streams: int
    interval: int
    """Tokens told together."""
    steps: int

    @property
    def name(self) -> str:
        """At the end of a figure's name."""
        return f"_{self.streams}" if self.interval == 1 else f"_{self.streams}_by_{self.interval}"


@dataclass(slots=True)
class Heard:
    """What the clients of a run heard."""

    tokens: int = 0
    messages: int = 0
    """That had tokens."""
    late: list[float] = field(default_factory=list[float])
    """Seconds from each token's step to its client."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a run of streams, less that of a short one: what is left is relaying."""

    tokens: int
    seconds: float
    cpu_seconds: float
    """Of the gateway's process."""

    @property
    def us_per_token(self) -> float:
        """CPU, in microseconds."""
        return 1e6 * self.cpu_seconds / self.tokens


async def cost_of(gateway: Process, load: Load, read_all: Callable[[int], Awaitable[None]]) -> Cost:
    """Measure `read_all`, which reads all streams of a load to their end, so many tokens of each."""

    async def measured(steps: int) -> tuple[float, float]:
        cpu, began = cpu_seconds(gateway.pid), time.monotonic()
        await read_all(steps)
        return cpu_seconds(gateway.pid) - cpu, time.monotonic() - began

    await read_all(WARM_UP_STEPS)
    short_cpu, short = await measured(WARM_UP_STEPS)
    long_cpu, long = await measured(WARM_UP_STEPS + load.steps)
    return Cost(load.streams * load.steps, long - short, long_cpu - short_cpu)


async def relay(gateway: Process, load: Load) -> tuple[Cost, Heard]:
    """Streams through the gateway, over gRPC; what is heard is that of the longest run."""
    heard = Heard()
    async with open_channel(gateway.address) as channel:
        stub = gateway_v1_grpc.InferenceStub(channel)

        async def read_all(steps: int) -> None:
            nonlocal heard
            heard = Heard()
            await asyncio.gather(*(_read(stub, at, steps, load.interval, heard) for at in range(load.streams)))

        return await cost_of(gateway, load, read_all), heard


async def _read(stub: Any, number: int, steps: int, interval: int, heard: Heard) -> None:
    async for reply in stub.Generate(_request(number, steps, interval)):
        if reply.HasField("delta") and reply.delta.token_ids:
            now = time.monotonic()
            heard.late.extend(seconds_since(token, now) for token in reply.delta.token_ids)
            heard.tokens += len(reply.delta.token_ids)
            heard.messages += 1


def _request(number: int, max_tokens: int, interval: int) -> gateway_v1.GenerateRequest:
    return gateway_v1.GenerateRequest(
        tokens=gateway_v1.TokenIds(ids=[10_000 + number] * PROMPT_TOKENS),
        max_tokens=max_tokens,
        ignore_eos=True,
        stream_interval=interval,
    )


async def relay_unread(relay: Process, load: Load) -> tuple[Cost, Heard]:
    """Streams through a relay over gRPC whose messages are counted and not looked at: this client shall cost little."""
    heard = Heard()
    async with open_channel(relay.address) as channel:
        generate = channel.unary_stream(_GENERATE, request_serializer=gateway_v1.GenerateRequest.SerializeToString)

        async def read_one(number: int, steps: int) -> None:
            async for _ in generate(_request(number, steps, load.interval)):
                heard.messages += 1

        async def read_all(steps: int) -> None:
            nonlocal heard
            heard = Heard(tokens=load.streams * steps)
            await asyncio.gather(*(read_one(at, steps) for at in range(load.streams)))

        return await cost_of(relay, load, read_all), heard


_GENERATE = f"/{gateway_v1.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"


async def relay_http(gateway: Process, load: Load) -> tuple[Cost, Heard]:
    """Streams through the gateway, over HTTP. A token's time is not looked at: this client shall cost little."""
    [served] = gateway.events("http_served")
    heard = Heard()

    async def read_all(steps: int) -> None:
        nonlocal heard
        heard = Heard(tokens=load.streams * steps)
        reading = (_read_http(served["port"], at, steps, load.interval, heard) for at in range(load.streams))
        await asyncio.gather(*reading)

    return await cost_of(gateway, load, read_all), heard


async def _read_http(port: int, number: int, steps: int, interval: int, heard: Heard) -> None:
    asked: dict[str, object] = {"prompt": [10_000 + number] * PROMPT_TOKENS, "max_tokens": steps}
    body = json.dumps(asked | {"ignore_eos": True, "stream": True, "stream_interval": interval}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {LOOPBACK}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    end = b""
    while piece := await reader.read(1 << 16):
        end = (end + piece)[-64:]
        heard.messages += piece.count(b"data: {")
    writer.close()
    if b"[DONE]" not in end:
        raise AssertionError(f"the stream ended with {end!r}")


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
                await _read(stub, caller, 1, 1, Heard())

        await call_in_turn(0)
        before, began = cpu_seconds(gateway.pid), time.monotonic()
        await asyncio.gather(*map(call_in_turn, range(CALLERS)))
        return cpu_seconds(gateway.pid) - before, time.monotonic() - began


def report(cost: Cost, heard: Heard, at_worker: list[float], load: Load, **more: float) -> Iterable[dict[str, object]]:
    """One object a figure of the relay over gRPC."""
    end = load.name.removeprefix(f"_{STREAMS[0]}")
    yield from costs("relay", cost, heard, load, **more)
    for share, at in (("p50", 49), ("p99", 98)):
        through, straight = (1e3 * statistics.quantiles(late, n=100)[at] for late in (heard.late, at_worker))
        yield _line(f"relay_added_ms_{share}{end}", through - straight, "ms", direct_ms=round(straight, 2))


def costs(
    name: str, cost: Cost, heard: Heard, load: Load, step_seconds: float = STEP_SECONDS, **more: float
) -> Iterable[dict[str, object]]:
    """What relaying costs, in two units."""
    more = {
        "asked_tok_s": round(load.streams / step_seconds),
        "told_tok_s": round(cost.tokens / cost.seconds),
        "a_message": round(heard.tokens / heard.messages, 2),
        **more,
    }
    yield _line(f"{name}_tok_s_core{load.name}", cost.tokens / cost.cpu_seconds, "tokens/s", **more)
    yield _line(f"{name}_cpu_us_per_token{load.name}", cost.us_per_token, "us", **more)


def _line(name: str, value: float, unit: str, **more: object) -> dict[str, object]:
    return {"name": name, "value": round(value, 2), "unit": unit, **more}


async def measure(
    worker: Process, gateway: Process, null: Process, steps: int, counts: Sequence[int]
) -> AsyncIterator[dict[str, object]]:
    """One object a figure."""
    for streams in counts:
        at_worker = await direct(worker, streams, steps)
        for interval in INTERVALS:
            load = Load(streams, interval, steps)
            cost, heard = await relay(gateway, load)
            beside = await beside_null(null, load, cost) if interval == 1 else {}
            for line in report(cost, heard, at_worker, load, **beside):
                yield line
            cost, heard = await relay_http(gateway, load)
            for line in costs("relay_http", cost, heard, load):
                yield line
    cpu, wall = await route(gateway)
    requests = CALLERS * CALLS
    yield _line("routed_per_s", requests / cpu, "requests/s", of_a_core=True, at_once=round(requests / wall))


async def beside_null(null: Process, load: Load, cost: Cost) -> dict[str, float]:
    """What the same costs that does nothing but write messages."""
    bare, _ = await relay_unread(null, load)
    return {"null_us": round(bare.us_per_token, 2), "times_null": round(cost.us_per_token / bare.us_per_token, 2)}


async def measure_full(gateway: Process, steps: int, counts: Sequence[int]) -> AsyncIterator[dict[str, object]]:
    """One object a figure of a gateway that is asked for more than it can do."""
    for streams in counts:
        load = Load(streams, 1, FULL_STEPS * steps)
        cost, heard = await relay_unread(gateway, load)
        busy = round(cost.cpu_seconds / cost.seconds, 2)
        for line in costs("relay_full", cost, heard, load, FULL_STEP_SECONDS, busy=busy):
            yield line


async def bench(steps: int, counts: Sequence[int]) -> None:
    """Measure and print."""
    async with (
        gateway_before(STEP_SECONDS) as (worker, gateway),
        running(python_process("null relay", "-m", "bench.null_relay", worker.address)) as null,
    ):
        async for line in measure(worker, gateway, null, steps, counts):
            print(json.dumps(line), flush=True)
    async with gateway_before(FULL_STEP_SECONDS) as (_, gateway):
        async for line in measure_full(gateway, steps, counts):
            print(json.dumps(line), flush=True)


@asynccontextmanager
async def gateway_before(step_seconds: float) -> AsyncGenerator[tuple[Process, Process]]:
    """A worker without a model, with steps of that length, and a gateway that has heard of it."""
    async with (
        running(redis_process()) as redis,
        running(python_process("worker", "-m", "bench.stand_in_worker", str(step_seconds))) as worker,
    ):
        settings = {
            "OCTAVO_LISTEN": f"{LOOPBACK}:0",
            "OCTAVO_HTTP_LISTEN": f"{LOOPBACK}:0",
            "OCTAVO_CACHE_MANAGER": worker.address,
            "OCTAVO_REDIS_URL": f"redis://{redis.address}/0",
            "OCTAVO_MODEL": MODEL,
            "OCTAVO_MAX_RUNNING_REQUESTS": "1024",
        }
        async with running(python_process("gateway", "-m", "gateway", **settings)) as gateway:
            await gateway.or_fail(until_served(gateway))
            yield worker, gateway


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
