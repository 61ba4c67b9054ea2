"""Which published block holds which tokens after which prefix.

A block is found by its place: the block before it and its own tokens, both compared whole. So a look-up computes no
hash, and a hit is right whatever hashes do. The hash of a block is its name outside of these books, in Redis and in the
gateways, and is computed once, when the block is published.

Invariants:
- A published block's hash is that of its parent (the block before it, or its chain's root) followed by its tokens.
- The parent of a published block is published: no chain has a hole.
- No two blocks are published in one place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from cache_manager.core.branches import Branches, Parent, Place
from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, BlockId

NextHash = Callable[[bytes, bytes], BlockHash]
"""(parent's hash, tokens) -> hash: `octavo.hashing.next_hash`."""


class PrefixIndex:
    """Place -> block, for one worker."""

    def __init__(self, num_blocks: int, block_size: int, next_hash: NextHash) -> None:
        self._block_bytes = TOKEN_BYTES * block_size
        self._next_hash = next_hash
        self._blocks: dict[Place, BlockId] = {}
        self._places: list[Place | None] = [None] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self.branches = Branches(self._places)
        """What follows each block."""

    def __len__(self) -> int:
        """Published blocks."""
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        """Whether the block is published."""
        return self._hashes[block] is not None

    def hashes_of(self, blocks: Iterable[BlockId]) -> Iterator[BlockHash]:
        """The hashes of published blocks."""
        return cast(Iterator[BlockHash], map(self._hashes.__getitem__, blocks))

    def hash_of(self, block: BlockId) -> BlockHash:
        """The hash of a published block."""
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} is not published"
        return block_hash

    def hashes(self) -> list[BlockHash]:
        """The hashes of all published blocks, parents first: a block is published after the one before it."""
        return [self.hash_of(block) for block in self._blocks.values()]

    def place_of(self, block: BlockId) -> Place | None:
        """Where the block is published; None if it is not."""
        return self._places[block]

    def block_before(self, block: BlockId) -> BlockId | None:
        """The parent of a published block; None for the first of a chain."""
        place = self._places[block]
        assert place is not None, f"block {block} is not published"
        parent, _ = place
        return parent if isinstance(parent, int) else None

    def is_vacant(self, place: Place) -> bool:
        """Whether no block is published there."""
        return place not in self._blocks

    def longest_prefix(self, root: BlockHash, tokens: bytes, limit: int) -> tuple[list[BlockId], Place | None]:
        """Published blocks that hold the leading blocks of `tokens`, at most `limit` of them.

        Returns:
            These blocks, and the place of the block after them; None if the rest of the tokens fills none.
        """
        hits: list[BlockId] = []
        width, find = self._block_bytes, self._blocks.get
        parent: Parent = root
        for start in range(0, len(tokens) - width + 1, width):
            place = (parent, tokens[start : start + width])
            block = find(place) if len(hits) < limit else None
            if block is None:
                return hits, place
            hits.append(block)
            parent = block
        return hits, None

    def offer(self, blocks: Sequence[BlockId], parent: Parent, tokens: Sequence[bytes]) -> list[BlockId]:
        """Publish full blocks that follow one another after `parent`, each unless its place is taken.

        Returns:
            For each block itself, which is published now, or the equal one that was published there before.
        """
        settled: list[BlockId] = []
        settle, next_hash = self._blocks.setdefault, self._next_hash
        places, hashes = self._places, self._hashes
        after, new = self.branches.after, None
        parent_hash = self._hash_before(parent)
        for block, chunk in zip(blocks, tokens, strict=True):
            place = (parent, chunk)
            parent = settle(place, block)
            if parent == block:
                places[block] = place
                if new is None:
                    self.branches.add(block, place)
                else:  # published a moment ago: nothing else follows it
                    after[new] = block
                new = block
                hashes[block] = parent_hash = next_hash(parent_hash, chunk)
            else:
                new = None
                parent_hash = self.hash_of(parent)
            settled.append(parent)
        return settled

    def forget(self, blocks: Iterable[BlockId]) -> tuple[BlockHash, ...]:
        """Drop what is published in these blocks. Returns the hashes of those in which something was."""
        forgotten: list[BlockHash] = []
        found, places, hashes, after = self._blocks, self._places, self._hashes, self.branches.after
        for block in blocks:
            place, block_hash = places[block], hashes[block]
            if place is not None and block_hash is not None:
                parent = place[0]
                if isinstance(parent, int) and after[parent] == block:  # nothing else follows it, as nearly always
                    after[parent] = None
                else:
                    self.branches.remove(block, place)
                places[block] = hashes[block] = None
                del found[place]
                forgotten.append(block_hash)
        return tuple(forgotten)

    def clear(self) -> int:
        """Drop what is published in all blocks. Returns in how many something was."""
        count, num_blocks = len(self._blocks), len(self._places)
        self._blocks.clear()
        self._places = [None] * num_blocks
        self._hashes = [None] * num_blocks
        self.branches = Branches(self._places)
        return count

    def violations(self) -> Iterator[str]:
        """What is wrong with the index."""
        places = {BlockId(block): place for block, place in enumerate(self._places) if place is not None}
        if len(places) != len(self._blocks):
            yield f"{len(places)} blocks have a place, {len(self._blocks)} are found"
        for block, (parent, tokens) in places.items():
            if self._blocks.get((parent, tokens)) != block:
                yield f"block {block} is not found in its own place"
            if isinstance(parent, int) and parent not in self:
                yield f"block {block} is published, block {parent} before it is not"
            elif self._next_hash(self._hash_before(parent), tokens) != self._hashes[block]:
                yield f"block {block} is published under a hash that is not its own"
        yield from self.branches.violations(places)

    def _hash_before(self, parent: Parent) -> BlockHash:
        return self.hash_of(parent) if isinstance(parent, int) else parent
