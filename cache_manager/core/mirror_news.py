"""What a worker's copy of its prefix index has yet to be told, so that it can tell it back to a manager without books.

Gathers until the next grant, and is then told as it is. A worker takes in what is published before what is not.
"""

from cache_manager.core.block import Block, Parent
from octavo.block_record import NO_BLOCK, record_packer
from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, BlockId, TenantTag


class MirrorNews:
    """Of one worker."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._pack = record_packer(block_size)
        self._published: list[bytes] = []
        """Records, in order."""
        self._evicted: list[Block] = []

    def published(
        self,
        root: BlockHash,
        parent: Parent,
        blocks: list[Block],
        tokens: list[bytes],
        tenant: TenantTag,
        retain_seconds: int,
    ) -> None:
        """These blocks, which follow one another after `parent`, can be found from now on.

        `tokens` are those of each as they are hashed, at the seam behind a salt.
        """
        pack, width, note = self._pack, self._block_bytes, self._published.append
        before = parent.number if isinstance(parent, Block) else NO_BLOCK
        for at, block in enumerate(blocks):
            note(pack(block.number, before, root, tokens[at][-width:], tenant, retain_seconds))
            before = block.number

    def evicted(self, blocks: list[Block]) -> None:
        """What was published in some of these blocks is gone."""
        self._evicted += blocks

    def clear(self) -> None:
        """Nothing is published any more, and the worker is told so by the cache epoch."""
        self._published.clear()
        self._evicted.clear()

    def take_published(self) -> bytes:
        """A record (octavo.block_record) of each block that was published since the last call, the latest last."""
        records = b"".join(self._published)
        self._published.clear()
        return records

    def take_evicted(self) -> tuple[BlockId, ...]:
        """Blocks in which nothing is published any more, among others in which nothing was."""
        if not self._evicted:
            return ()
        evicted = tuple([block.number for block in self._evicted if block.parent is None])
        self._evicted.clear()
        return evicted
