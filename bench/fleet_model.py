"""A fleet in simulated time: the real gateway core and real books around workers that only take time.

A worker computes prompts one after another, oldest first, at a rate that falls with the positions that decode beside
it; then the request holds its blocks while its tokens come at a fixed pace. A prompt that finds too few
blocks waits at the head of the queue until a request has ended. Reports reach the gateway as they do through a cache
manager: a tenth of a second apart, with the whole prompts of all who wait. The blocks of a prompt are in the prefix
index when it has been computed.

In the books and in the gateway a token stands for a block of the trace; rates are in tokens.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from bench.replay import Arrival, open_books
from cache_manager.core.changes import Evicted, Published
from cache_manager.core.ledger import Ledger
from gateway.core.fleet import Fleet, ReservationId, Standing
from gateway.core.in_flight import Hit, PromptBlocks
from gateway.core.routing import Work
from octavo.errors import PoolExhausted
from octavo.ids import BlockHash, Epoch, Incarnation, SequenceId, WorkerId
from octavo.records.fleet import FleetUpdate, WorkerInfo, WorkerLoad
from octavo.records.scope import PLAIN

REPORT_SECONDS = 0.1
"""Between two reports of one worker."""

END = (1 << 31) - 1
"""The token after a prompt's blocks: a hit leaves at least one token to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a worker is."""

    prefill: float = 8000.0
    """Prompt tokens a second, when nothing decodes."""
    decode: float = 40.0
    """Tokens a second of each running request."""
    half_speed_positions: float = 2e6
    """Decoding positions beside which prompts are computed half as fast, since every step reads them."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may go by."""

    work: Work
    standings: Sequence[Standing]
    hits: dict[WorkerId, Hit]
    requests: Sequence[int]
    """At each worker, by the order of the standings."""


class Policy(Protocol):
    """Chooses one of the standings, by its place."""

    def __call__(self, view: View, draw: Callable[[], float]) -> int:
        """The place of the chosen one."""
        ...


@dataclass(slots=True)
class Job:
    """A request on its way."""

    number: int
    arrival: Arrival
    now: float
    """When it arrived, in the time of the run."""
    prompt: list[int]
    output_blocks: int
    worker: int = 0
    reservation: ReservationId | None = None
    predicted: int = 0
    found: int = 0
    """Blocks."""
    done: float = 0.0
    """When its prompt was computed."""


