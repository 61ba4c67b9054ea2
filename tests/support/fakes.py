"""Stand-ins for the engine's neighbours: a cache manager in this process, and a model that is a function.

The model's pool holds token ids where a real one holds keys and values. It reads the whole sequence back through the
block table before it speaks, so a wrong table, a missed copy or a block that was given away too early changes its text.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from zlib import crc32

from cache_manager.core.ledger import Ledger
from cache_manager.core.restoration import Restoration
from octavo.errors import StaleEpoch
from octavo.hashing import token_bytes
from octavo.ids import Epoch
from octavo.records.attend import Exchange, Grant, Inventory, Registered, Registration
from octavo.records.fleet import PoolSpec
from octavo.records.sampling import SamplingParams
from octavo.records.serve import TokenLogprobs
from worker.core.step import Chunk, Continuation, StepPlan, StepResult

Kept = int | None
"""What a slot holds; None was never written."""


def next_token(tokens: Sequence[int], sampling: SamplingParams, sample: int, vocab_size: int) -> int:
    """The token after `tokens`: greedily the same for all samples, otherwise also a function of (seed, sample)."""
    randomness = (sampling.seed % 2**32, sample) if sampling.temperature > 0 else ()
    return crc32(token_bytes([*tokens, *randomness])) % vocab_size


def judgement(tokens: Sequence[int], token: int) -> TokenLogprobs:
    """How likely `token` is after `tokens`: a function of them all."""
    return TokenLogprobs(-(crc32(token_bytes([*tokens, token])) % 1000) / 8)


def beam_scores(tokens: Sequence[int], vocab_size: int) -> list[float]:
    """How likely each token is after `tokens`."""
    return [judgement(tokens, token).logprob for token in range(vocab_size)]


def solo_text(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int,
    sampling: SamplingParams | None = None,
    sample: int = 0,
    stop: Iterable[int] = (),
) -> list[int]:
    """What a request gets that runs alone; a stop token is left out."""
    tokens = list(prompt)
    stops = set(stop)
    for _ in range(max_tokens):
        token = next_token(tokens, sampling or SamplingParams(), sample, vocab_size)
        if token in stops:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


Model = Callable[[Sequence[int], SamplingParams, int, int], int]
"""As `next_token`."""


class FunctionRunner:
    """A runner whose model is a function, on a pool of token ids."""

    def __init__(self, pool: PoolSpec, model: Model = next_token) -> None:
        self._spec = pool
        self._model = model
        self._pool: list[list[Kept]] = [[None] * pool.block_size for _ in range(pool.num_blocks)]
        self.steps: list[StepPlan] = []
        self.before_step: Callable[[StepPlan], None] = lambda _: None
        """Called with every plan; may raise in the model's place."""

    @property
    def computed_tokens(self) -> int:
        """Tokens put through the model so far."""
        return sum(len(chunk.tokens) for step in self.steps for chunk in step.chunks)

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy, write every chunk, then read back and draw."""
        self.steps.append(plan)
        self.before_step(plan)
        for copy in plan.copies:
            self._pool[copy.target] = self._pool[copy.source].copy()
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                self._pool[chunk.table[position // self._spec.block_size]][position % self._spec.block_size] = token
        tokens = tuple(self._draw(chunk) for chunk in plan.chunks)
        told = {
            at: tuple(
                judgement(self._read(chunk, draw.position), token)
                for draw, token in zip(chunk.draws, drawn, strict=True)
            )
            for at, (chunk, drawn) in enumerate(zip(plan.chunks, tokens, strict=True))
            if drawn and chunk.draws[0].logprobs is not None
        }
        judged = {at: self._judge(chunk) for at, chunk in enumerate(plan.chunks) if chunk.targets}
        found = {
            at: self._continue(chunk)
            for at, chunk in enumerate(plan.chunks)
            if chunk.draws and chunk.draws[0].continuations
        }
        return StepResult(tokens, told, judged, found)

    def _continue(self, chunk: Chunk) -> tuple[Continuation, ...]:
        scores = beam_scores(self._read(chunk, chunk.end), self._spec.vocab_size)
        ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
        return tuple(Continuation(token, scores[token]) for token in ranked[: chunk.draws[0].continuations])

    def _judge(self, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        ends = range(chunk.start + 1, chunk.end + 1)
        return tuple(judgement(self._read(chunk, end), token) for end, token in zip(ends, chunk.targets, strict=False))

    def _draw(self, chunk: Chunk) -> tuple[int, ...]:
        if chunk.draws and chunk.draws[0].continuations:
            return ()
        drafts = range(chunk.end - chunk.drafts, chunk.end + 1) if chunk.drafts else [chunk.end] * len(chunk.draws)
        assert [draw.position for draw in chunk.draws] == [*drafts], chunk
        return tuple(
            self._model(self._read(chunk, draw.position), draw.sampling, draw.sample, self._spec.vocab_size)
            for draw in chunk.draws
        )

    def _read(self, chunk: Chunk, end: int) -> list[int]:
        size = self._spec.block_size
        slots = [self._pool[chunk.table[at // size]][at % size] for at in range(end)]
        assert None not in slots, f"{chunk} reads a slot that was never written: {slots}"
        return [token for token in slots if token is not None]


class LedgerClient:
    """A cache manager in this process: a CacheClient over a real ledger, audited after each exchange."""

    def __init__(self, lease_seconds: float = 60.0) -> None:
        self._lease_seconds = lease_seconds
        self._epoch = Epoch(0)
        self.registrations: list[Registration] = []
        self.exchanges: list[Exchange] = []
        self.ledger: Ledger | None = None
        self.before_registration: Callable[[Registration], None] = lambda _: None
        """Called with every registration; may raise in the manager's place."""
        self.before_exchange: Callable[[Exchange], None] = lambda _: None
        """Called with every exchange; may raise in the manager's place."""

    async def register(self, registration: Registration, inventory: Sequence[Inventory] = ()) -> Registered:
        self.before_registration(registration)
        self.registrations.append(replace(registration, inventory_parts=len(inventory)))
        self._epoch = Epoch(self._epoch + 1)
        restoration = Restoration(registration.pool)
        for part in inventory:
            restoration.add(part)
        for _ in restoration.steps():
            await asyncio.sleep(0)
        self.ledger = restoration.open(self._epoch, registration.cache_epoch)
        self.ledger.check()
        return Registered(self._epoch, self._lease_seconds, registration.cache_epoch)

    def when_ended(self, tell: Callable[[], None]) -> None:
        """There is no stream that could end."""

    async def exchange(self, exchange: Exchange) -> Grant:
        self.before_exchange(exchange)
        if self.ledger is None or exchange.epoch != self._epoch:
            raise StaleEpoch(f"epoch {exchange.epoch}, the books are of {self._epoch}")
        self.exchanges.append(exchange)
        grant = self.ledger.apply(exchange)
        self.ledger.check()
        return grant

    async def is_there(self) -> bool:
        return True

    def leave(self) -> None:
        self.ledger = None

    async def close(self) -> None:
        self.leave()
