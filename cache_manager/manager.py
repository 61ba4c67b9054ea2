"""The single writer of every attending worker's books, of its lease, and of what is said about either.

One event loop calls it and no method awaits, so each happens whole. A call that raises has changed nothing. Within an
epoch the exchanges are numbered from 1: repeating the last one is answered with the same grant and changes nothing, so
a worker that does not know whether its message arrived sends it again.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from cache_manager.allowances import SEGMENTED, EvictionSettings
from cache_manager.change_queue import ChangeQueue
from cache_manager.core.books import empty_books
from cache_manager.core.cache_epochs import CacheEpochs, require_cache_epoch
from cache_manager.core.changes import Cleared, LedgerStats
from cache_manager.core.lease import Lease, LeaseBook
from cache_manager.core.ledger import Ledger
from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from cache_manager.core.restoration import Restoration
from cache_manager.core.usage import PoolUsage
from cache_manager.fleet_feed import PACE_SECONDS, FleetFeed, Subscription
from octavo.errors import Draining, InvalidRequest, OctavoError, StaleEpoch
from octavo.ids import CacheEpoch, Epoch, SequenceId, WorkerId
from octavo.index_schema import index_key
from octavo.records.attend import Exchange, Grant, Registered, Registration
from octavo.records.fleet import PoolSpec, WorkerInfo, WorkerLoad
from octavo.records.insight import CacheReset, PoolAudit, PromptExplanation, SequenceDescription
from octavo.records.scope import Scope
from octavo.settings import split_address

log = logging.getLogger("octavo.cache_manager.manager")

MAX_WORKER_ID_CHARACTERS = 128

_ONE_MODEL = ("model_digest", "adapter_digest", "tokenizer_digest", "dtype", "kv_dtype", "block_size")
"""What all workers have in common that serve a model under one name."""

Ended = Callable[[OctavoError], None]
"""Is told why, once, when an epoch ends."""


@dataclass(slots=True)
class ManagerCounts:
    """Since the process started."""

    registrations: int = 0
    restorations: int = 0
    """Of the registrations, those whose books were opened from an inventory."""
    unbalanced: int = 0
    """Of those books, the ones that did not stand an audit."""
    gone: Counter[str] = field(default_factory=Counter[str])
    """Epochs that ended, by reason: one of a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUsage:
    """One worker's books, for whoever watches them."""

    pool: PoolUsage
    stats: LedgerStats
    exchanges: int
    """Applied in this epoch."""


@dataclass(slots=True, kw_only=True)
class _Member:
    """A worker that attends."""

    lease: Lease
    ledger: Ledger
    index: str
    """The key of its prefix index."""
    ended: Ended
    grant: Grant | None = None
    """The answer to its last exchange."""
    load: WorkerLoad = field(default_factory=WorkerLoad)

    def info(self) -> WorkerInfo:
        """What the fleet is told. The blocks are counted here, whatever the worker says."""
        return WorkerInfo(
            worker_id=self.lease.worker_id,
            epoch=self.lease.epoch,
            address=self.lease.registration.address,
            pool=self.lease.registration.pool,
            load=self.load._replace(held_blocks=self.ledger.num_held, cached_blocks=self.ledger.num_cached),
            draining=self.lease.draining,
            incarnation=self.lease.registration.incarnation,
            cache_epoch=self.ledger.cache_epoch,
        )


