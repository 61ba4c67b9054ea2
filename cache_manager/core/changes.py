"""Values that the books hand out: what happened to the prefix index, and how often."""

from dataclasses import dataclass

from octavo.ids import BlockHash


@dataclass(frozen=True, slots=True)
class Published:
    """Full blocks that can be found from now on, parents first."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Published blocks that were dropped, because their memory went to somebody else."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing of this epoch can be found any more. Told by whoever drops the books: they cannot say it themselves."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Nothing that was published before can be found any more."""


Change = Published | Evicted | Forgotten | Cleared
"""To be applied in order by whoever keeps a copy of the index."""


@dataclass(slots=True)
class LedgerStats:
    """What happened since the books were opened."""

    attached_sequences: int = 0
    attached_tokens: int = 0
    """Of all attaches; a sequence that was preempted counts again when it comes back."""
    waits: int = 0
    """Attaches that were told to wait for a block that another sequence computes."""
    hit_tokens: int = 0
    """Of the attached tokens, those found in published blocks."""
    partial_hits: int = 0
    """Attaches that found a part of a block, and got a copy of it."""
    partial_hit_tokens: int = 0
    """Of the hit tokens, those in such copies."""
    too_short_to_hit: int = 0
    """Attaches without one full block before their last token."""
    published_blocks: int = 0
    merged_blocks: int = 0
    """Full blocks given back because an equal one was published first."""
    evicted_blocks: int = 0
    copied_blocks: int = 0
    """Before a write that would have shown elsewhere."""
