"""A place for a request: look up, route, reserve, send to a worker; and to the next one when that is lost.

Invariant: whatever was taken for a request at a worker (a reservation, a call) is given back when its visit is closed.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.catalogue import Catalogue, ServedModel
from gateway.core.fleet import Fleet, ReservationId, WorkerProcess
from gateway.core.in_flight import Blocks, PromptBlocks
from gateway.core.interval import Interval
from gateway.core.room import Rooms
from gateway.core.routing import Candidate, Choice, Work, choose
from gateway.counters import Counters
from gateway.prefix_lookup import PrefixLookup
from gateway.worker_client import WorkerCall, Workers
from octavo.records.fleet import WorkerInfo
from octavo.records.generate import IndexState
from octavo.records.serve import Submission


@dataclass(frozen=True, slots=True)
class Visit:
    """A request, or what is left of it, at a worker."""

    candidate: Candidate
    reservation: ReservationId
    call: WorkerCall
    index_state: IndexState
    """Of the look-up that it was chosen with."""

    @property
    def worker(self) -> WorkerInfo:
        """Where it is."""
        return self.candidate.standing.info


@dataclass(frozen=True, slots=True)
class Judgement:
    """Where a request would go."""

    choice: Choice
    work: Work
    prompt: PromptBlocks
    unpublished: Blocks
    """Of the prompt, what the chosen worker has not published."""
    index_state: IndexState
    """Of the look-up that it was made with."""


class PromptRoom:
    """Room for one request at whichever worker has it (gateway/core/room.py), from when it is let in till it is there.

    Where there is nobody at all, there is no room; one for whom everybody who is there is too small waits for nothing.
    """

    def __init__(
        self,
        rooms: Rooms,
        prompt: PromptBlocks,
        fitting: Callable[[], Sequence[WorkerInfo]],
        is_served: Callable[[], bool],
    ) -> None:
        self._rooms = rooms
        self._prompt = prompt
        self._fitting = fitting
        self._is_served = is_served

    def take(self) -> bool:
        """Take it where there is most of it now; False where there is none."""
        workers = self._fitting()
        return self._rooms.take(self._prompt, workers) if workers else self._is_served()

    def give_back(self) -> None:
        """The request is counted at a worker now, or goes nowhere; saying so again changes nothing."""
        self._rooms.give_back(self._prompt)


class Placement:
    """Chooses workers and sends requests there."""

    def __init__(
        self, fleet: Fleet, catalogue: Catalogue, lookup: PrefixLookup, workers: Workers, counters: Counters
    ) -> None:
        """Choose among those whom `catalogue` has for a model, by what `fleet` and `lookup` know of them."""
        self._fleet = fleet
        self._catalogue = catalogue
        self._lookup = lookup
        self._workers = workers
        self._counters = counters
        self._rooms = Rooms(fleet)
        self._draw: Callable[[], float] = random.Random().random

    async def visit(
        self,
        model: ServedModel,
        parts: Sequence[Submission],
        avoided: Callable[[], Collection[WorkerProcess]],
        interval: Interval,
    ) -> Visit | None:
        """Send the parts of a request, at least one, to one worker; None if nobody takes it now.

        `interval` says how often its tokens are told.
        """
        judged = await self.judge(model, parts, avoided)
        if judged is None:
            return None
        # No await from here on: the choice was made from this picture.
        chosen, work = judged.choice.chosen, judged.work
        call = self._workers.submit(chosen.standing.info, parts, interval)  # first: what cannot be sent is not counted
        reservation = self._fleet.reserve(
            chosen.standing.info,
            prompt_tokens=len(work.prompt),
            cached_tokens=chosen.cached_tokens,
            output_tokens=work.output_tokens,
            blocks=judged.prompt.of(chosen.standing.info),
        )
        self._lookup.claim(chosen.standing.info, judged.unpublished)
        return Visit(chosen, reservation, call, judged.index_state)

    async def judge(
        self,
        model: ServedModel,
        parts: Sequence[Submission],
        avoided: Callable[[], Collection[WorkerProcess]] = tuple[WorkerProcess, ...],
    ) -> Judgement | None:
        """Where the parts of a request would go, and why; None if nobody takes it now. Nothing is sent.

        No await after the look-up: the choice is made from one picture. `avoided` is asked before and after it.
        """
        longest = max(parts, key=lambda part: len(part.prompt))
        asked = self._fitting(model, longest, avoided())
        if not asked:
            return None
        prompt, work = PromptBlocks(longest.prompt, longest.scope), work_of(parts, longest)
        found = await self._lookup.hits(prompt, asked)
        indexed = self._fleet.credited(asked, found.tokens)
        self._counters.outdated_hits += len(found.tokens) - len(indexed)
        fitting = self._fitting(model, longest, avoided())
        if not fitting:
            return None
        standings = self._fleet.standings([worker.worker_id for worker in fitting])
        claimed = self._fleet.credited(asked, found.claimed)
        choice = choose(work, standings, self._fleet.hits(prompt, fitting, indexed, claimed), self._draw)
        chosen = choice.chosen.standing.info
        published = indexed.get(chosen.worker_id, 0) // chosen.pool.block_size
        return Judgement(choice, work, prompt, prompt.of(chosen)[published:], found.state)

    def room_for(self, model: ServedModel, submission: Submission) -> "PromptRoom":
        """Room for a request at some worker, which nobody has taken yet."""
        return PromptRoom(
            self._rooms,
            PromptBlocks(submission.prompt, submission.scope),
            lambda: self._fitting(model, submission, ()),
            lambda: bool(self._catalogue.taking(model)),
        )

    def prefilled(self, visit: Visit, cached_tokens: int) -> None:
        """The worker has computed the prompt, all but so many tokens of it."""
        self._fleet.prefilled(visit.reservation)
        predicted = visit.candidate.cached_tokens
        self._counters.predicted_cached_tokens += predicted
        self._counters.delivered_cached_tokens += cached_tokens
        self._counters.undelivered_cached_tokens += max(0, predicted - cached_tokens)

    def lost(self, visit: Visit) -> None:
        """The stream to the worker was lost under a visit."""
        self._fleet.stream_lost(visit.worker)

    def close(self, visit: Visit) -> None:
        """Give back what the visit took; a worker that is still at it is told to stop."""
        visit.call.close()
        self._fleet.release(visit.reservation)

    def _fitting(self, model: ServedModel, longest: Submission, avoided: Collection[WorkerProcess]) -> list[WorkerInfo]:
        return self._catalogue.fitting(model, longest.longest_sequence, but=avoided)


def work_of(parts: Sequence[Submission], longest: Submission) -> Work:
    """What the parts of a request take together: one prompt, and every position that is not in it."""
    drawn = sum(part.sequences * (part.max_tokens - part.carried_tokens) for part in parts)
    carried = sum(part.carried_tokens for part in parts) - longest.carried_tokens
    return Work(prompt=longest.prompt, output_tokens=drawn + carried)
