"""Which published block holds which tokens after which prefix.

A block is found by its place: the block before it and its own tokens, both compared whole. So a look-up computes no
hash, and a hit is right whatever hashes do. The hash of a block is its name outside of these books, in Redis and in the
gateways, and is computed once, when the block is published.

Invariants:
- A published block's hash is that of its parent (the block before it, or its chain's root) followed by its tokens.
- The parent of a published block is published: no chain has a hole.
- No two blocks are published in one place.
"""

from collections.abc import Callable, Iterable, Iterator

from cache_manager.core.branches import Branches, Parent, Place
from octavo.hashing import NO_SEAM, TOKEN_BYTES, Seam
from octavo.ids import BlockHash, BlockId

NextHash = Callable[[bytes, bytes], BlockHash]
"""(parent's hash, tokens) -> hash: `octavo.hashing.next_hash`."""

_NO_HASH = BlockHash(b"")


class PrefixIndex:
    """Place -> block, for one worker."""

    def __init__(self, num_blocks: int, block_size: int, next_hash: NextHash) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._next_hash = next_hash
        self._num_blocks = num_blocks
        self._open()

    def _open(self) -> None:
        """Nothing is published."""
        self._parents: list[Parent | None] = [None] * self._num_blocks
        """None: nothing is published in the block, and its tokens and hash mean nothing."""
        self._tokens = [b""] * self._num_blocks
        self._hashes = [_NO_HASH] * self._num_blocks
        self.branches = Branches(self._tokens)
        """What follows each block."""

    def __contains__(self, block: BlockId) -> bool:
        """Whether the block is published."""
        return self._parents[block] is not None

    def hashes_of(self, blocks: list[BlockId]) -> list[BlockHash]:
        """The hashes of published blocks."""
        hashes = self._hashes
        return [hashes[block] for block in blocks]

    def hash_of(self, block: BlockId) -> BlockHash:
        """The hash of a published block."""
        assert self._parents[block] is not None, f"block {block} is not published"
        return self._hashes[block]

    def hashes(self) -> list[BlockHash]:
        """The hashes of all published blocks, parents first."""
        return self.hashes_of(list(self.branches.parents_first()))

    def place_of(self, block: BlockId) -> Place | None:
        """Where the block is published; None if it is not."""
        parent = self._parents[block]
        return None if parent is None else (parent, self._tokens[block])

    def unpublished(self, blocks: list[BlockId]) -> tuple[BlockId, ...]:
        """Those of these blocks in which nothing is published."""
        parents = self._parents
        return tuple([block for block in blocks if parents[block] is None])

    def block_before(self, block: BlockId) -> BlockId | None:
        """The parent of a published block; None for the first of a chain."""
        parent = self._parents[block]
        assert parent is not None, f"block {block} is not published"
        return parent if isinstance(parent, int) else None

    def is_vacant(self, place: Place) -> bool:
        """Whether no block is published there."""
        return self.branches.find(*place) is None

    def longest_prefix(
        self, root: BlockHash, tokens: bytes, limit: int, seam: Seam = NO_SEAM
    ) -> tuple[list[BlockId], Place | None]:
        """Published blocks that hold the leading blocks of `tokens`, at most `limit` of them.

        Returns:
            These blocks, and the place of the block after them; None if the rest of the tokens fills none.
        """
        width = self._block_bytes
        hits: list[BlockId] = []
        self._follow(root, tokens, hits, limit if seam is NO_SEAM else min(limit, seam.block))
        if len(hits) == seam.block < limit:
            start = seam.block * width
            private = self.branches.find(hits[-1], seam.joined(seam.block, tokens[start : start + width]))
            if private is not None:
                hits.append(private)
                self._follow(private, tokens, hits, limit)
        at = len(hits)
        rest = tokens[at * width : (at + 1) * width]
        return hits, (hits[-1] if hits else root, seam.joined(at, rest)) if len(rest) == width else None

    def _follow(self, parent: Parent, tokens: bytes, hits: list[BlockId], limit: int) -> None:
        """Add published blocks to `hits` that hold what follows these in `tokens`, until there are `limit` of them."""
        width, held, after = self._block_bytes, self._tokens, self.branches.after
        start = len(hits) * width
        block = self.branches.find(parent, tokens[start : start + width]) if len(hits) < limit else None
        while block is not None:
            hits.append(block)
            if len(hits) == limit:
                return
            start += width
            only = after[block]
            if isinstance(only, int):  # as nearly always
                block = only if tokens.startswith(held[only], start) else None
            else:
                block = None if only is None else only.find(tokens[start : start + width])

    def offer(self, blocks: list[BlockId], parent: Parent, tokens: list[bytes]) -> list[BlockId]:
        """Publish full blocks that follow one another after `parent`, except the first ones that have equals already.

        Returns:
            Those equals, each in place of one of the first blocks. All blocks after these are published now.
        """
        known: list[BlockId] = []
        for chunk in tokens:
            block = self.branches.find(parent, chunk)
            if block is None:
                self._publish(blocks[len(known) :], parent, tokens[len(known) :])
                break
            known.append(block)
            parent = block
        return known

    def _publish(self, blocks: list[BlockId], parent: Parent, tokens: list[bytes]) -> None:
        """Publish blocks that follow one another after `parent`, where nothing holds what the first of them does."""
        parents, held, hashes, next_hash = self._parents, self._tokens, self._hashes, self._next_hash
        after = self.branches.after
        last_hash = self._hash_before(parent)
        for block, chunk in zip(blocks, tokens, strict=True):
            parents[block], held[block] = parent, chunk
            hashes[block] = last_hash = next_hash(last_hash, chunk)
            if isinstance(parent, int) and after[parent] is None:  # as nearly always
                after[parent] = block
            else:
                self.branches.add(block, parent)
            parent = block

    def forget(self, blocks: list[BlockId]) -> list[BlockHash]:
        """Drop what is published in these blocks. Returns the hashes of those in which something was."""
        forgotten: list[BlockHash] = []
        parents, hashes, after = self._parents, self._hashes, self.branches.after
        for block in blocks:
            parent = parents[block]
            if parent is not None:
                if isinstance(parent, int) and after[parent] == block:  # nothing else follows it, as nearly always
                    after[parent] = None
                else:
                    self.branches.remove(block, parent)
                parents[block] = None
                forgotten.append(hashes[block])
        return forgotten

    def clear(self) -> int:
        """Drop what is published in all blocks. Returns in how many something was."""
        count = self._num_blocks - self._parents.count(None)
        self._open()
        return count

    def violations(self, blocks: Iterable[BlockId]) -> Iterator[str]:
        """What is wrong with the index, as far as it is about these blocks and those that follow them."""
        parents = self._parents
        for block in blocks:
            parent, tokens = parents[block], self._tokens[block]
            if parent is not None:
                if self.branches.find(parent, tokens) != block:
                    yield f"block {block} is not found in its own place"
                if isinstance(parent, int) and parents[parent] is None:
                    yield f"block {block} is published, block {parent} before it is not"
                elif self._next_hash(self._hash_before(parent), tokens) != self._hashes[block]:
                    yield f"block {block} is published under a hash that is not its own"
            yield from self.branches.violations(block, parents)

    def root_violations(self) -> Iterator[str]:
        """What is wrong with the first blocks of all chains."""
        for root in self.branches.roots():
            yield from self.branches.violations(root, self._parents)

    def _hash_before(self, parent: Parent) -> BlockHash:
        return self.hash_of(parent) if isinstance(parent, int) else parent
