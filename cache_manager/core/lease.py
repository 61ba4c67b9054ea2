"""Which workers there are: a registration is answered with an epoch and held for as long as it is renewed.

Invariants:
- Epochs strictly grow. They start at the time in milliseconds, so a manager that has forgotten everything still gives
  larger ones than before, unless it gave more than one a millisecond for as long as it was away. A worker says which
  it was given last, by whatever manager, so that its own grow in any case.
- At most one lease a worker: a later registration ends the earlier one, whose epoch is then stale.
- Of two processes under one worker id the one that first registered later stays. So the two never take turns, whichever
  managers they attend and however often those forget.

`now` is in seconds since 1970 and must not go back within a process: the caller adds a monotonic clock to the time at
its start.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.errors import InvalidRequest, StaleEpoch, Superseded, UnknownWorker
from octavo.ids import Epoch, WorkerId
from octavo.records.attend import Registration

MAX_EPOCH = 1 << 62
"""The largest that a worker can have been given. There is room above it for those to come."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """A worker's right to its pool. Only the book changes it."""

    registration: Registration
    epoch: Epoch
    expires_at: float
    """Seconds since 1970; from this moment on the lease is over."""
    draining: bool = False
    """The worker finishes what it has and takes no new requests."""

    @property
    def worker_id(self) -> WorkerId:
        """Whose lease it is."""
        return self.registration.worker_id

    @property
    def born(self) -> Epoch:
        """The first epoch of its process."""
        return self.registration.first_epoch or self.epoch


class LeaseBook:
    """All leases of one manager."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._last_epoch = Epoch(0)
        self._leases: dict[WorkerId, Lease] = {}

    def __len__(self) -> int:
        """Workers that hold a lease, expired ones included until `expire` is called."""
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """The leases, the oldest registration first."""
        return iter(tuple(self._leases.values()))

    def next_epoch(self, registration: Registration, now: float) -> Epoch:
        """The epoch that the registration would be given now.

        Raises:
            InvalidRequest: its epochs cannot have been given to it.
            Superseded: another process under its worker id has come later, and holds a lease.
        """
        first, last = registration.first_epoch, registration.last_epoch
        if not first <= last <= MAX_EPOCH:
            raise InvalidRequest(
                f"register: first_epoch {first}, last_epoch {last}, wanted in order, at most {MAX_EPOCH}"
            )
        holder = self._leases.get(registration.worker_id)
        if (
            holder is not None
            and holder.registration.incarnation != registration.incarnation
            and holder.expires_at > now
            and 0 < first < holder.born
        ):
            raise Superseded(
                f"worker {registration.worker_id} is another process, which first registered in epoch {holder.born}; "
                f"this one did in epoch {first}"
            )
        return Epoch(max(self._last_epoch + 1, last + 1, int(now * 1000)))

    def register(self, registration: Registration, now: float) -> Lease:
        """Give a new lease. One that the same worker held before is superseded. Raises as `next_epoch`."""
        self._last_epoch = self.next_epoch(registration, now)
        self._leases.pop(registration.worker_id, None)
        lease = Lease(registration=registration, epoch=self._last_epoch, expires_at=now + self._lease_seconds)
        self._leases[registration.worker_id] = lease
        return lease

    def excuse(self, since: float, until: float) -> None:
        """Nobody could be heard between these moments: the leases that held then are as much longer."""
        for lease in self._leases.values():
            if lease.expires_at > since:
                lease.expires_at += until - since

    def lease(self, worker_id: WorkerId) -> Lease:
        """The worker's lease. Raises UnknownWorker."""
        lease = self._leases.get(worker_id)
        if lease is None:
            raise UnknownWorker(f"worker {worker_id} is not in the fleet of {len(self._leases)}")
        return lease

    def renew(self, worker_id: WorkerId, epoch: Epoch, now: float) -> Lease:
        """Extend a lease because its worker was heard.

        Raises:
            StaleEpoch: the lease has expired, was superseded or ended.
        """
        lease = self._current(worker_id, epoch, now)
        lease.expires_at = now + self._lease_seconds
        return lease

    def require(self, worker_id: WorkerId, epoch: Epoch, now: float) -> Lease:
        """The lease of that epoch. Raises StaleEpoch as `renew` does."""
        return self._current(worker_id, epoch, now)

    def drain(self, worker_id: WorkerId, epoch: Epoch, now: float) -> Lease:
        """Note that the worker takes no new requests. Cannot be taken back within an epoch.

        Raises:
            StaleEpoch: the lease has expired, was superseded or ended.
        """
        lease = self._current(worker_id, epoch, now)
        lease.draining = True
        return lease

    def end(self, worker_id: WorkerId, epoch: Epoch) -> Lease | None:
        """Give a lease back before its time. Returns it, or None if that epoch is over anyway."""
        lease = self._leases.get(worker_id)
        if lease is None or lease.epoch != epoch:
            return None
        return self._leases.pop(worker_id)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Drop the leases that have run out, and return them."""
        over = tuple(lease for lease in self._leases.values() if lease.expires_at <= now)
        for lease in over:
            del self._leases[lease.worker_id]
        return over

    def next_expiry(self) -> float | None:
        """When `expire` can have something to do at the earliest; None without leases."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def check(self) -> None:
        """Assert the invariants."""
        for worker_id, lease in self._leases.items():
            assert worker_id == lease.worker_id, f"the lease of {lease.worker_id} stands under {worker_id}"
            assert lease.epoch <= self._last_epoch, f"epoch {lease.epoch} was never given, last {self._last_epoch}"
        epochs = {lease.epoch for lease in self._leases.values()}
        assert len(epochs) == len(self._leases), f"{len(self._leases)} leases have {len(epochs)} epochs"

    def _current(self, worker_id: WorkerId, epoch: Epoch, now: float) -> Lease:
        lease = self._leases.get(worker_id)
        if lease is None:
            raise StaleEpoch(f"epoch {epoch} of worker {worker_id} is over, it has no lease")
        if lease.epoch != epoch:
            raise StaleEpoch(f"epoch {epoch} of worker {worker_id} is over, the current one is {lease.epoch}")
        if lease.expires_at <= now:
            raise StaleEpoch(f"epoch {epoch} of worker {worker_id} expired at {lease.expires_at}, it is {now}")
        return lease
