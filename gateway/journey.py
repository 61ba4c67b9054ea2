"""One request from its first worker to its last token: over as many workers as that takes.

    visit a worker -> follow its reports -> it is lost, or leaves: visit another one with what is left

The client sees one stream. What it has been told is never told again and never missing: the transcript is the one
place where its tokens are, and what the next worker is asked for is computed from it (gateway.core.carrying).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial

from gateway.core.carrying import Losses, remaining
from gateway.core.events import Event, Finished, Started, Usage
from gateway.core.fleet import WorkerProcess, process_of
from gateway.core.interval import Interval
from gateway.core.transcript import Said, Told, Transcript
from gateway.counters import Counters
from gateway.fleet_view import FleetView
from gateway.intake import Job
from gateway.placement import Placement, Visit
from octavo.errors import Draining, NoWorker, OctavoError, WorkerLost
from octavo.records.fleet import PoolSpec
from octavo.records.serve import Prefilled, Tokens

log = logging.getLogger("octavo.gateway")


class Journeys:
    """What all journeys of one gateway share."""

    def __init__(
        self,
        placement: Placement,
        view: FleetView,
        counters: Counters,
        *,
        max_losses: int,
        max_standstill_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """Give a request up after `max_losses` in a row, or so many seconds without a worker."""
        self.placement = placement
        self.view = view
        self.counters = counters
        self.max_losses = max_losses
        self.max_standstill_seconds = max_standstill_seconds
        self.clock = clock
        self.ended_by: OctavoError | None = None
        """Why no request goes on any more; None while they do."""

    def end(self, reason: OctavoError) -> None:
        """No request goes on after this; those that wait for a worker end with `reason` at once."""
        self.ended_by = reason
        self.view.wake()


class Journey:
    """See above. Belongs to one request."""

    def __init__(self, job: Job, shared: Journeys) -> None:
        """Nothing happens before `events`."""
        self._job = job
        self._shared = shared
        self._clock = shared.clock
        detokenizer = partial(job.model.tokenizer.detokenizer, job.submission.prompt)
        self._transcript = Transcript(job.submission.samples, detokenizer, job.request.stop)
        self._losses = Losses(shared.max_losses)
        self._visits = 0
        self._stood_still = 0.0
        """Seconds without a worker since the last token, or the last loss."""
        self._predicted_tokens: int | None = None
        """Of the prompt, expected at the worker that was the first to compute it."""
        self._first_token: float | None = None
        self._begun_on: PoolSpec | None = None
        """Where the tokens that there are were drawn, once they were to go on elsewhere."""

    @property
    def tokens(self) -> int:
        """That the request has taken by now: none before it was at a worker; then its prompt, and what was drawn."""
        return self._job.prompt_tokens + self._transcript.output_tokens if self._visits else 0

    async def events(self) -> AsyncGenerator[Event]:
        """All that the client is told.

        Raises:
            WorkerLost: too many workers were lost, or none is left.
            Draining: the worker, or this gateway, leaves, and nobody takes the request over.
            NoWorker: nobody came to take it.
            OctavoError: as the worker refused it.
            TimeoutError: the deadline passed.
        """
        failure: OctavoError | None = None
        while True:
            visit = await self._next_visit(failure)
            timer = self._expiry_of(visit)
            try:
                if self._visits == 1:
                    yield _started(self._job, visit)
                while not self._transcript.finished:
                    for event in self._told(visit, await visit.call.hear()):
                        yield event
                usage = self._usage(visit)
                log.debug("request_ended", extra={"request": self._job.request_id, **asdict(usage)})
                yield usage
                return
            except (WorkerLost, Draining) as error:
                failure = error
                self._take_loss(visit, error)
            finally:
                timer.cancel()
                self._shared.placement.close(visit)

    async def _next_visit(self, failure: OctavoError | None) -> Visit:
        """At whichever worker is best for what is left; waits for one, but not for ever."""
        job, shared = self._job, self._shared
        self._transcript.moved()
        parts = (job.submission,) if failure is None else remaining(job.submission, self._transcript.drawn)
        interval, began = Interval(job.stream_interval), self._clock()
        patience_ends = min(job.deadline, began + shared.max_standstill_seconds - self._stood_still)
        while shared.ended_by is None:
            visit = await shared.placement.visit(job.model, parts, self._avoided, interval)
            if visit is not None:
                self._visits += 1
                self._stood_still += self._clock() - began
                shared.counters.carried_over += failure is not None
                return visit
            now = self._clock()
            if now >= job.deadline:
                raise self._late()
            if now >= patience_ends:
                raise failure or NoWorker(f"model: no worker of {job.model.name!r} takes the request now")
            chance = self._losses.next_chance(now)
            await shared.view.until_change(min(patience_ends, chance or patience_ends) - now)
        raise shared.ended_by

    def _avoided(self) -> Collection[WorkerProcess]:
        avoided = self._losses.avoided(self._clock())
        return avoided if self._begun_on is None else {*avoided, *self._shared.view.with_other_weights(self._begun_on)}

    def _take_loss(self, visit: Visit, error: OctavoError) -> None:
        """Learn from the end of a visit; raises it when the request is not to go on."""
        if self._shared.ended_by is not None:  # it is this gateway that leaves, and no worker
            raise self._shared.ended_by
        process = process_of(visit.worker)
        if self._transcript.output_tokens:
            self._begun_on = visit.worker.pool
        if isinstance(error, Draining):
            self._losses.refused(process, self._clock())
        else:
            self._stood_still = 0.0
            self._losses.lost(process, self._clock())
            self._shared.placement.lost(visit)
        if self._losses.hopeless:
            raise error
        log.info(
            "worker_lost_under_request",
            extra={"request": self._job.request_id, "worker": visit.worker.worker_id, "reason": str(error)},
        )

    def _told(self, visit: Visit, said: Sequence[Said]) -> list[Told]:
        """What the client is to be told of what the worker has said."""
        for part in said:
            if isinstance(part, Tokens):
                self._progressed()
            elif isinstance(part, Prefilled):
                if self._predicted_tokens is None:
                    self._predicted_tokens = visit.candidate.cached_tokens
                self._shared.placement.prefilled(visit, part.cached_tokens)
        told = self._transcript.add(said)
        for event in told:
            if isinstance(event, Finished):
                visit.call.stop(event.sample)  # the worker does not see stop strings
        return told

    def _expiry_of(self, visit: Visit) -> asyncio.TimerHandle:
        """What ends the call at the job's deadline."""
        seconds = self._job.deadline - self._clock()
        return asyncio.get_running_loop().call_later(seconds, lambda: visit.call.expire(self._late()))

    def _progressed(self) -> None:
        self._losses.progressed()
        self._stood_still = 0.0
        if self._first_token is None:
            self._first_token = self._clock()
            self._shared.counters.time_to_first_token.add(self._first_token - self._job.arrived)

    def _late(self) -> TimeoutError:
        return TimeoutError(f"no end after {self._job.deadline - self._job.arrived:.1f} s")

    def _usage(self, visit: Visit) -> Usage:
        job, now = self._job, self._clock()
        return Usage(
            prompt_tokens=job.prompt_tokens,
            cached_tokens=self._transcript.cached_tokens,
            predicted_cached_tokens=self._predicted_tokens or 0,
            output_tokens=self._transcript.output_tokens,
            worker_id=visit.worker.worker_id,
            carried_over=self._visits - 1,
            time_to_first_token_seconds=(now if self._first_token is None else self._first_token) - job.arrived,
            total_seconds=now - job.arrived,
        )


def _started(job: Job, visit: Visit) -> Started:
    return Started(
        request_id=job.request_id,
        worker_id=visit.worker.worker_id,
        prompt_tokens=job.prompt_tokens,
        predicted_cached_tokens=visit.candidate.cached_tokens,
        index_state=visit.index_state,
        prompt_ids=job.submission.prompt,
    )
