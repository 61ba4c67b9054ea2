"""What happened to the prefix index, and how often: the values that the books hand out."""

from collections.abc import Iterable
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


class ChangeLog:
    """Gathers changes in order; what follows its like becomes one with it."""

    def __init__(self) -> None:
        self._forgotten = False
        self._runs: list[tuple[type[Published | Evicted], list[BlockHash]]] = []

    def published(self, hashes: Iterable[BlockHash]) -> None:
        """Blocks can be found from now on."""
        self._run_of(Published).extend(hashes)

    def evicted(self, hashes: Iterable[BlockHash]) -> None:
        """Blocks can be found no more."""
        self._run_of(Evicted).extend(hashes)

    def forgotten(self) -> None:
        """Nothing that was published so far can be found any more, whatever happened to it before."""
        self._forgotten = True
        self._runs.clear()

    def take(self) -> tuple[Change, ...]:
        """All since the last call."""
        changes: list[Change] = [kind(tuple(hashes)) for kind, hashes in self._runs]
        if self._forgotten:
            changes.insert(0, Forgotten())
        self._forgotten = False
        self._runs.clear()
        return tuple(changes)

    def _run_of(self, kind: type[Published | Evicted]) -> list[BlockHash]:
        if not self._runs or self._runs[-1][0] is not kind:
            self._runs.append((kind, []))
        return self._runs[-1][1]


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