class Manager:
    """Ledgers by worker, leases, subscribers, and the queue to the mirror.

    Invariant: a worker has a lease, books and an open index, or none of them.
    """

    def __init__(
        self,
        changes: ChangeQueue,
        *,
        lease_seconds: float,
        min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS,
        eviction: EvictionSettings = SEGMENTED,
        audit_every_exchange: bool = False,
        pace_seconds: float = PACE_SECONDS,
    ) -> None:
        """What books are opened with, and the pace.

        A block is copied for at least `min_copy_tokens` of its tokens (0: never). `pace_seconds` is the least time
        between two updates that tell a subscriber of loads only.
        """
        self._changes = changes
        self.lease_seconds = lease_seconds
        self._min_copy_tokens = min_copy_tokens
        self._eviction = eviction
        self._audit_every_exchange = audit_every_exchange
        self._leases = LeaseBook(lease_seconds)
        self._cache_epochs = CacheEpochs()
        self._members: dict[WorkerId, _Member] = {}
        self._feed = FleetFeed(self._members, pace_seconds)
        self._leaving = False
        self.counts = ManagerCounts()
        self.restored: asyncio.Queue[tuple[WorkerId, Epoch]] = asyncio.Queue()
        """Books that were opened from an inventory and are to be audited."""
        self._alone = asyncio.Event()
        self._alone.set()

    # ---- workers ----

    def restoration(self, registration: Registration, now: float) -> Restoration:
        """What takes in the inventory of a worker that may register. Nothing is kept of it but by `register`.

        Raises:
            OctavoError: as `register`.
        """
        self._require_welcome(registration, now)
        return Restoration(registration.pool, eviction=self._eviction.policy(registration.pool), now=now)

    def register(
        self, registration: Registration, now: float, ended: Ended, restoration: Restoration | None = None
    ) -> Registered:
        """Open a worker's books: as they were restored, or empty. Those that it had are dropped, their epoch is stale.

        Raises:
            InvalidRequest: there can be no such worker or no such pool, or its model is another one here.
            Superseded: another process has taken the worker's place.
            Draining: the manager leaves.
        """
        epoch = self._require_welcome(registration, now)
        ledger = self._opened(registration, epoch, restoration)
        before = self._members.get(registration.worker_id)
        lease = self._leases.register(registration, now)
        if before is not None:
            self._forget(before.lease, "superseded", StaleEpoch(f"superseded by epoch {lease.epoch}"))
        member = _Member(lease=lease, ledger=ledger, index=index_key(registration.worker_id, lease.epoch), ended=ended)
        self._members[registration.worker_id] = member
        self.counts.registrations += 1
        if restoration is not None:
            self.counts.restorations += 1
            self.restored.put_nowait((registration.worker_id, lease.epoch))
        self._changes.open(member.index, ledger.published)
        if registration.last_epoch:  # what a manager that died has left
            self._changes.drop([index_key(registration.worker_id, registration.last_epoch)])
        self._alone.clear()
        self._feed.note(registration.worker_id, urgent=True)
        log.info("worker_registered", extra=_described(lease))
        return Registered(lease.epoch, self.lease_seconds, ledger.cache_epoch)

    def _require_welcome(self, registration: Registration, now: float) -> Epoch:
        """Returns the epoch that the worker would be given."""
        if self._leaving:
            raise Draining("this cache manager leaves: it registers nobody")
        _require_possible(registration)
        for lease in self._leases:
            if lease.worker_id != registration.worker_id:
                _require_same_model(registration.pool, lease)
        return self._leases.next_epoch(registration, now)

    def _opened(self, registration: Registration, epoch: Epoch, restoration: Restoration | None) -> Ledger:
        """The books of a worker that may register, in the cache epoch that it shall have."""
        latest = self._cache_epochs.heard(registration.cache_epoch)
        if restoration is None:
            pool = registration.pool
            books = empty_books(pool, eviction=self._eviction.policy(pool))
            return Ledger(pool, epoch, cache_epoch=latest, min_copy_tokens=self._min_copy_tokens, books=books)
        ledger = restoration.open(epoch, registration.cache_epoch, min_copy_tokens=self._min_copy_tokens)
        least = self._cache_epochs.least(registration.worker_id)
        if ledger.cache_epoch < least:
            ledger.reset(least)
        return ledger

    def exchange(self, worker: WorkerId, exchange: Exchange, now: float) -> Grant:
        """Take in what a worker did and grant what its next step needs.

        Raises:
            StaleEpoch: the epoch is over, or never was.
            InvalidRequest: the step is neither the last one nor the next, or a part of the exchange is wrong.
            UnknownSequence: a part names a sequence that is not in the books.
        """
        self._leases.require(worker, exchange.epoch, now)
        member = self._members[worker]
        grant = member.grant
        if grant is None or grant.step != exchange.step:
            grant = self._next(member, exchange, now)
        self._leases.renew(worker, exchange.epoch, now)
        return grant

    def _next(self, member: _Member, exchange: Exchange, now: float) -> Grant:
        """Apply an exchange that was not seen before."""
        last = 0 if member.grant is None else member.grant.step
        if exchange.step != last + 1:
            raise InvalidRequest(f"exchange.step: {exchange.step}, the last one was {last}")
        member.ledger.tell_time(now)
        member.grant = member.ledger.apply(exchange)
        member.load = exchange.load
        self._changes.put(member.index, member.ledger.take_changes())
        leaves = exchange.draining and not member.lease.draining
        if leaves:
            self._leases.drain(member.lease.worker_id, exchange.epoch, now)
        self._feed.note(member.lease.worker_id, urgent=leaves)
        if self._audit_every_exchange:
            member.ledger.check()
        return member.grant

    def expire(self, now: float) -> None:
        """Forget the workers that were not heard for a lease time."""
        for lease in self._leases.expire(now):
            self._forget(lease, "expired", StaleEpoch(f"expired: not heard for {self.lease_seconds:g} s"))

    def stream_lost(self, worker: WorkerId, epoch: Epoch) -> None:
        """Forget a worker that dropped its stream, unless that epoch is over anyway. One that was draining has left."""
        lease = self._leases.end(worker, epoch)
        if lease is not None:
            self._forget(
                lease, "left" if lease.draining else "stream_lost", StaleEpoch("the stream of its registration is lost")
            )

    def was_busy(self, since: float, until: float) -> None:
        """The caller kept the loop to itself between these moments, so what workers said meanwhile is heard late."""
        self._leases.excuse(since, until)

    def next_expiry(self) -> float | None:
        """When `expire` can have something to do at the earliest; None while nobody attends."""
        return self._leases.next_expiry()

    def audit(self, worker: WorkerId) -> PoolAudit:
        """Recompute a worker's books and compare. Raises UnknownWorker."""
        self._leases.lease(worker)
        return self._members[worker].ledger.audit()

    def audit_parts(self, worker: WorkerId, epoch: Epoch) -> Iterator[list[str]]:
        """What is wrong with books that are in use, part by part. Ends early with their epoch."""
        member = self._members.get(worker)
        if member is None or member.lease.epoch != epoch:
            return
        for violations in member.ledger.audit_parts():
            yield violations
            if self._members.get(worker) is not member:
                return

    def describe(self, worker: WorkerId, sequence: SequenceId) -> SequenceDescription:
        """Where one of a worker's sequences lives. Raises UnknownWorker, UnknownSequence."""
        self._leases.lease(worker)
        return self._members[worker].ledger.describe(sequence)

    def explain(self, worker: WorkerId, tokens: Sequence[int], scope: Scope) -> PromptExplanation:
        """What a worker has of a prompt, and why no more.

        Raises:
            UnknownWorker: it is not in the fleet.
            InvalidRequest: no such prompt can run there.
        """
        self._leases.lease(worker)
        return self._members[worker].ledger.explain(tokens, scope)

    def reset(self, worker: WorkerId | None, now: float) -> CacheReset:
        """Forget what a worker, or every worker, has published. Requests that run go on; see Ledger.reset.

        Raises:
            UnknownWorker: it is not in the fleet.
        """
        if worker is not None:
            self._leases.lease(worker)
        members = list(self._members.values()) if worker is None else [self._members[worker]]
        cache_epoch = self._cache_epochs.raised(worker, now)
        blocks = sum(self._reset(member, cache_epoch) for member in members)
        log.info("cache_reset", extra={"cache_epoch": cache_epoch, "workers": len(members), "blocks": blocks})
        return CacheReset(cache_epoch=cache_epoch, workers=len(members), blocks=blocks)

    def _reset(self, member: _Member, cache_epoch: CacheEpoch) -> int:
        blocks = member.ledger.reset(cache_epoch)
        self._changes.put(member.index, member.ledger.take_changes())
        self._feed.note(member.lease.worker_id, urgent=True)
        return blocks

    def usage(self) -> Iterator[tuple[WorkerId, WorkerUsage]]:
        """How each worker's books stand, and what has happened in them."""
        for worker, member in self._members.items():
            exchanges = 0 if member.grant is None else member.grant.step
            yield worker, WorkerUsage(pool=member.ledger.usage(), stats=member.ledger.stats(), exchanges=exchanges)

    # ---- the fleet ----

    @contextlib.contextmanager
    def subscribe(self) -> Generator[Subscription]:
        """A view of the fleet for as long as the context lasts."""
        subscription = self._feed.subscribe()
        try:
            yield subscription
        finally:
            self._feed.unsubscribe(subscription)

    # ---- the end ----

    def hand_over(self) -> None:
        """Register nobody from now on, and send away those who stay: they have the next manager, or wait for one.

        Workers that are about to leave themselves are served to their end. Gateways are told nothing more: to them the
        manager is away, and the workers are as they were until another manager speaks of them.
        """
        self._leaving = True
        self._feed.close()
        for lease in self._leases:
            if not lease.draining:
                self._send_away(lease)

    async def until_alone(self) -> None:
        """Return when nobody attends."""
        await self._alone.wait()

    def close(self) -> None:
        """End every epoch and every subscription."""
        self.hand_over()
        for lease in self._leases:
            self._send_away(lease)

    def _send_away(self, lease: Lease) -> None:
        self._leases.end(lease.worker_id, lease.epoch)
        self._forget(lease, "manager_leaves", Draining("this cache manager leaves"))

    def _forget(self, lease: Lease, event: str, why: OctavoError) -> None:
        """Drop what there is besides the lease."""
        self.counts.gone[event] += 1
        member = self._members.pop(lease.worker_id)
        self._changes.put(member.index, (Cleared(),))
        self._feed.note(lease.worker_id, urgent=True)
        if not self._members:
            self._alone.set()
        log.info("worker_gone", extra={**_described(lease), "reason": event})
        member.ended(why)


