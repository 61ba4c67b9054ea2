"""A cluster that serves SmolLM2 in float32, asked the way any client asks, and its books."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import torch
from tokenizers import Tokenizer

from deploy.local import Cluster
from octavo.commands.model import fetch_model, models_dir
from octavo.service import open_channel
from octavo.v1 import cache_manager_pb2, cache_manager_pb2_grpc, gateway_pb2, gateway_pb2_grpc, worker_pb2
from tests.support.oracle import solo_greedy

BLOCK = 16
BLOCK_BYTES = 2 * 30 * 3 * BLOCK * 64 * 4
"""Of SmolLM2 in float32: keys and values, layers, heads, positions, head size, bytes."""
SETTLE_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


@dataclass
class Answer:
    """Everything that came back for one request, joined by sample."""

    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    usage: gateway_pb2.Usage = field(default_factory=gateway_pb2.Usage)
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    logprobs: list[gateway_pb2.TokenLogprobs] = field(default_factory=list)
    """Of the first sample's tokens."""
    prompt_logprobs: list[gateway_pb2.TokenLogprobs] = field(default_factory=list)
    cumulative: dict[int, float] = field(default_factory=dict)

    def take(self, reply: gateway_pb2.GenerateReply) -> None:
        match reply.WhichOneof("kind"):
            case "started":
                self.started = reply.started
            case "delta":
                self.tokens[reply.delta.sample] += reply.delta.token_ids
                self.texts[reply.delta.sample] += reply.delta.text
                self.logprobs += reply.delta.logprobs if reply.delta.sample == 0 else ()
            case "prompt_logprobs":
                self.prompt_logprobs += reply.prompt_logprobs.tokens
            case "finished":
                self.reasons[reply.finished.sample] = reply.finished.reason
                if reply.finished.HasField("cumulative_logprob"):
                    self.cumulative[reply.finished.sample] = reply.finished.cumulative_logprob
            case "usage":
                self.usage = reply.usage


