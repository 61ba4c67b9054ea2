"""What a cache manager tells of its books when it is asked: audits, tables, why a prompt missed, resets."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from octavo.ids import BlockId, CacheEpoch, Epoch, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAudit:
    """A worker's books, recomputed from its tables."""

    epoch: Epoch
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    sequences: int
    violation: str = ""
    """Empty when the books balance."""


class TableBlock(NamedTuple):
    """An entry of a sequence's table."""

    block: BlockId
    references: int
    """Tables that name it."""
    published: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDescription:
    """Where a sequence lives."""

    epoch: Epoch
    length: int
    """Committed positions."""
    room: int
    """End of the writable ones."""
    blocks: tuple[TableBlock, ...]


class HitEnd(Enum):
    """Why a hit goes no further than it does."""

    LAST_TOKEN = "last token"
    """All but the last token is published: that one is always computed."""
    DIFFERS = "differs"
    """What is published goes on with another token."""
    NOT_PUBLISHED = "not published"
    """Nothing is published there: it was never computed under these keys, or it was evicted or reset."""
    BEING_COMPUTED = "being computed"
    """Another sequence computes the next block: the prompt would wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExplanation:
    """What an attach of a prompt would find in a worker's books, and why no more."""

    epoch: Epoch
    reused_tokens: int
    end: HitEnd
    position: int
    """The first that is not published as the prompt has it. Beyond the reused tokens where too few of a block's tokens
    are in common to copy it, or no block is free for the copy."""
    block: BlockId | None = None
    """The published block that the prompt leaves at that position."""
    leader: SequenceId | None = None
    """The sequence that computes the next block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """What a reset did."""

    cache_epoch: CacheEpoch
    """Of the workers that were reset, from now on."""
    workers: int
    blocks: int
    """That can be found no longer."""
