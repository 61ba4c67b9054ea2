"""Where a sequence's positions live: position p in block `blocks[p // S]`, at offset `p % S`.

Invariants, for a block size S:
- `len(tokens) <= room <= S * len(blocks)`.
- A table grows at its end only; an entry changes by copy-on-write, or when an equal block was published first.
- Positions [length, room) are writable: their blocks belong to this table alone and are not published. A reserve that
  is met ends with its last block, so a worker that decodes asks, and tells what it wrote, once a block.
- The first `published` blocks are in the prefix index, each under this sequence's own hash; none of a forgotten one.
"""

from array import array
from dataclasses import dataclass

from cache_manager.core.block import Block, Parent
from octavo.errors import UnknownSequence
from octavo.hashing import NO_SEAM, TOKEN_BYTES, Seam, token_bytes
from octavo.ids import NOBODY, BlockHash, SequenceId, TenantTag


def blocks_needed(positions: int, block_size: int) -> int:
    """Blocks that `positions` positions from 0 on take."""
    return -(-positions // block_size)


@dataclass(slots=True)
class BlockTable:
    """One sequence."""

    block_size: int
    root: BlockHash
    """Stands before its first block in the hash chain."""
    blocks: list[Block]
    tokens: "array[int]"
    """The committed ones, u32."""
    room: int
    """End of the positions that may be written and committed."""
    published: int
    """Leading blocks that are in the prefix index."""
    forgotten: bool = False
    """It was there before the last reset: nothing of it is published, now or later."""
    aliased: int = 0
    """Leading blocks that it was forked with."""
    tenant: TenantTag = NOBODY
    """On whose account it publishes."""
    retain_seconds: int = 0
    """For so long after its end its published blocks are to be retained."""
    seam: Seam = NO_SEAM
    """Where its hash chain becomes private, if not at its root."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block's tokens."""
        return TOKEN_BYTES * self.block_size

    @property
    def length(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    @property
    def full_blocks(self) -> int:
        """Blocks whose positions are all committed; also the index of the tail, the block after them."""
        return len(self.tokens) // self.block_size

    @property
    def has_tail(self) -> bool:
        """Whether the last committed position lies in a block that is not full."""
        return len(self.tokens) % self.block_size > 0

    def before(self, index: int) -> Parent:
        """What stands before a block in the hash chain: another block, or the root."""
        return self.blocks[index - 1] if index else self.root

    def root_of(self, index: int) -> BlockHash:
        """What sets the part of the chain apart in which a block lies: the root, or from the seam on the salt."""
        return BlockHash(self.seam.salt) if 0 <= self.seam.block <= index else self.root

    def block_tokens(self, first: int, end: int) -> list[bytes]:
        """Tokens of the full blocks [first, end), each as it is hashed and compared."""
        raw, width = token_bytes(self.tokens[first * self.block_size : end * self.block_size]), self.block_bytes
        blocks = [raw[at : at + width] for at in range(0, len(raw), width)]
        if first <= self.seam.block < end:
            at = self.seam.block - first
            blocks[at] = self.seam.joined(self.seam.block, blocks[at])
        return blocks

    def missing(self, end: int) -> int:
        """Blocks to add before position `end - 1` has a place."""
        missing = blocks_needed(end, self.block_size) - len(self.blocks)
        return missing if missing > 0 else 0

    def fork(self) -> "BlockTable":
        """A second table over the committed positions. What its parent has reserved is not handed on."""
        used = blocks_needed(self.length, self.block_size)
        return BlockTable(
            block_size=self.block_size,
            root=self.root,
            blocks=self.blocks[:used],
            tokens=self.tokens[:],
            room=self.length,
            published=self.published,
            forgotten=self.forgotten,
            aliased=used,
            tenant=self.tenant,
            retain_seconds=self.retain_seconds,
            seam=self.seam,
        )

    def forget(self) -> None:
        """What it holds is published no longer, and nothing of it will be."""
        self.forgotten, self.published = True, 0

    def truncate(self, length: int) -> list[Block]:
        """Go back to `length` committed positions, nothing reserved. Returns the blocks cut off, in table order."""
        used = blocks_needed(length, self.block_size)
        cut = self.blocks[used:]
        del self.blocks[used:]
        del self.tokens[length:]
        self.room = length
        self.published = min(self.published, self.full_blocks)
        return cut


class BlockTables(dict[SequenceId, BlockTable]):
    """The tables of all sequences in the books. To ask for another one raises UnknownSequence."""

    def __missing__(self, sequence: SequenceId) -> BlockTable:
        raise UnknownSequence(f"sequence {sequence} is not in the books")
