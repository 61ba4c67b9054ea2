"""What a worker's copy of its prefix index has yet to be told, so that it can tell it back to a manager without books.

Gathers until the next grant, and is then told as it is. A worker takes in what is published before what is not.
"""

from collections.abc import Sequence

from cache_manager.core.prefix_index import PrefixIndex
from octavo.block_record import NO_BLOCK, record_parts
from octavo.ids import BlockHash, BlockId


class MirrorNews:
    """Of one worker."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._published: list[tuple[BlockHash, bytes, Sequence[BlockId]]] = []
        """(root of their chain, claim, blocks)."""
        self._evicted: list[BlockId] = []

    def published(self, root: BlockHash, blocks: Sequence[BlockId], claim: bytes) -> None:
        """These blocks can be found from now on."""
        self._published.append((root, claim, blocks))

    def evicted(self, blocks: Sequence[BlockId]) -> None:
        """What was published in some of these blocks is gone."""
        self._evicted += blocks

    def clear(self) -> None:
        """Nothing is published any more, and the worker is told so by the cache epoch."""
        self._published.clear()
        self._evicted.clear()

    def take_published(self) -> bytes:
        """A record (octavo.block_record) of each block that was published since the last call and still is."""
        if not self._published:
            return b""
        parts: list[bytes] = []
        for root, claim, blocks in self._published:
            for block, before, tokens in self._index.places_of(blocks):
                parts += record_parts(block, before if isinstance(before, int) else NO_BLOCK, root, tokens, claim)
        self._published.clear()
        return b"".join(parts)

    def take_evicted(self) -> tuple[BlockId, ...]:
        """Blocks in which nothing is published any more, among others in which nothing was."""
        if not self._evicted:
            return ()
        evicted = tuple(block for block in self._evicted if block not in self._index)
        self._evicted.clear()
        return evicted
