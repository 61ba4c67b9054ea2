"""Every request from its arrival to its last token: the one way in, for whichever front door.

    intake -> wait at the door -> journey over the workers

Invariants: whatever a request took (a place, a reservation, a call at a worker) it gives back on every way out; every
wait ends at the request's deadline. A request whose worker is lost, frozen, cut off or about to leave goes on at
another one (gateway/journey.py); nobody but a client without a worker left is told.
"""

import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass

from gateway.bounds import Bounds
from gateway.catalogue import Catalogue, ModelInService, ServedModel
from gateway.claims import ClaimCounts
from gateway.core.account import OPEN, Account
from gateway.core.admission import Wish
from gateway.core.best_of import best_of
from gateway.core.events import Event, Started
from gateway.core.fleet import Fleet
from gateway.core.quotas import Quotas
from gateway.core.request import Generation, Prompt
from gateway.core.turns import Listener, TurnMemory
from gateway.counters import Counters
from gateway.door import Door
from gateway.fleet_view import FleetView
from gateway.intake import Intake, Job
from gateway.journey import Journey, Journeys
from gateway.merge import merged
from gateway.placement import Judgement, Placement
from gateway.prefix_lookup import PrefixLookup
from gateway.presence import Presence
from gateway.worker_client import Workers
from octavo.errors import Draining, NoWorker, OctavoError, QueueFull
from octavo.records.fleet import FleetUpdate, WorkerInfo
from octavo.records.generate import IndexState

TELLING_SECONDS = 2.0
"""For telling as many clients as there may be that their requests end here: some 2 ms each on a busy machine."""


