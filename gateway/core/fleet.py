"""What one gateway knows of each worker: the fleet's figures, and what it has seen itself since they were taken.

A worker's figures arrive late: through its cache manager, after a step, at most every tenth of a second. Requests come
faster than that, so what this gateway has sent and seen end meanwhile is put on top of the figures:

- a request is *reserved* from the moment it is sent; its prompt counts as queued and its positions as held until the
  second report of its worker (the first may have left before the request arrived), the prompt only until it has been
  computed;
- the blocks of a prompt that was sent count as a hit there for the next one that begins alike, until it ends: by then
  the prefix index knows of them;
- of the prompts that a report calls queued, those that this gateway sent count as what no hit covers of them: a worker
  knows its hits only when it comes to a prompt, and calls all of it queued until then;
- a prompt that was computed, or a request that ended, since the last report is taken out of that report's figures,
  and the positions it leaves are cached.

Thus a burst between two reports is seen, and hardly anything is counted twice. Time is an argument.

Each of several cache managers speaks for the workers that attend it. A worker may go from one to another: its larger
epoch counts, whoever says it, and its process is the same, so what was sent there still counts. A manager that is away
says nothing, and its workers stay as they were; one that has come back without them is given GRACE_SECONDS until they
are there too. Meanwhile nobody vouches for them, so one to which a stream is lost is gone.

What was learned of a worker's books holds for those books only: hits that were found in those of an earlier epoch are
dropped (`credited`).

Invariant: a reservation exists from `reserve` to `release`, whatever becomes of its worker.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.core.in_flight import Blocks, Hit, PromptBlocks
from gateway.core.reserved import Reservation, ReservationId, Reserved
from octavo.ids import CacheEpoch, Epoch, Incarnation, WorkerId
from octavo.records.fleet import FleetUpdate, WorkerInfo

WorkerProcess = tuple[WorkerId, Incarnation]

GRACE_SECONDS = 2.0
"""For a worker to come back to a manager that has started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A worker as routing sees it. All counts are tokens."""

    info: WorkerInfo
    queued_tokens: int
    """Prompt tokens sent there and not yet computed."""
    queued_prompts: int
    """Prompts that wait there, or are being computed."""
    held_tokens: int
    """Positions of running sequences."""
    cached_tokens: int
    """Positions that are remembered and could be evicted."""
    settling_tokens: int = 0
    """Of prompts that were computed of late: what no report counts as held for certain."""


@dataclass(slots=True)
class _SinceReport:
    """What this gateway saw after the last report, in tokens, that the report does not know."""

    computed: int = 0
    ended: int = 0
    cached: int = 0


@dataclass(slots=True)
class _Member:
    """One worker process."""

    info: WorkerInfo
    manager: str
    """Who spoke of it last."""
    vouched_for: bool = True
    """Its manager is there and has it in the fleet."""
    leaves_at: float | None = None
    """When it counts as gone, unless a manager speaks of it before."""
    since: _SinceReport = field(default_factory=_SinceReport)
    reserved: Reserved = field(default_factory=Reserved)

    def hear(self, info: WorkerInfo, manager: str) -> None:
        self.info, self.manager = info, manager
        self.vouched_for, self.leaves_at = True, None
        self.reserved.reported()
        self.since = _SinceReport()

    def computed(self, one: Reservation) -> None:
        """The report, if it contains this prompt, may still call all of it queued: hits are known only later."""
        if self.reserved.may_be_reported(one):
            self.since.computed += one.prompt_tokens

    def ended(self, one: Reservation) -> None:
        if self.reserved.may_be_reported(one):
            self.since.ended += one.new_positions
        self.since.cached += one.new_positions

    def standing(self) -> Standing:
        """In constant time: a request asks every worker for it."""
        block_size, load = self.info.pool.block_size, self.info.load
        unseen, perhaps = self.reserved.unseen, self.reserved.perhaps
        held = max(0, load.held_blocks * block_size - self.since.ended)
        return Standing(
            info=self.info,
            queued_tokens=self._queued_tokens(),
            queued_prompts=self._queued_prompts(),
            held_tokens=held + unseen.new_positions + perhaps.new_positions,
            cached_tokens=load.cached_blocks * block_size + self.since.cached,
            settling_tokens=unseen.settling_tokens + perhaps.settling_tokens,
        )

    def _queued_tokens(self) -> int:
        """What this gateway knows of net of hits, and whatever else the report tells of.

        A report that tells of less than what it contains for certain was taken while that was being computed.
        """
        unseen, perhaps, contained = self.reserved.unseen, self.reserved.perhaps, self.reserved.contained
        reported = max(0, self.info.load.queued_prefill_tokens - self.since.computed)
        others = max(0, reported - perhaps.prompt_tokens - contained.prompt_tokens)
        own = (
            contained.prefill_tokens if reported >= contained.prompt_tokens else min(contained.prefill_tokens, reported)
        )
        return others + unseen.prefill_tokens + perhaps.prefill_tokens + own

    def _queued_prompts(self) -> int:
        """A report counts sequences, this gateway requests; the larger number is the one that knows more."""
        sent = self.reserved.unseen.prompts + self.reserved.perhaps.prompts + self.reserved.contained.prompts
        return max(sent, self.info.load.waiting_sequences)


class Fleet:
    """The workers, by id. A new process under an old id is another worker: nothing of the old one counts for it."""

    def __init__(self) -> None:
        self._members: dict[WorkerId, _Member] = {}
        self._reserved: dict[ReservationId, WorkerProcess] = {}
        self._last = 0

    def apply(self, update: FleetUpdate, now: float, manager: str) -> None:
        """Take in what a cache manager says."""
        for info in update.workers:
            self._hear(info, manager)
        for worker in update.gone:
            member = self._members.get(worker)
            if member is not None and member.manager == manager:
                del self._members[worker]
        if update.snapshot:
            named = {info.worker_id for info in update.workers}
            for member in self._of(manager):
                if member.info.worker_id not in named:
                    member.vouched_for, member.leaves_at = False, now + GRACE_SECONDS

    def manager_away(self, manager: str) -> None:
        """A manager says nothing any more."""
        for member in self._of(manager):
            member.vouched_for = False

    def forget_missing(self, now: float) -> None:
        """Drop the workers that have not come back in time."""
        for worker, member in list(self._members.items()):
            if member.leaves_at is not None and member.leaves_at <= now:
                del self._members[worker]

    def stream_lost(self, worker: WorkerInfo) -> None:
        """A stream to a worker was lost: if nobody vouches for it, it is gone."""
        member = self._members.get(worker.worker_id)
        if member is not None and member.info.incarnation == worker.incarnation and not member.vouched_for:
            del self._members[worker.worker_id]

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Everyone there is, draining ones included."""
        return tuple(member.info for member in self._members.values())

    @property
    def reservations(self) -> int:
        """Requests that were sent somewhere and have not ended."""
        return len(self._reserved)

    def standings(self, workers: Iterable[WorkerId]) -> tuple[Standing, ...]:
        """How these workers stand; those that are not in the fleet are left out."""
        return tuple(self._members[worker].standing() for worker in workers if worker in self._members)

    def credited(self, asked: Iterable[WorkerInfo], found: Mapping[WorkerId, int]) -> dict[WorkerId, int]:
        """Of the tokens that the prefix index found at workers, those of the books that the workers still have.

        `asked` is who was asked about, as they were then. An answer may take longer than a lease: what was found in the
        books of another epoch, or from before a reset, says nothing of the worker that there is now.
        """
        unchanged = (info.worker_id for info in asked if self._books_of(info.worker_id) == _books(info))
        return {worker: found[worker] for worker in unchanged if worker in found}

    def hits(
        self,
        prompt: PromptBlocks,
        workers: Iterable[WorkerInfo],
        indexed: Mapping[WorkerId, int] = MappingProxyType({}),
        claimed: Mapping[WorkerId, int] = MappingProxyType({}),
    ) -> dict[WorkerId, Hit]:
        """What each of these workers has or will have of a prompt; those of which nothing is known are left out.

        Given the leading tokens that the prefix index says it holds, and those that it will hold by gateways' claims.
        """
        members = ((info.worker_id, self._members.get(info.worker_id)) for info in workers)
        return {
            worker: prompt.hit(
                member.info,
                indexed.get(worker, 0),
                member.reserved.alike(prompt.of(member.info)),
                claimed.get(worker, 0),
            )
            for worker, member in members
            if member is not None and (worker in indexed or worker in claimed or member.reserved)
        }

    def reserve(
        self, info: WorkerInfo, *, prompt_tokens: int, cached_tokens: int, output_tokens: int, blocks: Blocks = ()
    ) -> ReservationId:
        """Count a request for a worker that is expected to hold `cached_tokens` of its prompt when its turn comes."""
        self._last += 1
        reservation = ReservationId(self._last)
        self._reserved[reservation] = process_of(info)
        if (member := self._member(reservation)) is not None:
            member.reserved.add(
                reservation,
                prompt_tokens=prompt_tokens,
                prefill_tokens=prompt_tokens - cached_tokens,
                output_tokens=output_tokens,
                blocks=blocks,
            )
        return reservation

    def prefilled(self, reservation: ReservationId) -> None:
        """The prompt of a reserved request has been computed; saying so again changes nothing."""
        member = self._member(reservation)
        if member is not None and (one := member.reserved.compute(reservation)) is not None:
            member.computed(one)

    def release(self, reservation: ReservationId) -> None:
        """A reserved request has ended, in whichever way; saying so again changes nothing."""
        self.prefilled(reservation)  # it waits for its prompt no longer, even if that was never computed
        member = self._member(reservation)
        if member is not None and (one := member.reserved.end(reservation)) is not None:
            member.ended(one)
        self._reserved.pop(reservation, None)

    def check(self) -> None:
        """Assert that no worker counts a request that has ended, and that what it counts of the others is right."""
        for worker, member in self._members.items():
            member.reserved.check()
            for reservation in member.reserved:
                assert self._reserved.get(reservation) == process_of(member.info), (worker, reservation)

    def _hear(self, info: WorkerInfo, manager: str) -> None:
        """Of two processes under one id, the one with the larger epoch is the worker."""
        member = self._members.get(info.worker_id)
        if member is not None and member.info.incarnation == info.incarnation:
            if member.info.epoch <= info.epoch:
                member.hear(info, manager)
        elif member is None or member.info.epoch < info.epoch:
            self._members[info.worker_id] = _Member(info, manager)

    def _books_of(self, worker: WorkerId) -> tuple[Incarnation, Epoch, CacheEpoch] | None:
        member = self._members.get(worker)
        return None if member is None else _books(member.info)

    def _of(self, manager: str) -> list[_Member]:
        return [member for member in self._members.values() if member.manager == manager]

    def _member(self, reservation: ReservationId) -> _Member | None:
        """The worker of a reservation, if that process is there."""
        worker, incarnation = self._reserved.get(reservation, (None, None))
        member = None if worker is None else self._members.get(worker)
        return member if member is not None and member.info.incarnation == incarnation else None


def _books(worker: WorkerInfo) -> tuple[Incarnation, Epoch, CacheEpoch]:
    """What is another one when published blocks may be gone. The epoch alone is not: two managers may give the same."""
    return worker.incarnation, worker.epoch, worker.cache_epoch


def process_of(worker: WorkerInfo) -> WorkerProcess:
    """What stays the same when a worker registers again."""
    return worker.worker_id, worker.incarnation