@dataclass(slots=True)
class _Worker:
    """One worker: its books, its queue, and what it computes."""

    info: WorkerInfo
    ledger: Ledger
    index: set[BlockHash]
    queue: deque[Job] = field(default_factory=deque[Job])
    prefilling: Job | None = None
    until: float = 0.0
    held: int = 0
    """Blocks of those that decode."""
    requests: int = 0
    prefilled_blocks: int = 0
    report_due: bool = False
    queued_blocks: int = 0
    """Of those in the queue."""
    unpublished: list[BlockHash] = field(default_factory=list[BlockHash])
    """Of the prompt that is being computed."""

    def load(self, now: float, blocks_per_second: float) -> WorkerLoad:
        queued = self.queued_blocks
        if self.prefilling is not None:
            queued += round((self.until - now) * blocks_per_second)
        return WorkerLoad(
            running_sequences=self.requests - len(self.queue),
            waiting_sequences=len(self.queue),
            queued_prefill_tokens=queued,
            held_blocks=self.ledger.num_held,
            cached_blocks=self.ledger.num_cached,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a trace."""

    hit_percent: float
    """Of the blocks of all prompts, those found."""
    prefill_imbalance: float
    """The most blocks that one worker computed, over the mean."""
    ttft_p50: float
    ttft_p95: float
    """Seconds."""
    prediction_error_percent: float
    """Mean difference of predicted and found blocks, of the blocks of all prompts."""


class ModelledFleet:
    """Plays one trace with one policy."""

    def __init__(
        self,
        workers: int,
        blocks_per_worker: int,
        rates: Rates,
        block_tokens: int,
        *,
        shared: bool = False,
        last_joins_at: float = 0.0,
    ) -> None:
        """Workers with a pool each, or, if `shared`, one pool of the same total that all of them reach: the bound.

        The last of them joins the others after so many seconds.
        """
        pools = [open_books(blocks_per_worker * workers)] * workers if shared else []
        pools = pools or [open_books(blocks_per_worker) for _ in range(workers)]
        index: set[BlockHash] = set()
        self._workers = [
            _Worker(
                WorkerInfo(
                    worker_id=WorkerId(f"w{at}"),
                    epoch=Epoch(1),
                    address="",
                    pool=ledger.spec,
                    load=WorkerLoad(),
                    incarnation=Incarnation(1),
                ),
                ledger,
                index if shared else set(),
            )
            for at, ledger in enumerate(pools)
        ]
        self._rates = rates
        self._block_tokens = block_tokens
        self._fleet = Fleet()
        self._names = [one.info.worker_id for one in self._workers]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.jobs: list[Job] = []
        """In the order of their arrival."""
        for worker in self._workers[:-1]:
            self._join(worker, 0.0)
        self._at(last_joins_at, lambda now: self._join(self._workers[-1], now))

    def play(self, arrivals: Sequence[Arrival], stretch: float, policy: Policy, seed: int) -> Outcome:
        """Send the arrivals, `stretch` times as far apart as they came, where `policy` says."""
        random = Random(seed)
        for number, arrival in enumerate(arrivals):
            while self._events and self._events[0][0] <= arrival.at * stretch:
                self._next_event()
            self._arrive(number, arrival, arrival.at * stretch, policy, random.random)
        while self._events:
            self._next_event()
        return self._outcome()

    def _join(self, worker: _Worker, now: float) -> None:
        self._fleet.apply(FleetUpdate(workers=(worker.info,)), now, "m")

    def _next_event(self) -> None:
        now, _, happen = heapq.heappop(self._events)
        happen(now)

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _arrive(self, number: int, arrival: Arrival, now: float, policy: Policy, draw: Callable[[], float]) -> None:
        job = Job(number, arrival, now, [*arrival.prompt, END], -(-arrival.output_tokens // self._block_tokens))
        prompt = PromptBlocks(job.prompt, PLAIN)
        blocks = prompt.of(self._workers[0].info)
        standings = self._fleet.standings(self._names)
        indexed = {name: held for name, held in self._indexed(blocks[:-1]) if held}
        hits = self._fleet.hits(prompt, self._fleet.workers, indexed)
        work = Work(prompt=tuple(job.prompt), output_tokens=job.output_blocks)
        requests = [one.requests for one in self._workers[: len(standings)]]
        job.worker = policy(View(work, standings, hits, requests), draw)
        worker = self._workers[job.worker]
        hit = hits.get(worker.info.worker_id, Hit(0))
        job.predicted = min(hit.tokens, len(job.prompt) - 1)
        job.reservation = self._fleet.reserve(
            worker.info,
            prompt_tokens=len(job.prompt),
            cached_tokens=job.predicted,
            output_tokens=job.output_blocks,
            blocks=blocks,
        )
        self.jobs.append(job)
        worker.queue.append(job)
        worker.queued_blocks += len(job.prompt)
        worker.requests += 1
        self._changed(worker, now)
        self._compute(worker, now)

    def _indexed(self, blocks: Sequence[BlockHash]) -> Iterator[tuple[WorkerId, int]]:
        """Leading blocks that each worker has published. A chain has no hole, so halving finds its end."""
        for worker in self._workers:
            low, high = 0, len(blocks)
            while low < high:
                middle = (low + high) // 2
                if blocks[middle] in worker.index:
                    low = middle + 1
                else:
                    high = middle
            yield worker.info.worker_id, low

    def _compute(self, worker: _Worker, now: float) -> None:
        """Take the next prompt if the worker is free and there are blocks for it."""
        if worker.prefilling is not None or not worker.queue:
            return
        job = worker.queue[0]
        sequence = SequenceId(job.number)
        found = worker.ledger.attach(sequence, job.prompt)
        assert isinstance(found, int), found  # prompts are computed one by one
        rest = job.prompt[found:-1]
        try:
            worker.ledger.reserve(sequence, len(rest) + job.output_blocks)
        except PoolExhausted:
            worker.ledger.free(sequence)
            return
        worker.queue.popleft()
        worker.queued_blocks -= len(job.prompt)
        worker.prefilling = job
        job.found = found
        worker.prefilled_blocks += len(rest)
        tokens = max(1, job.arrival.prompt_tokens - found * self._block_tokens)
        slowed = 1 + worker.held * self._block_tokens / self._rates.half_speed_positions
        worker.until = now + tokens * slowed / self._rates.prefill
        worker.ledger.commit(sequence, rest)
        self._take_changes(worker)
        self._at(worker.until, lambda then: self._computed(worker, job, then))

    def _computed(self, worker: _Worker, job: Job, now: float) -> None:
        job.done = now
        worker.prefilling = None
        worker.index.update(worker.unpublished)
        worker.unpublished.clear()
        worker.held += len(job.prompt) + job.output_blocks
        assert job.reservation is not None
        self._fleet.prefilled(job.reservation)
        self._at(now + job.arrival.output_tokens / self._rates.decode, lambda then: self._ended(worker, job, then))
        self._changed(worker, now)
        self._compute(worker, now)

    def _ended(self, worker: _Worker, job: Job, now: float) -> None:
        worker.ledger.free(SequenceId(job.number))
        self._take_changes(worker)
        worker.held -= len(job.prompt) + job.output_blocks
        worker.requests -= 1
        assert job.reservation is not None
        self._fleet.release(job.reservation)
        self._changed(worker, now)
        self._compute(worker, now)

    def _take_changes(self, worker: _Worker) -> None:
        for change in worker.ledger.take_changes():
            if isinstance(change, Published):
                worker.unpublished += change.hashes
            elif isinstance(change, Evicted):
                worker.index.difference_update(change.hashes)

    def _changed(self, worker: _Worker, now: float) -> None:
        """Report in a while, unless that is due anyway."""
        if not worker.report_due:
            worker.report_due = True
            self._at(now + REPORT_SECONDS, lambda then: self._report(worker, then))

    def _report(self, worker: _Worker, now: float) -> None:
        worker.report_due = False
        load = worker.load(now, self._rates.prefill / self._block_tokens)
        info = WorkerInfo(
            worker_id=worker.info.worker_id,
            epoch=worker.info.epoch,
            address="",
            pool=worker.info.pool,
            load=load,
            incarnation=worker.info.incarnation,
        )
        self._fleet.apply(FleetUpdate(workers=(info,)), now, "m")
        if worker.prefilling is not None:
            self._changed(worker, now)

    def _outcome(self) -> Outcome:
        blocks = sum(len(job.prompt) - 1 for job in self.jobs)
        waits = sorted(job.done - job.now for job in self.jobs)
        computed = [worker.prefilled_blocks for worker in self._workers]
        return Outcome(
            hit_percent=100 * sum(job.found for job in self.jobs) / blocks,
            prefill_imbalance=max(computed) * len(computed) / max(1, sum(computed)),
            ttft_p50=waits[len(waits) // 2],
            ttft_p95=waits[len(waits) * 95 // 100],
            prediction_error_percent=100 * sum(abs(job.predicted - job.found) for job in self.jobs) / blocks,
        )
