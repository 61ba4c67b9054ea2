"""Which published block holds which tokens after which prefix.

A block is looked up by the first 16 bytes of its hash, as in Redis. A hit is believed only when the whole hash and the
block's tokens agree; otherwise two blocks share a key, the one that came first keeps it, and the other is a miss that
is counted. So a collision costs a prefill and never gives wrong text.

Invariants:
- A published block's hash is that of its parent (the block before it, or its chain's root) followed by its tokens.
- The parent of a published block is published: no chain has a hole.
"""

from collections.abc import Callable, Iterator

from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, BlockId
from octavo.index_schema import MEMBER_BYTES

Parent = BlockId | BlockHash
"""What stands before a block: a published block, or the root of its chain."""

NextHash = Callable[[bytes, bytes], BlockHash]
"""(parent's hash, tokens) -> hash: `octavo.hashing.next_hash`."""


class PrefixIndex:
    """Block hash -> block, for one worker."""

    def __init__(self, num_blocks: int, block_size: int, next_hash: NextHash) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._next_hash = next_hash
        self._blocks: dict[bytes, BlockId] = {}
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._tokens = [b""] * num_blocks
        self._parents: list[Parent] = [BlockId(0)] * num_blocks
        self.collisions = 0
        """Look-ups and offers that met another block under their key."""

    def __len__(self) -> int:
        """Published blocks."""
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        """Whether the block is published."""
        return self._hashes[block] is not None

    def hash_of(self, block: BlockId) -> BlockHash:
        """The hash of a published block."""
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} is not published"
        return block_hash

    def hashes(self) -> list[BlockHash]:
        """The hashes of all published blocks, parents first: a block is published after the one before it."""
        return [self.hash_of(block) for block in self._blocks.values()]

    def block_before(self, block: BlockId) -> BlockId | None:
        """The parent of a published block; None for the first of a chain."""
        parent = self._parents[block]
        return parent if isinstance(parent, int) else None

    def longest_prefix(self, root: BlockHash, tokens: bytes, limit: int) -> list[BlockId]:
        """Published blocks that hold the leading blocks of `tokens`, at most `limit` of them."""
        hits: list[BlockId] = []
        width, next_hash, blocks = self._block_bytes, self._next_hash, self._blocks
        parent_hash = root
        for start in range(0, limit * width, width):
            chunk = tokens[start : start + width]
            parent_hash = next_hash(parent_hash, chunk)
            block = blocks.get(parent_hash[:MEMBER_BYTES])
            if block is None or not self._holds(block, parent_hash, chunk):
                break
            hits.append(block)
        return hits

    def hash_after(self, parent: Parent, tokens: bytes) -> BlockHash:
        """The hash of the block that holds `tokens` after `parent`."""
        return self._next_hash(self._hash_before(parent), tokens)

    def is_vacant(self, block_hash: BlockHash) -> bool:
        """Whether a block could be published under this hash: its key is not in use."""
        return block_hash[:MEMBER_BYTES] not in self._blocks

    def offer(self, block: BlockId, parent: Parent, tokens: bytes) -> BlockId | None:
        """Publish a full block, unless its place is taken.

        Returns:
            `block` when it is published now; the block to use in its stead when an equal one was published before;
            None when the key belongs to other tokens, so that neither this block nor any after it can be published.
        """
        parent_hash = self._hashes[parent] if isinstance(parent, int) else parent
        assert parent_hash is not None, f"block {parent}, the parent of block {block}, is not published"
        block_hash = self._next_hash(parent_hash, tokens)
        known = self._blocks.setdefault(block_hash[:MEMBER_BYTES], block)
        if known != block:
            return known if self._holds(known, block_hash, tokens) else None
        self._hashes[block] = block_hash
        self._tokens[block] = tokens
        self._parents[block] = parent
        return block

    def forget(self, block: BlockId) -> BlockHash | None:
        """Drop what is published in a block. Returns its hash, or None if there was nothing."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._blocks[block_hash[:MEMBER_BYTES]]
            self._hashes[block] = None
        return block_hash

    def violations(self) -> Iterator[str]:
        """What is wrong with the index."""
        published = [BlockId(block) for block, block_hash in enumerate(self._hashes) if block_hash is not None]
        if len(published) != len(self._blocks):
            yield f"{len(published)} blocks have a hash, {len(self._blocks)} have a key"
        for block in published:
            if self._blocks.get(self.hash_of(block)[:MEMBER_BYTES]) != block:
                yield f"block {block} is not found under its own key"
            before = self.block_before(block)
            if before is not None and before not in self:
                yield f"block {block} is published, block {before} before it is not"
            elif self._next_hash(self._hash_before(self._parents[block]), self._tokens[block]) != self.hash_of(block):
                yield f"block {block} is published under a hash that is not its own"

    def _hash_before(self, parent: Parent) -> BlockHash:
        return self.hash_of(parent) if isinstance(parent, int) else parent

    def _holds(self, block: BlockId, block_hash: BlockHash, tokens: bytes) -> bool:
        """Whether a block found by its key is the one that was meant."""
        if self._hashes[block] == block_hash and self._tokens[block] == tokens:
            return True
        self.collisions += 1
        return False
