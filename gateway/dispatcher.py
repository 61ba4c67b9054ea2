"""One request from its arrival to its last token.

    intake -> wait at the door -> look up, route, reserve, send -> follow the worker's reports

Invariants: whatever a request took (a place, a reservation, a call at a worker) it gives back on every way out; every
wait ends at the request's deadline. A request whose worker is lost before it said anything is sent to another one;
after its first token it ends with WorkerLost.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.catalogue import Catalogue, ModelInService, ServedModel
from gateway.core.account import OPEN, Account
from gateway.core.best_of import best_of
from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.fleet import GRACE_SECONDS, Fleet, ReservationId, WorkerProcess, process_of
from gateway.core.in_flight import PromptBlocks
from gateway.core.request import Generation, Limits
from gateway.core.routing import Candidate, choose
from gateway.core.transcript import Transcript
from gateway.door import Door
from gateway.intake import Intake, Job
from gateway.prefix_lookup import PrefixLookup
from gateway.worker_client import WorkerCall, Workers
from octavo.durations import Durations
from octavo.errors import Draining, OctavoError, WorkerLost
from octavo.records import FleetUpdate, IndexState, StepReport, WorkerInfo

log = logging.getLogger("octavo.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much, and how long."""

    limits: Limits = field(default_factory=Limits)
    max_running: int = 256
    max_waiting: int = 1024
    max_wait_seconds: float = 30.0
    """For a place to run in."""
    max_request_seconds: float = 3600.0
    """For a whole request whose client named no deadline."""
    max_attempts: int = 3
    """Workers that are tried before a request's first token."""


FIRST_TOKEN_BOUNDS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Of the histogram's buckets."""


@dataclass(slots=True)
class Counters:
    """Since the gateway's start."""

    requests: int = 0
    refused: int = 0
    """Before they were sent to a worker."""
    outdated_hits: int = 0
    """Hits that were dropped, one for each request and worker: the worker left, came under a new epoch, or was reset
    while the index was asked."""
    predicted_cached_tokens: int = 0
    """Whole blocks: the prefix index knows no parts."""
    delivered_cached_tokens: int = 0
    """To the token: of each prompt up to a block less one token more than was predicted, of a block that was copied."""
    time_to_first_token: Durations = field(default_factory=lambda: Durations(FIRST_TOKEN_BOUNDS_SECONDS))
    """From a request's arrival on; of every visit to a worker that came to a token."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A job at a worker."""

    candidate: Candidate
    reservation: ReservationId
    call: WorkerCall
    index_state: IndexState
    """Of the look-up that it was chosen with."""

    @property
    def worker(self) -> WorkerInfo:
        return self.candidate.standing.info


