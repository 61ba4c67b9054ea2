"""What the worker does not know yet: gathers until the next grant, which tells it.

Of its tables and of copies, what it needs for its next step. Of the prefix index what its own copy of that has missed,
so that it can tell it back to a manager without books; it takes in what is published before what is not.
"""

from collections.abc import Mapping

from cache_manager.core.block import Block, Parent
from cache_manager.core.block_table import BlockTable
from octavo.block_record import NO_BLOCK, record_packer
from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, BlockId, SequenceId, TenantTag
from octavo.records.attend import BlockCopy, TableChange


class Untold:
    """Of one worker."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._pack = record_packer(block_size)
        self._first: dict[SequenceId, int] = {}
        """Of each table the first entry that it does not know."""
        self._copies: list[BlockCopy] = []
        self._published: list[bytes] = []
        """Records, in order."""
        self._evicted: list[Block] = []

    def changed(self, sequence: SequenceId, index: int) -> None:
        """A table has changed from this entry on."""
        if index < self._first.setdefault(sequence, index):
            self._first[sequence] = index

    def freed(self, sequence: SequenceId) -> None:
        """A sequence is gone, as the worker knows, who has said so."""
        self._first.pop(sequence, None)

    def copied(self, source: Block, target: Block) -> None:
        """What is in one block is to be copied into another before the next step."""
        self._copies.append(BlockCopy(source.number, target.number))

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

    def forgotten(self) -> None:
        """Nothing is published any more, and the worker is told so by the cache epoch."""
        self._published.clear()
        self._evicted.clear()

    def take_tables(self, tables: Mapping[SequenceId, BlockTable]) -> tuple[TableChange, ...]:
        """What has changed of these tables since the last call."""
        changes: list[TableChange] = []
        for sequence, first in self._first.items():
            blocks = tables[sequence].blocks[first:]
            if blocks:
                changes.append(TableChange(sequence, first, tuple([block.number for block in blocks])))
        self._first.clear()
        return tuple(changes)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Those since the last call, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

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
