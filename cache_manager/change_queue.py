"""What the copies of the prefix indexes in Redis have yet to be told.

Stands between the manager, which never waits, and the mirror, which may be stuck for minutes. An index is named by its
key in Redis (octavo.index_schema): one worker's epoch.

Invariants:
- Of each member only the last word is kept, so that a batch can be applied in any order.
- An index with more than `max_pending` changes, and every index after a failure, is *stale*: its changes are dropped
  and the reader copies the whole truth instead. So the queue is bounded by the fleet, however long Redis is away.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cache_manager.core.changes import Change, Cleared, Evicted, Forgotten, Published
from octavo.ids import BlockHash
from octavo.index_schema import index_member

Truth = Callable[[], Iterable[BlockHash]]
"""All that is published in an index now, parents first."""

MAX_PENDING = 1 << 16
"""Changes of one index, a few megabytes; copying an index anew costs about as much."""

MAX_ENDED = 1 << 12
"""Keys to drop; those beyond it are left to their time to live."""


@dataclass(slots=True)
class Batch:
    """What to tell Redis next."""

    updates: dict[str, dict[bytes, bool]] = field(default_factory=dict[str, dict[bytes, bool]])
    """Index -> member -> whether it is to be there."""
    stale: list[str] = field(default_factory=list[str])
    """Indexes to be copied anew."""
    ended: list[str] = field(default_factory=list[str])
    """Indexes to be dropped."""


class ChangeQueue:
    """Gathers changes, gives batches. One writer, one reader, one event loop."""

    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._truths: dict[str, Truth] = {}
        self._pending: dict[str, dict[bytes, bool]] = {}
        self._stale: set[str] = set()
        self._ended: dict[str, None] = {}
        self._filled = asyncio.Event()

    # ---- the writer's side ----

    def open(self, index: str, truth: Truth) -> None:
        """An epoch begins. Its index is copied at once, empty or not: until then readers do not call it whole."""
        self._truths[index] = truth
        self._spoil(index)

    def put(self, index: str, changes: Iterable[Change]) -> None:
        """Note changes of an open index, in order. `Cleared` ends it."""
        for change in changes:
            match change:
                case Published(hashes):
                    self._note(index, hashes, there=True)
                case Evicted(hashes):
                    self._note(index, hashes, there=False)
                case Forgotten():
                    self._spoil(index)
                case Cleared():
                    self._end(index)

    def _note(self, index: str, hashes: Iterable[BlockHash], *, there: bool) -> None:
        if index in self._stale:
            return
        pending = self._pending.setdefault(index, {})
        for block_hash in hashes:
            pending[index_member(block_hash)] = there
        if len(pending) > self._max_pending:
            self._spoil(index)
        self._filled.set()

    def _end(self, index: str) -> None:
        del self._truths[index]
        self._pending.pop(index, None)
        self._stale.discard(index)
        self._drop(index)

    # ---- the reader's side ----

    async def wait(self) -> None:
        """Return when `take` would give something."""
        await self._filled.wait()

    def take(self) -> Batch:
        """All that there is to tell; from now on it is the reader's."""
        batch = Batch(updates=self._pending, stale=list(self._stale), ended=list(self._ended))
        self._pending, self._stale, self._ended = {}, set(), {}
        self._filled.clear()
        return batch

    def open_indexes(self) -> Iterator[str]:
        """The indexes of living epochs."""
        return iter(tuple(self._truths))

    def truth(self, index: str) -> Iterable[BlockHash]:
        """What an index holds now; nothing if it has ended meanwhile."""
        truth = self._truths.get(index)
        return () if truth is None else truth()

    def spoil(self, indexes: Iterable[str]) -> None:
        """The copies of these indexes are not to be trusted: have them made anew."""
        for index in indexes:
            if index in self._truths:
                self._spoil(index)

    def drop(self, indexes: Iterable[str]) -> None:
        """Have these keys dropped (again)."""
        for index in indexes:
            self._drop(index)

    def _spoil(self, index: str) -> None:
        self._pending.pop(index, None)
        self._stale.add(index)
        self._filled.set()

    def _drop(self, index: str) -> None:
        self._ended[index] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._filled.set()
