"""What one gateway knows of each worker: the fleet's figures and what it has sent there itself.

A worker's figures arrive late: through its cache manager, after a step. So every request that is sent somewhere is
reserved here until the figures must contain it. A reservation counts

- as queued prefill until its prompt is computed, or until the second report heard after it was made (the first may
  have left the worker before the request arrived);
- as held positions until the second report, or until it is released;
- after its release as cached positions, until the next report.

Thus nothing is counted twice for long, and a burst between two reports is seen. No clock in here: time is an argument.
Invariant: a reservation exists from `reserve` to `release`, whatever becomes of its worker.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from octavo.ids import Epoch, WorkerId
from octavo.records import FleetUpdate, WorkerInfo

ReservationId = NewType("ReservationId", int)

_REPORTS_UNTIL_CONTAINED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A worker as routing sees it. All counts are tokens."""

    info: WorkerInfo
    heard: float
    """When the fleet last spoke of it."""
    queued_tokens: int
    """Prompt tokens sent there and not yet computed."""
    held_tokens: int
    """Positions of running sequences."""
    cached_tokens: int
    """Positions that are remembered and could be evicted."""


@dataclass(slots=True)
class _Reservation:
    prefill_tokens: int
    sequence_tokens: int
    made_at_report: int


@dataclass(slots=True)
class _Member:
    """A worker of the fleet. `reports` counts what was heard of it, `unreported_cached` what it finished since."""

    info: WorkerInfo
    heard: float
    reports: int = 0
    unreported_cached: int = 0
    reservations: dict[ReservationId, _Reservation] = field(default_factory=dict[ReservationId, _Reservation])

    def hear(self, info: WorkerInfo, now: float) -> None:
        self.info, self.heard = info, now
        self.reports += 1
        self.unreported_cached = 0

    def standing(self) -> Standing:
        block_size, load = self.info.pool.block_size, self.info.load
        unseen = [
            reservation
            for reservation in self.reservations.values()
            if self.reports - reservation.made_at_report < _REPORTS_UNTIL_CONTAINED
        ]
        return Standing(
            info=self.info,
            heard=self.heard,
            queued_tokens=load.queued_prefill_tokens + sum(one.prefill_tokens for one in unseen),
            held_tokens=load.held_blocks * block_size + sum(one.sequence_tokens for one in unseen),
            cached_tokens=load.cached_blocks * block_size + self.unreported_cached,
        )


class Fleet:
    """The workers, by id. One incarnation of a worker is (worker id, epoch)."""

    def __init__(self) -> None:
        self._members: dict[WorkerId, _Member] = {}
        self._reserved: dict[ReservationId, tuple[WorkerId, Epoch]] = {}
        self._next = 0

    def apply(self, update: FleetUpdate, now: float) -> None:
        """Take in what the cache manager says. A worker's new epoch starts without reservations."""
        for info in update.workers:
            member = self._members.get(info.worker_id)
            if member is None or member.info.epoch != info.epoch:
                self._members[info.worker_id] = _Member(info, now)
            else:
                member.hear(info, now)
        named = {info.worker_id for info in update.workers}
        gone = self._members.keys() - named if update.snapshot else set(update.gone)
        for worker in gone:
            self._members.pop(worker, None)

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

    def reserve(self, info: WorkerInfo, *, prefill_tokens: int, sequence_tokens: int) -> ReservationId:
        """Count a request for a worker: tokens it will compute of the prompt, and positions it will hold in all."""
        reservation = ReservationId(self._next)
        self._next += 1
        self._reserved[reservation] = (info.worker_id, info.epoch)
        if (member := self._member(reservation)) is not None:
            member.reservations[reservation] = _Reservation(prefill_tokens, sequence_tokens, member.reports)
        return reservation

    def prefilled(self, reservation: ReservationId) -> None:
        """The prompt of a reserved request has been computed."""
        if held := self._held(reservation):
            held.prefill_tokens = 0

    def release(self, reservation: ReservationId) -> None:
        """A reserved request has ended, in whichever way; its positions are cached now, as far as they were computed.

        A second release of the same reservation does nothing.
        """
        if (member := self._member(reservation)) and (ended := member.reservations.pop(reservation, None)):
            member.unreported_cached += max(0, ended.sequence_tokens - ended.prefill_tokens)
        self._reserved.pop(reservation, None)

    def check(self) -> None:
        """Assert that no worker counts a request that has ended."""
        for worker, member in self._members.items():
            for reservation in member.reservations:
                assert self._reserved.get(reservation) == (worker, member.info.epoch), (worker, reservation)

    def _member(self, reservation: ReservationId) -> _Member | None:
        """The worker of a reservation, if that incarnation of it is there."""
        worker, epoch = self._reserved.get(reservation, (None, None))
        member = None if worker is None else self._members.get(worker)
        return member if member is not None and member.info.epoch == epoch else None

    def _held(self, reservation: ReservationId) -> _Reservation | None:
        """What a reservation counts, unless its worker left since."""
        member = self._member(reservation)
        return member.reservations.get(reservation) if member is not None else None