def _require_possible(registration: Registration) -> None:
    """What only this service minds; the pool is judged by its ledger."""
    if len(registration.worker_id) > MAX_WORKER_ID_CHARACTERS:
        raise InvalidRequest(
            f"register.worker_id: {len(registration.worker_id)} characters, wanted at most {MAX_WORKER_ID_CHARACTERS}"
        )
    require_cache_epoch(registration.cache_epoch)
    try:
        split_address(registration.address)
    except ValueError as error:
        raise InvalidRequest(f"register.address: {error}") from error


def _require_same_model(pool: PoolSpec, lease: Lease) -> None:
    """One name, one model: what a client asks for by name must not depend on which worker answers."""
    served = lease.registration.pool
    if pool.model != served.model:
        return
    for name in _ONE_MODEL:
        mine, theirs = getattr(pool, name), getattr(served, name)
        if mine != theirs:
            raise InvalidRequest(
                f"pool.{name}: {_printed(mine)}, worker {lease.worker_id} serves {pool.model} with {_printed(theirs)}"
            )


def _printed(value: object) -> object:
    return value.hex() or "none" if isinstance(value, bytes) else value


def _described(lease: Lease) -> dict[str, object]:
    pool = lease.registration.pool
    return {
        "worker": lease.worker_id,
        "epoch": lease.epoch,
        "address": lease.registration.address,
        "model": pool.model,
        "blocks": pool.num_blocks,
    }
