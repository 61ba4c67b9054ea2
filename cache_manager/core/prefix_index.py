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

from cache_manager.core.block import Block, Parent, Place
from cache_manager.core.branches import Branches
from octavo.hashing import NO_SEAM, TOKEN_BYTES, Seam
from octavo.ids import BlockHash

NextHash = Callable[[bytes, bytes], BlockHash]
"""(parent's hash, tokens) -> hash: `octavo.hashing.next_hash`."""


class PrefixIndex:
    """Place -> block, for one worker."""

    def __init__(self, block_size: int, next_hash: NextHash) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._next_hash = next_hash
        self.branches = Branches()
        """What follows each block."""

    def hashes(self) -> list[BlockHash]:
        """The hashes of all published blocks, parents first."""
        return hashes_of(list(self.branches.parents_first()))

    def is_vacant(self, place: Place) -> bool:
        """Whether no block is published there."""
        return self.branches.find(*place) is None

    def longest_prefix(
        self, root: BlockHash, tokens: bytes, limit: int, seam: Seam = NO_SEAM
    ) -> tuple[list[Block], Place | None]:
        """Published blocks that hold the leading blocks of `tokens`, at most `limit` of them.

        Returns:
            These blocks, and the place of the block after them; None if the rest of the tokens fills none.
        """
        width = self._block_bytes
        hits: list[Block] = []
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

    def _follow(self, parent: Parent, tokens: bytes, hits: list[Block], limit: int) -> None:
        """Add published blocks to `hits` that hold what follows these in `tokens`, until there are `limit` of them."""
        width = self._block_bytes
        start = len(hits) * width
        block = self.branches.find(parent, tokens[start : start + width]) if len(hits) < limit else None
        while block is not None:
            hits.append(block)
            if len(hits) == limit:
                return
            start += width
            chunk, after = tokens[start : start + width], block.after
            if isinstance(after, Block):  # as nearly always
                block = after if after.tokens == chunk else None
            else:
                block = None if after is None else after.find(chunk)

    def offer(self, blocks: list[Block], parent: Parent, tokens: list[bytes]) -> list[Block]:
        """Publish full blocks that follow one another after `parent`, except the first ones that have equals already.

        Returns:
            Those equals, each in place of one of the first blocks. All blocks after these are published now.
        """
        known: list[Block] = []
        for chunk in tokens:
            block = self.branches.find(parent, chunk)
            if block is None:
                self._publish(blocks[len(known) :], parent, tokens[len(known) :])
                break
            known.append(block)
            parent = block
        return known

    def _publish(self, blocks: list[Block], parent: Parent, tokens: list[bytes]) -> None:
        """Publish blocks that follow one another after `parent`, where nothing holds what the first of them does."""
        next_hash, last_hash = self._next_hash, _hash_before(parent)
        for at, block in enumerate(blocks):
            block.parent = parent
            block.tokens = chunk = tokens[at]
            block.hash = last_hash = next_hash(last_hash, chunk)
            if isinstance(parent, Block) and parent.after is None:  # as nearly always
                parent.after = block
            else:
                self.branches.add(block, parent)
            parent = block

    def forget(self, blocks: list[Block]) -> list[BlockHash]:
        """Drop what is published in these blocks. Returns the hashes of those in which something was."""
        forgotten: list[BlockHash] = []
        for block in blocks:
            parent = block.parent
            if parent is not None:
                if isinstance(parent, Block) and parent.after is block:  # nothing else follows it, as nearly always
                    parent.after = None
                else:
                    self.branches.remove(block, parent)
                block.parent = None
                forgotten.append(block.hash)
        return forgotten

    def clear(self) -> int:
        """Drop what is published in all blocks. Returns in how many something was."""
        published = list(self.branches.parents_first())
        for block in published:
            block.parent = block.after = None
        self.branches = Branches()
        return len(published)

    def violations(self, blocks: Iterable[Block]) -> Iterator[str]:
        """What is wrong with the index, as far as it is about these blocks and those that follow them."""
        for block in blocks:
            parent = block.parent
            if parent is not None:
                if self.branches.find(parent, block.tokens) is not block:
                    yield f"block {block} is not found in its own place"
                if isinstance(parent, Block) and parent.parent is None:
                    yield f"block {block} is published, block {parent} before it is not"
                elif self._next_hash(_hash_before(parent), block.tokens) != block.hash:
                    yield f"block {block} is published under a hash that is not its own"
            yield from self.branches.violations(block)

    def root_violations(self) -> Iterator[str]:
        """What is wrong with the first blocks of all chains."""
        for root in self.branches.roots():
            yield from self.branches.violations(root)


def hashes_of(blocks: list[Block]) -> list[BlockHash]:
    """The hashes of published blocks."""
    return [block.hash for block in blocks]


def _hash_before(parent: Parent) -> BlockHash:
    return parent.hash if isinstance(parent, Block) else parent
