"""The worker's side of its books: whose table the manager keeps, and what the manager has not been told yet.

Invariants:
- A sequence is known exactly while it is in the manager's books and nobody has asked to free it.
- Copies are handed out in the order in which they were granted, and no write happens in between: a block that a copy
  reads may already have a new owner.
"""

from octavo.ids import SequenceId
from octavo.records import BlockCopy, Commit, Grant
from worker.core.sequence import Sequence


class Tables:
    """Mirror of the block tables, with the commits and frees that ride in the next exchange."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.forget()

    def forget(self) -> None:
        """The manager's books start anew: nothing is known, nothing is owed."""
        self.free_blocks = self._num_blocks
        """As the last grant said, evictable ones included."""
        self.returning = 0
        """About how many blocks the frees not yet told will give back; shared ones are counted for each owner."""
        self._known: dict[SequenceId, Sequence] = {}
        self._commits: list[Commit] = []
        self._finished: list[SequenceId] = []
        self._copies: list[BlockCopy] = []

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the manager keeps a table for it."""
        return sequence.id in self._known

    @property
    def untold(self) -> bool:
        """Whether the manager must still hear something."""
        return bool(self._commits or self._finished)

    def enter(self, sequence: Sequence) -> None:
        """A grant says that the sequence is in the books. If it ended meanwhile, it leaves them again."""
        self._known[sequence.id] = sequence
        if sequence.ended:
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Free its blocks with the next exchange, if it has any."""
        if self._known.pop(sequence.id, None) is not None:
            self._finished.append(sequence.id)
            self.returning += len(sequence.table)

    def known(self, sequence: SequenceId) -> Sequence | None:
        """Who has that id, if the manager keeps a table for it."""
        return self._known.get(sequence)

    def commit(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """A step has written them."""
        self._commits.append(Commit(sequence.id, tokens))

    def take_in(self, grant: Grant) -> None:
        """Follow the grant's reuse, table changes and copies."""
        self.free_blocks = grant.free_blocks
        self._copies += grant.copies
        for sequence_id, reused in grant.attached:
            if (sequence := self._known.get(sequence_id)) is not None:
                sequence.computed = sequence.reused = reused
        for change in grant.tables:
            if (sequence := self._known.get(change.sequence)) is not None:
                assert change.start <= len(sequence.table), (change, sequence.table)
                sequence.table[change.start : change.start + len(change.blocks)] = change.blocks

    def take_untold(self) -> tuple[tuple[Commit, ...], tuple[SequenceId, ...]]:
        """Commits and frees for an exchange, which must reach the manager or be followed by `forget`."""
        commits, finished = tuple(self._commits), tuple(self._finished)
        self._commits.clear()
        self._finished.clear()
        self.returning = 0
        return commits, finished

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to make before the next write."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies
