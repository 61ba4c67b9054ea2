"""The worker's side of its books: whose table the manager keeps, and what the manager has not been told yet.

What was computed is told when that makes a difference to somebody: when a block has become full, so that it can be
published, before a fork, and when the sequence leaves. The rest gathers: it lies in a block that is the sequence's own.

A manager that has lost the books is told all of it at once (`inventory`). What was told last and not answered is then
part of what was done: commits stand in the inventory, and who had left is in it until the next exchange says so again.

Invariants:
- A sequence is known exactly while it is in the manager's books and nobody has asked to free it.
- Between two steps, no known sequence has a full block that is neither told nor about to be.
- Copies are handed out in the order in which they were granted, and no write happens in between: a block that a copy
  reads may already have a new owner.
- Who leaves in the midst of a step is freed after it: the step may still write to its blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.hashing import Seam
from octavo.ids import NEVER_RESET, BlockHash, BlockId, CacheEpoch, SequenceId
from octavo.records.attend import BlockCopy, Commit, Grant, HeldSequence, Inventory
from octavo.records.scope import Scope
from octavo.records.serve import Submission
from worker.core.mirror import Mirror
from worker.core.sequence import Sequence

_ROOTS_REMEMBERED = 1024
"""Scopes of which it is known where their chains begin."""


@dataclass(slots=True)
class _Leaver:
    """A sequence that has left and still stands in the manager's books. A grant on its way may yet change its table."""

    root: BlockHash
    tokens: tuple[int, ...]
    """Those that were written."""
    told: int
    """How many of them the manager knows."""
    table: list[BlockId]
    forgotten: bool
    submission: Submission
    seam: Seam
    """Of its hash chain."""

    def held(self, sequence: SequenceId) -> HeldSequence:
        """It writes nothing more."""
        return HeldSequence(
            sequence=sequence,
            root=self.root,
            tokens=self.tokens,
            table=tuple(self.table),
            room=len(self.tokens),
            forgotten=self.forgotten,
            tenant=self.submission.tenant,
            retain_seconds=self.submission.retain_seconds,
            seam=self.seam,
        )


class Tables:
    """Mirror of the block tables, with the commits and frees that ride in the next exchange."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._version = 0
        """Grows whenever something else may be found published."""
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
        self._forget_published()
        self._known: dict[SequenceId, Sequence] = {}
        self._due: dict[SequenceId, Sequence] = {}
        """Known ones that have something to tell."""
        self._leaving: dict[SequenceId, _Leaver] = {}
        self._unanswered: dict[SequenceId, _Leaver] = {}
        """Those told in the exchange under way."""
        self._writing: frozenset[SequenceId] = frozenset()
        """Those in the step under way."""
        self._copies: list[BlockCopy] = []

    def _forget_published(self) -> None:
        self._mirror = Mirror(self._block_size)
        self._roots: dict[Scope, BlockHash] = {}
        """Where the hash chains of a scope begin, under this cache epoch."""
        self._version += 1

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the manager keeps a table for it."""
        return sequence.id in self._known

    @property
    def returning(self) -> int:
        """How many blocks the frees in the next exchange will give back: those that nobody else has in its table."""
        leavers = [left.table for sequence, left in self._leaving.items() if sequence not in self._writing]
        return len({block for table in leavers for block in table[self._still_held(table) :]})

    def _still_held(self, table: list[BlockId]) -> int:
        """Leading blocks of a table that one that stays has as well: tables have beginnings in common, and no more."""
        return max((_in_common(table, other.table) for other in self._known.values()), default=0)

    @property
    def untold(self) -> bool:
        """Whether the manager must still hear something."""
        return bool(self._due or self._leaving)

    def known(self, sequence: SequenceId) -> Sequence | None:
        """Who has that id, if the manager keeps a table for it."""
        return self._known.get(sequence)

    def hit(self, sequence: Sequence) -> int:
        """Tokens that an attach would find in whole published blocks, as far as is known here."""
        version, found = sequence.looked_up
        if version != self._version:
            root = self._roots.get(sequence.request.submission.scope)
            found = 0 if root is None else self._mirror.hit(root, sequence.tokens[: sequence.findable])
            sequence.looked_up = self._version, found
        return found

    # ---- what the worker does --------------------------------------------------------------------------------

    def writing(self, sequences: Iterable[SequenceId] = ()) -> None:
        """A step begins that writes to these, or has ended."""
        self._writing = frozenset(sequences)

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

    def leave(self, sequence: Sequence) -> None:
        """Free its blocks with the next exchange, if it has any."""
        if self._known.pop(sequence.id, None) is not None:
            self._due.pop(sequence.id, None)
            tokens = tuple(sequence.tokens[: sequence.computed])
            self._leaving[sequence.id] = _Leaver(
                root=_root(sequence),
                tokens=tokens,
                told=sequence.told,
                table=sequence.table,
                forgotten=not self.publishes(sequence),
                submission=sequence.request.submission,
                seam=sequence.request.submission.scope.seam(self._block_size),
            )
            self._mirror.returned(sequence.table)

    # ---- exchanges -------------------------------------------------------------------------------------------

    def take_untold(self) -> tuple[tuple[Commit, ...], tuple[SequenceId, ...]]:
        """Commits and frees for an exchange, whose grant must come to `take_in`, or else `unanswered` or `forget`."""
        staying = {sequence: left for sequence, left in self._leaving.items() if sequence in self._writing}
        self._unanswered = {sequence: left for sequence, left in self._leaving.items() if sequence not in staying}
        last = (Commit(sequence, left.tokens[left.told :]) for sequence, left in self._unanswered.items())
        commits = (*(commit for commit in last if commit.tokens), *map(_commit, self._due.values()))
        for sequence in self._due.values():
            sequence.told = sequence.computed
        self._due.clear()
        self._leaving = staying
        return commits, tuple(self._unanswered)

    def take_in(self, grant: Grant, newcomers: Iterable[Sequence] = (), met: Iterable[SequenceId] = ()) -> None:
        """Follow a grant. Newcomers are in the books by it, but leave them again if they have ended meanwhile.

        `met` are the reserves that were met: the last block of each is its own.
        """
        newcomers = list(newcomers)
        self._known |= {sequence.id: sequence for sequence in newcomers}
        self._unanswered.clear()
        self._follow(grant)
        for sequence_id in met:
            if (sequence := self._known.get(sequence_id)) is not None:
                sequence.forked = False
        for sequence in newcomers:
            if sequence.ended:
                self.leave(sequence)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to make before the next write."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def _follow(self, grant: Grant) -> None:
        self.follow_reset(grant.cache_epoch)
        self.free_blocks = grant.free_blocks
        self._copies += grant.copies
        self._mirror.take_in(grant.published, grant.evicted)
        self._version += bool(grant.published or grant.evicted)
        for (sequence_id, reused), root in zip(grant.attached, grant.roots, strict=True):
            if (sequence := self._known.get(sequence_id)) is not None:
                sequence.computed = sequence.reused = sequence.told = reused
                sequence.root, sequence.cache_epoch = root, grant.cache_epoch
                self._remember_root(sequence.request.submission.scope, root)
        for change in grant.tables:
            owner = self._known.get(change.sequence) or self._leaving.get(change.sequence)
            if owner is not None:
                assert change.start <= len(owner.table), (change, owner.table)
                owner.table[change.start : change.start + len(change.blocks)] = change.blocks

    def follow_reset(self, cache_epoch: CacheEpoch) -> None:
        """The manager says under which cache epoch it publishes: another one ends all that was published before."""
        if cache_epoch != self.cache_epoch:
            self.cache_epoch = cache_epoch
            self._forget_published()
            for left in (*self._leaving.values(), *self._unanswered.values()):
                left.forgotten = True

    def _remember_root(self, scope: Scope, root: BlockHash) -> None:
        self._version += scope not in self._roots
        self._roots[scope] = root
        if len(self._roots) > _ROOTS_REMEMBERED:
            del self._roots[next(iter(self._roots))]

    # ---- a lost manager --------------------------------------------------------------------------------------

    def unanswered(self) -> None:
        """The exchange under way gets no answer: who left with it still stands in the books."""
        self._leaving = self._unanswered | self._leaving
        self._unanswered = {}

    def inventory(self) -> tuple[Inventory, ...]:
        """All that the pool holds. If a manager opens books by it, it knows what was computed up to this call."""
        held = [*map(self._held, self._known.values()), *(left.held(name) for name, left in self._leaving.items())]
        for sequence in self._known.values():
            sequence.told = sequence.computed
        self._due.clear()
        for left in self._leaving.values():
            left.told = len(left.tokens)
        return self._mirror.inventory(held)

    def _held(self, sequence: Sequence) -> HeldSequence:
        computed = sequence.computed
        return HeldSequence(
            sequence=sequence.id,
            root=_root(sequence),
            tokens=tuple(sequence.tokens[:computed]),
            table=tuple(sequence.table),
            room=sequence.writable(self._block_size),
            ahead=tuple(sequence.tokens[computed:]) if sequence.remaining > 1 else (),
            forgotten=not self.publishes(sequence),
            tenant=sequence.request.submission.tenant,
            retain_seconds=sequence.request.submission.retain_seconds,
            seam=sequence.request.submission.scope.seam(self._block_size),
        )

    def check(self) -> None:
        """Assert the invariants."""
        for sequence in self._known.values():
            assert sequence.told <= sequence.computed <= len(sequence.table) * self._block_size, sequence.age
            full, told = (end // self._block_size for end in (sequence.computed, sequence.told))
            assert full == told or sequence.id in self._due, sequence.age


def _in_common(one: list[BlockId], other: list[BlockId]) -> int:
    """Leading entries that are equal."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def _root(sequence: Sequence) -> BlockHash:
    """Of one that has a table."""
    assert sequence.root is not None, sequence.age
    return sequence.root


def _commit(sequence: Sequence) -> Commit:
    """All that it has computed and not told."""
    return Commit(sequence.id, tuple(sequence.tokens[sequence.told : sequence.computed]))