class Client:
    """The public API of a running cluster."""

    def __init__(self, cluster: Cluster, gateway: grpc.aio.Channel, managers: Sequence[grpc.aio.Channel]) -> None:
        self.cluster = cluster
        self.channel = gateway
        self.gateway = gateway_pb2_grpc.InferenceStub(gateway)
        self.managers = list(map(cache_manager_pb2_grpc.CacheManagerStub, managers))
        self.manager = self.managers[0]

    async def ask(self, prompt: str | Sequence[int] | None, **fields: Any) -> Answer:
        """The whole answer to a request of token ids or text; `fields` are those of GenerateRequest."""
        request = request_of(prompt, **fields)
        answer = Answer()
        samples = max(1, request.n)
        answer.tokens, answer.texts = [[] for _ in range(samples)], [""] * samples
        answer.reasons = [worker_pb2.FINISH_REASON_UNSPECIFIED] * samples
        async for reply in self.gateway.Generate(request, timeout=120):
            answer.take(reply)
        assert answer.usage.prompt_tokens > 0, "the stream ended without usage"
        return answer

    async def ask_together(self, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Answer]:
        """All requests at once."""
        return await asyncio.gather(*(self.ask(prompt, **fields) for prompt in prompts))

    async def fleet(self) -> gateway_pb2.GetFleetReply:
        return await self.gateway.GetFleet(gateway_pb2.GetFleetRequest(), timeout=10)

    async def preemptions(self) -> int:
        return sum(worker.load.preemptions for worker in (await self.fleet()).workers)

    async def audits(self) -> list[cache_manager_pb2.AuditReply]:
        """The books of every worker, recomputed."""
        running = [process.env["OCTAVO_WORKER_ID"] for process in self.cluster.workers if process.running]
        return [await self._audit(worker) for worker in running]

    async def _audit(self, worker: str) -> cache_manager_pb2.AuditReply:
        """By the manager that it attends; fails where it attends none."""
        request, failure = cache_manager_pb2.AuditRequest(worker_id=worker), None
        for manager, process in zip(self.managers, self.cluster.managers, strict=True):
            if process.running:
                try:
                    return await manager.Audit(request, timeout=10, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    failure = error
        raise AssertionError(f"nobody knows worker {worker}") from failure

    async def at_rest(self) -> "Books":
        """The books once nothing runs any more; fails if something still does after a while.

        The last frees of a worker travel in its next exchange, a little after the client has its last token.
        """
        async with asyncio.timeout(SETTLE_SECONDS):
            while (books := await self._books()).busy:  # noqa: ASYNC110  the event is in another process
                await asyncio.sleep(0.05)
        assert not books.violations, books
        assert books.free_or_cached == books.num_blocks, books
        return books

    async def _books(self) -> "Books":
        audits, fleet = await self.audits(), await self.fleet()
        loads = [worker.load for worker in fleet.workers]
        return Books(
            busy=sum(audit.sequences + audit.held_blocks for audit in audits)
            + sum(load.running_sequences + load.waiting_sequences + load.queued_prefill_tokens for load in loads)
            + fleet.gateway.running_requests
            + fleet.gateway.waiting_requests,
            violations=[audit.violation for audit in audits if audit.violation],
            num_blocks=sum(audit.num_blocks for audit in audits),
            free_or_cached=sum(audit.free_blocks + audit.cached_blocks for audit in audits),
            cached=sum(audit.cached_blocks for audit in audits),
            prompt_tokens=sum(load.prompt_tokens for load in loads),
        )


@dataclass(frozen=True, kw_only=True)
class Books:
    """Sums over the fleet."""

    busy: int
    """Everything that is held or runs, in any unit: 0 at rest."""
    violations: list[str]
    num_blocks: int
    free_or_cached: int
    cached: int
    prompt_tokens: int


def request_of(prompt: str | Sequence[int] | None, **fields: Any) -> gateway_pb2.GenerateRequest:
    """Token ids or text; outputs run to `max_tokens` unless `ignore_eos=False`."""
    request = gateway_pb2.GenerateRequest(**({"ignore_eos": True} | fields))
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.tokens.ids.extend(prompt)
    return request


@asynccontextmanager
async def smollm2(workers: int = 2, managers: int = 1, **env: str) -> AsyncIterator[Client]:
    """A running cluster of one-threaded workers and a client of it; everything is stopped in the end.

    Args:
        workers: how many.
        managers: how many cache managers.
        env: settings without their prefix, `KV_MEMORY="8MiB"`.
    """
    fetch_model("smollm2")
    settings = {"MODEL": "smollm2", "DTYPE": "float32", "DEVICE": "cpu", "THREADS": "1", "KV_MEMORY": "256MiB"}
    settings |= {"AUDIT": "true", "LOOKUP_SECONDS": "1", **env}  # a busy machine is no reason to miss a prefix
    async with AsyncExitStack() as stack:
        cluster = Cluster(
            workers=workers,
            managers=managers,
            env={f"OCTAVO_{name}": value for name, value in settings.items()},
            grace_seconds=2,
        )
        await stack.enter_async_context(cluster)
        gateway = await stack.enter_async_context(open_channel(cluster.address))
        channels = [await stack.enter_async_context(open_channel(each.address)) for each in cluster.managers]
        yield Client(cluster, gateway, channels)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What plain transformers says after `prompt`."""
    return list(_greedy(tuple(prompt), count))


@cache
def _greedy(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    torch.set_num_threads(1)  # more would fight with the workers for the cores, and lose time
    return tuple(solo_greedy(models_dir() / "smollm2", prompt, count))


def prose(start: int, count: int) -> list[int]:
    """`count` tokens of an English text, from token `start` on."""
    tokens = _text()[start : start + count]
    assert len(tokens) == count, f"the text has {len(_text())} tokens"
    return tokens


@cache
def _text() -> list[int]:
    pages = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("deploy/tutor.md", "LICENSE"))
    return tokenizer().encode(pages).ids


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(models_dir() / "smollm2" / "tokenizer.json"))