class Dispatcher:
    """Sees requests through. Owns the fleet view and the door; one task per request, all on one event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        lookup: PrefixLookup,
        workers: Workers,
        bounds: Bounds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve `models` with whichever workers `apply_fleet` names."""
        self._fleet = Fleet()
        self._catalogue = Catalogue(models, self._fleet)
        self._intake = Intake(self._catalogue, bounds.limits, bounds.max_request_seconds)
        self._door = Door(
            max_running=bounds.max_running,
            max_waiting=bounds.max_waiting,
            max_wait_seconds=bounds.max_wait_seconds,
            clock=clock,
        )
        self._lookup = lookup
        self._workers = workers
        self._max_attempts = bounds.max_attempts
        self._clock = clock
        self._random = random.Random()
        self._draining = False
        self.counters = Counters()

    # ---- what others may know, and tell ----------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that were let in and have not ended."""
        return self._door.running

    @property
    def waiting(self) -> int:
        """Requests at the door."""
        return self._door.waiting

    @property
    def reservations(self) -> int:
        """Requests that are at a worker."""
        return self._fleet.reservations

    @property
    def fleet(self) -> tuple[WorkerInfo, ...]:
        """The workers as the cache manager last described them."""
        return self._fleet.workers

    @property
    def index_state(self) -> IndexState:
        """Of the last look-up in the prefix index."""
        return self._lookup.state

    @property
    def failed_lookups(self) -> int:
        """That learned nothing."""
        return self._lookup.failures

    def models(self) -> tuple[ModelInService, ...]:
        """The models that some worker serves now, by name."""
        return self._catalogue.in_service()

    def served(self, name: str) -> ServedModel:
        """The model that a request means. Raises UnknownModel."""
        return self._catalogue.named(name)

    def apply_fleet(self, update: FleetUpdate, manager: str) -> None:
        """Take in what a cache manager says of the workers."""
        self._change(lambda fleet: fleet.apply(update, self._clock(), manager))
        if update.snapshot:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._forget_missing)

    def manager_away(self, manager: str) -> None:
        """A cache manager says nothing any more: its workers stay as they were."""
        self._change(lambda fleet: fleet.manager_away(manager))

    def _forget_missing(self) -> None:
        self._change(lambda fleet: fleet.forget_missing(self._clock()))

    def _change(self, change: Callable[[Fleet], None]) -> None:
        self._workers.keep(self._catalogue.change(change))

    def drain(self) -> None:
        """Refuse every request from now on; those that are in go on."""
        self._draining = True

    async def examine(self, request: Generation, account: Account = OPEN) -> tuple[Job, list[WorkerInfo]]:
        """The job that a request would be, and the workers that could take it. Nothing runs.

        Raises:
            OctavoError: the request would be refused, as in `generate`.
        """
        job = await self._intake.job(request, account, self._clock(), None)
        return job, self._catalogue.available(job.model)

    # ---- one request -----------------------------------------------------------------------------------------

    async def generate(
        self, request: Generation, seconds_left: float | None, account: Account = OPEN
    ) -> AsyncGenerator[Event]:
        """Serve one request; closing the generator, or cancelling its task, ends the work for it everywhere.

        Args:
            request: as the client sent it.
            seconds_left: until the client's deadline; None if it named none.
            account: on whose account it runs.

        Raises:
            InvalidRequest: the request cannot be served as it is.
            UnknownModel: there is no such model.
            NoWorker: nobody serves it just now.
            QueueFull: too many requests wait, or this one waited too long.
            Draining: the gateway, or every worker of the model, takes nothing new.
            WorkerLost: the worker is gone, after the first token or together with every other one.
            OctavoError: as the worker refused it.
            TimeoutError: the deadline passed.
        """
        arrived = self._clock()
        self.counters.requests += 1
        sent = False
        try:
            if self._draining:
                raise Draining("this gateway finishes what it has and takes nothing new")
            job = await self._intake.job(request, account, arrived, seconds_left)
            async with self._door.place(job.deadline), aclosing(self._told(job)) as events:
                async for event in events:
                    sent = True
                    yield event
        except (OctavoError, TimeoutError):
            self.counters.refused += not sent
            raise

    async def _told(self, job: Job) -> AsyncGenerator[Event]:
        """What the client hears of a job."""
        async with aclosing(self._run(job)) as events:
            chosen = job.told_samples < job.submission.samples
            told = best_of(events, job.told_samples, tells_logprobs=job.tells_logprobs) if chosen else events
            async for event in told:
                yield event

    async def _run(self, job: Job) -> AsyncGenerator[Event]:
        """Send a job to a worker, and to another one if that is lost before it said anything."""
        tried: set[WorkerProcess] = set()
        while True:
            visit = await self._send(job, tried)
            transcript = Transcript(job.submission.samples, job.model.tokenizer.detokenizer, job.stop)
            try:
                if not tried:
                    yield _started(job, visit)
                async with aclosing(self._follow(job, visit, transcript)) as events:
                    async for event in events:
                        yield event
                return
            except (WorkerLost, Draining) as error:
                tried.add(process_of(visit.worker))
                if isinstance(error, WorkerLost):
                    self._fleet.stream_lost(visit.worker)
                if transcript.output_tokens or not self._may_try_again(job, tried):
                    raise
                log.info("request_sent_again", extra={"request": job.request_id, "reason": str(error)})
            finally:
                visit.call.close()
                self._fleet.release(visit.reservation)

    async def _send(self, job: Job, tried: Collection[WorkerProcess]) -> _Visit:
        """Look up, route, reserve, submit. No await after the look-up: the choice is made from one picture."""
        prompt = PromptBlocks(job.submission.prompt, job.submission.scope)
        asked = self._fitting(job, tried)
        found = await self._lookup.hits(job.submission.prompt, job.submission.scope, asked)
        indexed = self._fleet.credited(asked, found.tokens)
        self.counters.outdated_hits += len(found.tokens) - len(indexed)
        fitting = self._fitting(job, tried)
        if not fitting:
            raise WorkerLost(f"no worker of {job.model.name} with room for {job.sequence_tokens} tokens is left")
        standings = self._fleet.standings([worker.worker_id for worker in fitting])
        chosen = choose(job.work, standings, self._fleet.hits(prompt, indexed), self._random.random).chosen
        reservation = self._fleet.reserve(
            chosen.standing.info,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=chosen.cached_tokens,
            output_tokens=job.work.output_tokens,
            blocks=prompt.of(chosen.standing.info),
        )
        call = self._workers.submit(chosen.standing.info, job.submission)
        return _Visit(chosen, reservation, call, found.state)

    async def _follow(
        self, job: Job, visit: _Visit, transcript: Transcript
    ) -> AsyncGenerator[PromptLogprobs | Delta | Finished | Usage]:
        """A worker's reports as events, up to the last sample's end; then the bill."""
        first_token: float | None = None
        while not transcript.finished:
            report = await self._next_report(job, visit)
            if report.tokens and first_token is None:
                first_token = self._clock()
                self.counters.time_to_first_token.add(first_token - job.arrived)
            for done in report.prefilled:
                self._prefilled(visit, done.cached_tokens)
            for event in transcript.add(report):
                if isinstance(event, Finished):
                    visit.call.stop(event.sample)  # the worker does not see stop strings
                yield event
        now = self._clock()
        yield Usage(
            prompt_tokens=job.prompt_tokens,
            cached_tokens=transcript.cached_tokens,
            output_tokens=transcript.output_tokens,
            worker_id=visit.worker.worker_id,
            time_to_first_token_seconds=(now if first_token is None else first_token) - job.arrived,
            total_seconds=now - job.arrived,
        )

    async def _next_report(self, job: Job, visit: _Visit) -> StepReport:
        try:
            async with asyncio.timeout(job.deadline - self._clock()):
                return await visit.call.next_report()
        except TimeoutError as error:
            raise TimeoutError(f"no end after {job.deadline - job.arrived:.1f} s") from error

    def _prefilled(self, visit: _Visit, cached_tokens: int) -> None:
        self._fleet.prefilled(visit.reservation)
        self.counters.predicted_cached_tokens += visit.candidate.cached_tokens
        self.counters.delivered_cached_tokens += cached_tokens

    def _fitting(self, job: Job, tried: Collection[WorkerProcess]) -> list[WorkerInfo]:
        return self._catalogue.fitting(job.model, job.sequence_tokens, but=tried)

    def _may_try_again(self, job: Job, tried: Collection[WorkerProcess]) -> bool:
        return len(tried) < self._max_attempts and bool(self._fitting(job, tried))


def _started(job: Job, visit: _Visit) -> Started:
    return Started(
        request_id=job.request_id,
        worker_id=visit.worker.worker_id,
        prompt_tokens=job.prompt_tokens,
        predicted_cached_tokens=visit.candidate.cached_tokens,
        index_state=visit.index_state,
        prompt_ids=job.submission.prompt,
    )
