"""Worker <-> cache manager: registration, inventory, exchange and grant.

Those that are made for each exchange are named tuples: they are made in a third of the time, from names and in order.
Token lists are tuples where a worker makes them and arrays of u32 where they come off the wire, which costs no
conversion; only the same kinds are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.hashing import NO_SEAM, Seam
from octavo.ids import (
    NEVER_RESET,
    NO_EPOCH,
    NOBODY,
    BlockHash,
    BlockId,
    CacheEpoch,
    Epoch,
    Incarnation,
    SequenceId,
    TenantTag,
    WorkerId,
)
from octavo.records.fleet import PoolSpec, WorkerLoad
from octavo.records.scope import PLAIN, Scope

MAX_RETAIN_SECONDS = 7 * 24 * 3600
"""Of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A worker that asks to join."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    pool: PoolSpec
    first_epoch: Epoch = NO_EPOCH
    """The first that this process was given by any manager; 0 if none."""
    last_epoch: Epoch = NO_EPOCH
    """The last that it was given."""
    inventory_parts: int = 0
    """How many parts of an inventory follow; 0: the pool is empty."""
    cache_epoch: CacheEpoch = NEVER_RESET
    """The last that it was told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSequence:
    """A sequence in the books, as its worker knows it."""

    sequence: SequenceId
    root: BlockHash
    tokens: Sequence[int]
    """Those that are written."""
    table: tuple[BlockId, ...]
    room: int
    """End of the positions that it may write without asking."""
    ahead: Sequence[int] = ()
    """The rest of the prompt that it was attached with, while that is being computed."""
    forgotten: bool = False
    """It was attached before the last reset: nothing of it is published."""
    tenant: TenantTag = NOBODY
    retain_seconds: int = 0
    """This and the tenant as it was attached with."""
    seam: Seam = NO_SEAM
    """Of the scope that it was attached with."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """A part of what a worker's pool holds, told to a manager that has lost the books."""

    published: bytes = b""
    """Records (octavo.block_record), the block to be reused first ahead."""
    sequences: tuple[HeldSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class Registered:
    """The manager's answer to a registration."""

    epoch: Epoch
    lease_seconds: float
    cache_epoch: CacheEpoch = NEVER_RESET


class Commit(NamedTuple):
    """Tokens whose keys and values the last step wrote, in order, at the end of a sequence."""

    sequence: SequenceId
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fork:
    """Children that alias their parent's table; each must be able to write `reserve` positions."""

    parent: SequenceId
    children: tuple[SequenceId, ...]
    reserve: int


@dataclass(frozen=True, slots=True)
class Attach:
    """A sequence to create on the longest prefix hit of its tokens."""

    sequence: SequenceId
    tokens: Sequence[int]
    scope: Scope = PLAIN
    tenant: TenantTag = NOBODY
    """On whose account its blocks are kept."""
    retain_seconds: int = 0
    """For so long after its end its blocks are to be retained, as far as the tenant's quota reaches."""


class Reservation(NamedTuple):
    """Positions [length, length + positions) of a sequence that must become writable."""

    sequence: SequenceId
    positions: int


class Truncation(NamedTuple):
    """A sequence that goes back to `length` tokens."""

    sequence: SequenceId
    length: int


class Exchange(NamedTuple):
    """What a worker did since its last exchange, and what it needs now. Applied in the order of the fields."""

    epoch: Epoch
    step: int
    truncations: tuple[Truncation, ...] = ()
    commits: tuple[Commit, ...] = ()
    forks: tuple[Fork, ...] = ()
    finished: tuple[SequenceId, ...] = ()
    attaches: tuple[Attach, ...] = ()
    reserves: tuple[Reservation, ...] = ()
    """Whom to serve first, first. For a sequence attached in the same exchange the count ends at its last token."""
    load: WorkerLoad = WorkerLoad()
    draining: bool = False


class TableChange(NamedTuple):
    """Entries [start, start + len(blocks)) of a sequence's table."""

    sequence: SequenceId
    start: int
    blocks: tuple[BlockId, ...]


class BlockCopy(NamedTuple):
    """Copy one block's keys and values, in all layers, before any write of the step."""

    source: BlockId
    target: BlockId


class Grant(NamedTuple):
    """What the manager gives for a step."""

    epoch: Epoch
    step: int
    attached: tuple[tuple[SequenceId, int], ...] = ()
    """(sequence, tokens reused). They end inside a block when leading tokens of a published one were copied."""
    waiting: tuple[tuple[SequenceId, SequenceId], ...] = ()
    """(sequence, the sequence it waits for). Not attached: the other one is computing the first block that this one is
    missing. Ask again when that is published, or the other one is gone."""
    tables: tuple[TableChange, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    unmet: tuple[SequenceId, ...] = ()
    """Reserves and forks that found too few blocks. An unmet child does not exist."""
    free_blocks: int = 0
    """Left after this grant, evictable ones included."""
    published: bytes = b""
    """A record (octavo.block_record) for each block that was published since the last grant."""
    evicted: tuple[BlockId, ...] = ()
    """Blocks in which nothing is published any more."""
    roots: tuple[BlockHash, ...] = ()
    """Of the hash chains of `attached`, in that order."""
    cache_epoch: CacheEpoch = NEVER_RESET
    """Where it differs from the last grant's, nothing that was published before this grant is any more, and the
    sequences attached before it publish nothing."""