class Dispatcher:
    """Sees requests through. One task per request, all on one event loop."""

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
        self._view = FleetView(self._fleet, self._catalogue, workers, clock)
        turns = TurnMemory(bounds.remembered_tokens)
        self._intake = Intake(self._catalogue, turns, bounds)
        self._door = Door(
            max_running=bounds.max_running,
            max_waiting=bounds.max_waiting,
            max_wait_seconds=bounds.max_wait_seconds,
            clock=clock,
        )
        self._lookup = lookup
        self._workers = workers
        self._clock = clock
        self._quotas = Quotas()
        self._present = Presence()
        self._draining = False
        self.counters = Counters()
        self._placement = Placement(self._fleet, self._catalogue, lookup, workers, self.counters)
        self._journeys = Journeys(
            self._placement,
            self._view,
            self.counters,
            max_losses=bounds.max_attempts,
            max_standstill_seconds=bounds.max_standstill_seconds,
            clock=clock,
        )

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

    @property
    def claim_counts(self) -> ClaimCounts:
        """What was told to other gateways of prompts on their way."""
        return self._lookup.claim_counts

    def models(self) -> tuple[ModelInService, ...]:
        """The models that some worker serves now, by name."""
        return self._catalogue.in_service()

    def served(self, name: str) -> ServedModel:
        """The model that a request means. Raises UnknownModel."""
        return self._catalogue.named(name)

    def apply_fleet(self, update: FleetUpdate, manager: str) -> None:
        """Take in what a cache manager says of the workers."""
        self._view.apply(update, manager)
        self._door.look()

    def manager_away(self, manager: str) -> None:
        """A cache manager says nothing any more: its workers stay as they were."""
        self._view.manager_away(manager)

    async def drain(self, seconds: float, telling_seconds: float = TELLING_SECONDS) -> None:
        """Refuse every request from now on; return when those that are in have ended.

        What has not ended in `seconds` ends with Draining, so that its client can go elsewhere. To tell so to hundreds
        of clients takes a while: as long as that takes, `telling_seconds` at most. Whoever is told nothing would see
        what a server's end looks like, UNAVAILABLE or CANCELLED without a reason.
        """
        self._draining = True
        if not await self._present.until_empty(seconds):
            reason = Draining(f"this gateway leaves, and {seconds:g} s were not enough to end the request")
            self._door.close(reason)
            self._journeys.end(reason)
            self._workers.fail_all(reason)
            await self._present.until_empty(telling_seconds)

    async def examine(
        self, request: Generation, account: Account = OPEN
    ) -> tuple[Job, list[WorkerInfo], Judgement | None]:
        """The job that a request would be, who could take it, and where it would go. Nothing runs or waits.

        Raises:
            NoWorker: nobody serves the model just now.
            Draining: everybody who serves it is about to leave.
            OctavoError: the request would be refused, as in `generate`.
        """
        job = await self._intake.job(request, account, self._clock(), None)
        workers = self._catalogue.available(job.model)
        judged = await self._placement.judge(job.model, (job.submission,))
        return job, workers, judged

    async def tokens(self, prompt: Prompt | None, model: str) -> tuple[int, ...]:
        """The token ids of a prompt. Raises InvalidRequest or UnknownModel."""
        return await self._intake.tokens(prompt, model)

    async def text(self, ids: Sequence[int], model: str, *, special_tokens: bool) -> str:
        """The text of token ids. Raises InvalidRequest or UnknownModel."""
        return await self._intake.text(ids, model, special_tokens=special_tokens)

    async def generate_each(
        self, requests: Sequence[Generation], seconds_left: float | None, account: Account = OPEN
    ) -> AsyncGenerator[tuple[int, Event | OctavoError | TimeoutError]]:
        """Serve several requests, each as `generate` does: (which, its next event or what it ended with).

        Raises:
            InvalidRequest: there are too many, or none.
        """
        self._intake.check_batch(len(requests))
        streams = [self.generate(request, seconds_left, account) for request in requests]
        async with aclosing(merged(streams, (OctavoError, TimeoutError))) as events:
            async for event in events:
                yield event

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
            NoWorker: nobody who serves it came in time to take it, or to go on with it.
            QuotaExceeded: the tenant has had what it may have for now.
            QueueFull: too many requests wait, or this one waited too long, or would.
            Draining: the gateway takes nothing new, or every worker of the model until the wait was too long.
            WorkerLost: too many workers were lost under it, or the last one was.
            OctavoError: as the worker refused it.
            TimeoutError: the deadline passed.
        """
        arrived, way = self._clock(), _Way()
        async with AsyncExitStack() as held:
            held.enter_context(self._counted(way))
            job = await self._intake.job(request, account, arrived, seconds_left)
            held.enter_context(self._charged(job, account, way))
            answers = held.enter_context(self._remembered(job))
            room = self._placement.room_for(job.model, job.submission)
            await held.enter_async_context(self._door.place(_wish(job, account), room, self._refusal_for(job)))
            way.journey = Journey(self._intake.measured(job), self._journeys)
            events = await held.enter_async_context(aclosing(way.journey.events()))
            async for event in await held.enter_async_context(aclosing(_told(job, events))):
                if isinstance(event, Started):  # it is at a worker, which counts it now
                    room.give_back()
                    self._door.look()
                elif job.text is not None and (answer := answers.hear(event)) is not None:  # else nobody asks for it
                    self._intake.remember(job, *answer)
                yield event

    @contextmanager
    def _counted(self, way: "_Way") -> Generator[None]:
        """A request is here, and may end before it is at a worker. Raises Draining where none is taken any more."""
        self.counters.requests += 1
        try:
            if self._draining:
                raise Draining("this gateway finishes what it has and takes nothing new")
            with self._present:
                yield
        except (OctavoError, TimeoutError):
            self.counters.refused += not way.tokens
            raise

    @contextmanager
    def _charged(self, job: Job, account: Account, way: "_Way") -> Generator[None]:
        """Take what a job may need out of the tenant's quota, and give back what it did not. Raises QuotaExceeded."""
        self._quotas.charge(account.tag, account.quota, job.tokens, job.arrived, job.request.max_tokens_field)
        try:
            yield
        finally:
            self._quotas.settle(account.tag, job.tokens, way.tokens)

    @contextmanager
    def _remembered(self, job: Job) -> Generator[Listener]:
        """Hears a job's answers; those that have no end when it ends are remembered as they are then."""
        answers = Listener()
        try:
            yield answers
        finally:
            for answer in answers.rest():
                self._intake.remember(job, *answer)

    def _refusal_for(self, job: Job) -> Callable[[str], OctavoError]:
        """What the job ends with when it has waited too long: it says what for."""

        def refusal(waited: str) -> OctavoError:
            try:
                self._catalogue.available(job.model)
            except (NoWorker, Draining) as nobody:
                return type(nobody)(f"{nobody}; {waited}")
            return QueueFull(waited)

        return refusal


@dataclass(slots=True)
class _Way:
    """How far a request has come."""

    journey: Journey | None = None
    """None until it begins."""

    @property
    def tokens(self) -> int:
        """That it has taken; none before it was at a worker."""
        return 0 if self.journey is None else self.journey.tokens


def _wish(job: Job, account: Account) -> Wish:
    return Wish(
        line=job.model.name,
        flow=account.tag,
        tokens=job.tokens,
        weight=account.weight,
        priority=job.submission.priority,
        expires=job.deadline,
    )


def _told(job: Job, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    """What the client hears of all that happens."""
    request = job.request
    if request.samples == request.made_samples:
        return events
    return best_of(events, request.samples, tells_logprobs=request.logprobs is not None)
