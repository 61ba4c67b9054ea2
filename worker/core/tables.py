"""The worker's side of its books: whose table the manager keeps, and what the manager has not been told yet.

What was computed is told when that makes a difference to somebody: when a block has become full, so that it can be
published, before a fork, and when the sequence leaves. The rest gathers: it lies in a block that is the sequence's own.

Invariants:
- A sequence is known exactly while it is in the manager's books and nobody has asked to free it.
- Between two steps, no known sequence has a full block that is neither told nor about to be.
- Copies are handed out in the order in which they were granted, and no write happens in between: a block that a copy
  reads may already have a new owner.
"""

from collections.abc import Iterable

from octavo.ids import NEVER_RESET, SequenceId
from octavo.records import BlockCopy, Commit, Grant
from worker.core.sequence import Sequence


class Tables:
    """Mirror of the block tables, with the commits and frees that ride in the next exchange."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self.cache_epoch = NEVER_RESET
        """As the last grant said."""
        self.forget()

    def publishes(self, sequence: Sequence) -> bool:
        """Whether others find what it computes: not where it was attached before the last reset."""
        return sequence.cache_epoch == self.cache_epoch

    def forget(self) -> None:
        """The manager's books start anew: nothing is known, nothing is owed."""
        self.free_blocks = self._num_blocks
        """As the last grant said, evictable ones included."""
        self.returning = 0
        """About how many blocks the frees not yet told will give back; shared ones are counted for each owner."""
        self._known: dict[SequenceId, Sequence] = {}
        self._due: dict[SequenceId, Sequence] = {}
        """Known ones that have something to tell."""
        self._last_commits: list[Commit] = []
        self._finished: list[SequenceId] = []
        self._copies: list[BlockCopy] = []

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the manager keeps a table for it."""
        return sequence.id in self._known

    @property
    def untold(self) -> bool:
        """Whether the manager must still hear something."""
        return bool(self._due or self._last_commits or self._finished)

    def enter(self, sequence: Sequence) -> None:
        """A grant says that the sequence is in the books. If it ended meanwhile, it leaves them again."""
        self._known[sequence.id] = sequence
        if sequence.ended:
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Free its blocks with the next exchange, if it has any."""
        if self._known.pop(sequence.id, None) is not None:
            self._due.pop(sequence.id, None)
            if sequence.computed > sequence.told:
                self._last_commits.append(_commit(sequence))
            self._finished.append(sequence.id)
            self.returning += len(sequence.table)

    def known(self, sequence: SequenceId) -> Sequence | None:
        """Who has that id, if the manager keeps a table for it."""
        return self._known.get(sequence)

    def wrote(self, sequence: Sequence, end: int) -> None:
        """A step has written its positions up to `end`."""
        sequence.computed = end
        if end // self._block_size > sequence.told // self._block_size:
            self._due[sequence.id] = sequence

    def fork(self, parent: SequenceId) -> None:
        """Children will alias all that it has computed: that is told first, and its last block is no longer its own."""
        sequence = self._known.get(parent)
        if sequence is not None:
            sequence.forked = True
            if sequence.computed > sequence.told:
                self._due[parent] = sequence

    def reserved(self, met: Iterable[SequenceId]) -> None:
        """Reserves that were met: the last block of each is its own."""
        for sequence_id in met:
            if (sequence := self._known.get(sequence_id)) is not None:
                sequence.forked = False

    def take_in(self, grant: Grant) -> None:
        """Follow the grant's reuse, table changes and copies."""
        self.free_blocks = grant.free_blocks
        self.cache_epoch = grant.cache_epoch
        self._copies += grant.copies
        for sequence_id, reused in grant.attached:
            if (sequence := self._known.get(sequence_id)) is not None:
                sequence.computed = sequence.reused = sequence.told = reused
                sequence.cache_epoch = grant.cache_epoch
        for change in grant.tables:
            if (sequence := self._known.get(change.sequence)) is not None:
                assert change.start <= len(sequence.table), (change, sequence.table)
                sequence.table[change.start : change.start + len(change.blocks)] = change.blocks

    def take_untold(self) -> tuple[tuple[Commit, ...], tuple[SequenceId, ...]]:
        """Commits and frees for an exchange, which must reach the manager or be followed by `forget`."""
        commits = (*self._last_commits, *map(_commit, self._due.values()))
        finished = tuple(self._finished)
        for sequence in self._due.values():
            sequence.told = sequence.computed
        self._due.clear()
        self._last_commits.clear()
        self._finished.clear()
        self.returning = 0
        return commits, finished

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to make before the next write."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def check(self) -> None:
        """Assert the invariants."""
        for sequence in self._known.values():
            assert sequence.told <= sequence.computed <= len(sequence.table) * self._block_size, sequence.age
            full, told = (end // self._block_size for end in (sequence.computed, sequence.told))
            assert full == told or sequence.id in self._due, sequence.age


def _commit(sequence: Sequence) -> Commit:
    """All that it has computed and not told."""
    return Commit(sequence.id, tuple(sequence.tokens[sequence.told : sequence.computed]))
