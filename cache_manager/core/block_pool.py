"""The blocks of one worker: who refers to each, and which goes next.

Invariants:
- A block's reference count is the number of block tables that name it.
- The free list holds exactly the blocks with no reference, each once.
- In the free list the blocks that hold nothing published come first, then the published ones, the longest unused
  ahead. Unpublished blocks return to the front and published ones to the back, so this needs no sorting.

The free list *is* the eviction order: a published block without an owner stays findable until its turn comes, so
taking a free block and evicting an old one are the same step, in constant time. The links are two plain lists; block
objects cost as much and make the garbage collector stop for 0.1 s at a million blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from octavo.errors import PoolExhausted
from octavo.ids import BlockId


class BlockPool:
    """Allocates, shares and releases blocks, many in one call. Knows nothing of sequences or hashes."""

    def __init__(self, num_blocks: int) -> None:
        self._end = BlockId(num_blocks)
        """The list is a ring; this place in it, which is no block, stands between its back and its front."""
        self._next = cast(list[BlockId], [*range(1, num_blocks + 1), 0])
        self._previous = cast(list[BlockId], [num_blocks, *range(num_blocks)])
        self._references = [0] * num_blocks
        self._published = [False] * num_blocks
        self._num_held = 0
        self._num_cached = 0

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._end

    @property
    def num_held(self) -> int:
        """Blocks with a reference."""
        return self._num_held

    @property
    def num_cached(self) -> int:
        """Published blocks without a reference: evictable."""
        return self._num_cached

    @property
    def num_free(self) -> int:
        """Blocks with no reference and nothing published in them."""
        return self._end - self._num_held - self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give, evictable ones included."""
        return self._end - self._num_held

    def references(self, block: BlockId) -> int:
        """How many tables name the block."""
        return self._references[block]

    def is_published(self, block: BlockId) -> bool:
        """Whether the block was published since it was allocated."""
        return self._published[block]

    def allocate(self, count: int) -> list[BlockId]:
        """Take the first free blocks. Whatever was published in them is lost: the caller takes it out of the index.

        Raises:
            PoolExhausted: fewer than `count` have no reference; none was taken.
        """
        if count > self.num_available:
            raise PoolExhausted(f"wanted {count} blocks, {self.num_available} available")
        following, references, published = self._next, self._references, self._published
        blocks: list[BlockId] = []
        place = self._end
        for _ in range(count):
            place = following[place]
            blocks.append(place)
            references[place] = 1
            if published[place]:
                published[place] = False
                self._num_cached -= 1
        self._join(self._end, following[place])
        self._num_held += count
        return blocks

    def claim(self, blocks: Sequence[BlockId]) -> None:
        """Take these very blocks, in which nothing is published: books that are opened again know who has which."""
        following, previous, references = self._next, self._previous, self._references
        for block in blocks:
            assert references[block] == 0, f"block {block} is taken"
            assert not self._published[block], f"block {block} is published"
            self._join(previous[block], following[block])
            references[block] = 1
        self._num_held += len(blocks)

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to each of these held or published blocks."""
        references = self._references
        revived = [block for block in blocks if not references[block]]
        for block in revived:
            assert self._published[block], f"block {block} is free: nobody may share it"
            self._join(self._previous[block], self._next[block])
        for block in blocks:
            references[block] += 1
        self._num_held += len(revived)
        self._num_cached -= len(revived)

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Take a reference away from each block. Without one, it returns to the free list.

        Published ones are evicted in the order in which they are given here.
        """
        references, published = self._references, self._published
        kept: list[BlockId] = []
        unpublished: list[BlockId] = []
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} is released without a reference"
            references[block] = left
            if not left:
                (kept if published[block] else unpublished).append(block)
        self._link(kept, after=self._previous[self._end])
        self._link(reversed(unpublished), after=self._end)
        self._num_held -= len(kept) + len(unpublished)
        self._num_cached += len(kept)

    def publish(self, blocks: Iterable[BlockId]) -> None:
        """Note that these blocks can be found: worth keeping when their last owner leaves."""
        references, published = self._references, self._published
        for block in blocks:
            assert references[block] > 0, f"block {block} is published without an owner"
            published[block] = True

    def unpublish_all(self) -> None:
        """Nothing can be found any more: what has no reference is free, what has one will be when it is released."""
        self._published = [False] * self._end
        self._num_cached = 0

    def free_list(self) -> Iterator[BlockId]:
        """The blocks without a reference, the next to be allocated first."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def check(self) -> None:
        """Assert the invariants that need no tables."""
        violations = list(self.violations(self._references))
        assert not violations, violations

    def violations(self, references: Sequence[int]) -> Iterator[str]:
        """What is wrong with these books, given how many tables really name each block."""
        for block, (counted, found) in enumerate(zip(self._references, references, strict=True)):
            if counted != found:
                yield f"block {block} has {counted} references, {found} tables name it"
        ring = self._walk()
        expected = {block for block, count in enumerate(self._references) if count == 0}
        if len(ring) != len(expected) or set(ring) != expected:
            yield f"the free list holds {len(ring)} blocks, {len(expected)} have no reference"
        kept = [self._published[block] for block in ring]
        if kept != sorted(kept):
            yield "a published block stands before an unpublished one in the free list"
        if self._num_held != self._end - len(expected):
            yield f"{self._num_held} blocks count as held, {self._end - len(expected)} are"
        if self._num_cached != sum(kept):
            yield f"{self._num_cached} blocks count as cached, {sum(kept)} are"

    def _walk(self) -> list[int]:
        """The free list as far as its links agree with one another."""
        ring: list[int] = []
        at = self._end
        while len(ring) <= self._end and self._previous[self._next[at]] == at:
            at = self._next[at]
            if at == self._end:
                break
            ring.append(at)
        return ring

    def _link(self, blocks: Iterable[BlockId], *, after: BlockId) -> None:
        """Put blocks into the free list, in this order, behind one place of it."""
        following, previous = self._next, self._previous
        behind = following[after]
        place = after
        for block in blocks:
            following[place] = block
            previous[block] = place
            place = block
        self._join(place, behind)

    def _join(self, before: BlockId, after: BlockId) -> None:
        self._next[before], self._previous[after] = after, before
