"""One request from its arrival to its last token, and the state that all requests share.

    check -> tokenise -> wait for a place -> look up, route, reserve, send -> follow the worker's reports

Invariants: whatever a request took (a place, a reservation, a call at a worker) it gives back on every way out; every
wait ends at the request's deadline. A request whose worker is lost before it said anything is sent to another one;
after its first token it ends with WorkerLost.
"""

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from gateway.core.admission import Admission, Ticket, output_budget
from gateway.core.events import Delta, Event, Finished, Started, Usage
from gateway.core.fleet import Fleet, ReservationId
from gateway.core.request import (
    ChatPrompt,
    Generation,
    Limits,
    TextPrompt,
    TokenPrompt,
    check_request,
    check_vocabulary,
)
from gateway.core.routing import Candidate, Work, choose
from gateway.core.transcript import Transcript
from gateway.prefix_lookup import PrefixLookup
from gateway.tokenizer import Tokenizer
from gateway.worker_client import Incarnation, WorkerCall, Workers
from octavo.errors import Draining, InvalidRequest, OctavoError, QueueFull, UnknownModel, WorkerLost
from octavo.hashing import digest_of
from octavo.records import FleetUpdate, SamplingParams, StepReport, Submission, WorkerInfo

log = logging.getLogger("octavo.gateway")

_SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that this gateway has the words for."""

    name: str
    tokenizer: Tokenizer
    tokenizer_digest: bytes
    """32 bytes; workers with another one are left alone, since their token ids would mean other words."""
    stop_tokens: frozenset[int]
    """Tokens that end a text."""


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


@dataclass(frozen=True, slots=True)
class ModelInService:
    """A model that some worker serves now."""

    name: str
    max_model_tokens: int
    workers: int


@dataclass(slots=True)
class Counters:
    """Since the gateway's start."""

    requests: int = 0
    refused: int = 0
    """Before they were sent to a worker."""
    predicted_cached_tokens: int = 0
    delivered_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A request that is fit to run."""

    request_id: str
    model: ServedModel
    submission: Submission
    stop: tuple[str, ...]
    arrived: float
    deadline: float

    @property
    def tokens(self) -> int:
        """The longest that one of its sequences may become."""
        return len(self.submission.prompt) + self.submission.max_tokens

    @property
    def work(self) -> Work:
        return Work(prompt=self.submission.prompt, output_tokens=self.submission.samples * self.submission.max_tokens)


@dataclass(frozen=True, slots=True)
class _Visit:
    """A job at a worker."""

    candidate: Candidate
    reservation: ReservationId
    call: WorkerCall

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
        self._models = {model.name: model for model in models}
        self._lookup = lookup
        self._workers = workers
        self._bounds = bounds
        self._clock = clock
        self._random = random.Random()
        self._fleet = Fleet()
        self._admission = Admission(max_running=bounds.max_running, max_waiting=bounds.max_waiting)
        self._tickets = itertools.count()
        self._turns: dict[Ticket, asyncio.Future[bool]] = {}
        self._draining = False
        self.counters = Counters()

    # ---- what others may know --------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that were let in and have not ended."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests at the door."""
        return self._admission.waiting

    @property
    def reservations(self) -> int:
        """Requests that are at a worker."""
        return self._fleet.reservations

    @property
    def fleet(self) -> tuple[WorkerInfo, ...]:
        """The workers as the cache manager last described them."""
        return self._fleet.workers

    def models(self) -> tuple[ModelInService, ...]:
        """The models that some worker serves now, by name."""
        served = ((model.name, self._serving(model)) for model in self._models.values())
        return tuple(
            ModelInService(name, max(worker.pool.max_model_tokens for worker in workers), len(workers))
            for name, workers in sorted(served)
            if workers
        )

    def apply_fleet(self, update: FleetUpdate) -> None:
        """Take in what the cache manager says of the workers."""
        before = {(worker.worker_id, worker.epoch) for worker in self._fleet.workers}
        self._fleet.apply(update, self._clock())
        after = {(worker.worker_id, worker.epoch): worker for worker in self._fleet.workers}
        self._workers.keep(after)
        for incarnation in after.keys() - before:
            self._log_joined(after[incarnation])
        for worker, epoch in before - after.keys():
            log.info("worker_left", extra={"worker": worker, "epoch": epoch})

    def drain(self) -> None:
        """Refuse every request from now on; those that are in go on."""
        self._draining = True

    # ---- one request -----------------------------------------------------------------------------------------

    async def generate(self, request: Generation, seconds_left: float | None) -> AsyncGenerator[Event]:
        """Serve one request; closing the generator, or cancelling its task, ends the work for it everywhere.

        Args:
            request: as the client sent it.
            seconds_left: until the client's deadline; None if it named none.

        Raises:
            InvalidRequest: the request cannot be served as it is.
            UnknownModel: no worker serves the model.
            QueueFull: too many requests wait, or this one waited too long.
            Draining: the gateway, or every worker of the model, takes nothing new.
            WorkerLost: the worker is gone, after the first token or together with every other one.
            OctavoError: as the worker refused it.
            TimeoutError: the deadline passed.
        """
        arrived = self._clock()
        self.counters.requests += 1
        with self._counting_refusals():
            job = await self._prepare(request, arrived, seconds_left)
        async with self._place(job), aclosing(self._run(job)) as events:
            async for event in events:
                yield event

    async def _prepare(self, request: Generation, arrived: float, seconds_left: float | None) -> _Job:
        """Check and tokenise a request."""
        if self._draining:
            raise Draining("this gateway finishes what it has and takes nothing new")
        check_request(request, self._bounds.limits)
        model = self._model_named(request.model)
        pools = [worker.pool for worker in self._available(model)]
        prompt = await self._tokens_of(request, model)
        check_vocabulary(prompt, min(pool.vocab_size for pool in pools))
        if not prompt:
            raise InvalidRequest("prompt: 0 tokens, wanted at least 1")
        patience = self._bounds.max_request_seconds if seconds_left is None else seconds_left
        return _Job(
            request_id=uuid.uuid4().hex,
            model=model,
            submission=Submission(
                request=0,  # the stream to the worker numbers it
                prompt=prompt,
                max_tokens=output_budget(len(prompt), request.max_tokens, pools),
                samples=request.samples,
                sampling=self._sampling_of(request),
                stop_tokens=frozenset() if request.ignore_eos else model.stop_tokens,
                salt=digest_of(b"cache_salt", request.cache_salt.encode()) if request.cache_salt else b"",
            ),
            stop=request.stop,
            arrived=arrived,
            deadline=arrived + patience,
        )

    async def _tokens_of(self, request: Generation, model: ServedModel) -> tuple[int, ...]:
        """The prompt's token ids. Text goes through a thread: megabytes of it take seconds."""
        match request.prompt:
            case TextPrompt(text):
                return await asyncio.to_thread(model.tokenizer.encode_text, text)
            case ChatPrompt(messages):
                return await asyncio.to_thread(model.tokenizer.encode_chat, messages)
            case TokenPrompt(ids):
                return ids
            case None:
                raise AssertionError("check_request lets no request without a prompt pass")

    def _sampling_of(self, request: Generation) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=self._random.getrandbits(_SEED_BITS) if request.seed is None else request.seed,
        )

    @asynccontextmanager
    async def _place(self, job: _Job) -> AsyncGenerator[None]:
        """Wait at the door, then hold one of the places to run in."""
        ticket = Ticket(next(self._tickets))
        try:
            with self._counting_refusals():
                await self._turn_of(ticket, job)
            yield
        finally:
            self._turns.pop(ticket, None)
            self._admission.leave(ticket)
            self._take_turns()

    async def _turn_of(self, ticket: Ticket, job: _Job) -> None:
        entered = self._clock()
        expires = min(job.deadline, entered + self._bounds.max_wait_seconds)
        self._admission.enter(ticket, expires=expires)
        self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._take_turns()
        try:
            async with asyncio.timeout(expires - entered):
                admitted = await self._turns[ticket]
        except TimeoutError:
            admitted = False
        if not admitted:
            waited = f"waited {self._clock() - entered:.1f} s while {self.running} requests ran"
            raise TimeoutError(waited) if expires == job.deadline else QueueFull(waited)

    def _take_turns(self) -> None:
        turn = self._admission.turn(self._clock())
        for tickets, admitted in ((turn.admitted, True), (turn.expired, False)):
            for ticket in tickets:
                future = self._turns[ticket]
                if not future.done():  # its request may have been cancelled in this very moment
                    future.set_result(admitted)

    async def _run(self, job: _Job) -> AsyncGenerator[Event]:
        """Send a job to a worker, and to another one if that is lost before it said anything."""
        tried: set[Incarnation] = set()
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
                tried.add((visit.worker.worker_id, visit.worker.epoch))
                if transcript.output_tokens or not self._may_try_again(job, tried):
                    raise
                log.info("request_sent_again", extra={"request": job.request_id, "reason": str(error)})
            finally:
                visit.call.close()
                self._fleet.release(visit.reservation)

    async def _send(self, job: _Job, tried: Collection[Incarnation]) -> _Visit:
        """Look up, route, reserve, submit. No await after the look-up: the choice is made from one picture."""
        hits = await self._lookup.hits(job.submission.prompt, job.submission.salt, self._fitting(job, tried))
        fitting = self._fitting(job, tried)
        if not fitting:
            raise WorkerLost(f"no worker of {job.model.name} with room for {job.tokens} tokens is left")
        standings = self._fleet.standings([worker.worker_id for worker in fitting])
        chosen = choose(job.work, standings, hits, self._random.random).chosen
        reservation = self._fleet.reserve(
            chosen.standing.info,
            prompt_tokens=len(job.submission.prompt),
            cached_tokens=chosen.cached_tokens,
            output_tokens=job.work.output_tokens,
        )
        return _Visit(chosen, reservation, self._workers.submit(chosen.standing.info, job.submission))

    async def _follow(
        self, job: _Job, visit: _Visit, transcript: Transcript
    ) -> AsyncGenerator[Delta | Finished | Usage]:
        """A worker's reports as events, up to the last sample's end; then the bill."""
        first_token: float | None = None
        while not transcript.finished:
            report = await self._next_report(job, visit)
            if report.tokens and first_token is None:
                first_token = self._clock()
            for event in transcript.add(report):
                yield event
            if report.prefilled:
                self._prefilled(visit, transcript.cached_tokens)
        now = self._clock()
        yield Usage(
            prompt_tokens=len(job.submission.prompt),
            cached_tokens=transcript.cached_tokens,
            output_tokens=transcript.output_tokens,
            worker_id=visit.worker.worker_id,
            time_to_first_token_seconds=(now if first_token is None else first_token) - job.arrived,
            total_seconds=now - job.arrived,
        )

    async def _next_report(self, job: _Job, visit: _Visit) -> StepReport:
        try:
            async with asyncio.timeout(job.deadline - self._clock()):
                return await visit.call.next_report()
        except TimeoutError as error:
            raise TimeoutError(f"no end after {job.deadline - job.arrived:.1f} s") from error

    def _prefilled(self, visit: _Visit, cached_tokens: int) -> None:
        self._fleet.prefilled(visit.reservation)
        self.counters.predicted_cached_tokens += visit.candidate.cached_tokens
        self.counters.delivered_cached_tokens += cached_tokens

    # ---- which workers ---------------------------------------------------------------------------------------

    def _model_named(self, name: str) -> ServedModel:
        """The model a request means; no name means the only one."""
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise UnknownModel(f"model: {name!r}; there are: {self._names()}")
        return self._models[name]

    def _names(self) -> str:
        return ", ".join(model.name for model in self.models()) or "none"

    def _serving(self, model: ServedModel) -> list[WorkerInfo]:
        return [
            worker
            for worker in self._fleet.workers
            if worker.pool.model == model.name and worker.pool.tokenizer_digest == model.tokenizer_digest
        ]

    def _available(self, model: ServedModel) -> list[WorkerInfo]:
        """Workers that take new requests for a model, at least one."""
        serving = self._serving(model)
        if not serving:
            raise UnknownModel(f"model: no worker serves {model.name!r} now; there are: {self._names()}")
        taking = [worker for worker in serving if not worker.draining]
        if not taking:
            raise Draining(f"all {len(serving)} workers of {model.name} finish what they have and take nothing new")
        return taking

    def _fitting(self, job: _Job, tried: Collection[Incarnation]) -> list[WorkerInfo]:
        """Workers that can hold a job and have not lost it yet."""
        return [
            worker
            for worker in self._serving(job.model)
            if not worker.draining
            and worker.pool.capacity_tokens >= job.tokens
            and (worker.worker_id, worker.epoch) not in tried
        ]

    def _may_try_again(self, job: _Job, tried: Collection[Incarnation]) -> bool:
        return len(tried) < self._bounds.max_attempts and bool(self._fitting(job, tried))

    # ---- what is written down --------------------------------------------------------------------------------

    def _counting_refusals(self) -> "_RefusalCount":
        return _RefusalCount(self.counters)

    def _log_joined(self, worker: WorkerInfo) -> None:
        fields = {"worker": worker.worker_id, "epoch": worker.epoch, "model": worker.pool.model}
        model = self._models.get(worker.pool.model)
        if model is None:
            log.warning("worker_of_unknown_model", extra=fields)
        elif model.tokenizer_digest != worker.pool.tokenizer_digest:
            log.error("worker_with_another_tokenizer", extra=fields)
        else:
            log.info("worker_joined", extra=fields)


class _RefusalCount:
    """Counts the errors that pass through a `with` block."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OctavoError | TimeoutError):
            self._counters.refused += 1


def _started(job: _Job, visit: _Visit) -> Started:
    return Started(
        request_id=job.request_id,
        worker_id=visit.worker.worker_id,
        prompt_tokens=len(job.submission.prompt),
        predicted_cached_tokens=visit.candidate.cached_tokens,
    )
