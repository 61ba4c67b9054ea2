"""The blocks of one worker: who refers to each, and which goes next.

Invariants:
- A block's reference count is the number of block tables that name it.
- A block without a reference is either blank, nothing being published in it, or stands in the eviction order
  (eviction.py), and each once.
- Blank blocks are taken before any published one is evicted, the last that became blank first.

A published block without an owner stays findable until its turn comes, so taking a free block and evicting an old one
are the same step, in constant time.
"""

from collections.abc import Iterator, Sequence

from cache_manager.core.accounts import NO_ALLOWANCES, Account, Accounts, Allowances
from cache_manager.core.block import ONCE, UNPUBLISHED, Block, make_blocks
from cache_manager.core.eviction import EvictionOrder
from octavo.errors import PoolExhausted


class BlockPool:
    """Allocates, shares and releases blocks, many in one call. Knows nothing of sequences or hashes."""

    def __init__(self, num_blocks: int, allowances: Allowances = NO_ALLOWANCES) -> None:
        self.blocks = make_blocks(num_blocks)
        """All of them, by number. For reading."""
        self._num_blocks = num_blocks
        self._blank = dict.fromkeys(reversed(self.blocks))
        self._num_held = 0
        self.accounts = Accounts(allowances)
        self.order = EvictionOrder(self.accounts)

    def __del__(self) -> None:
        """Part the blocks: the memory of books that are dropped comes back then, not when the collector comes by."""
        for block in self.blocks:
            block.part()

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._num_blocks

    @property
    def num_held(self) -> int:
        """Blocks with a reference."""
        return self._num_held

    @property
    def num_cached(self) -> int:
        """Published blocks without a reference: evictable."""
        return self._num_blocks - self._num_held - len(self._blank)

    @property
    def num_free(self) -> int:
        """Blocks with no reference and nothing published in them."""
        return len(self._blank)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give, evictable ones included."""
        return self._num_blocks - self._num_held

    def allocate(self, count: int) -> list[Block]:
        """Take blocks without a reference. What was published in them is lost: the caller takes it out of the index.

        Raises:
            PoolExhausted: fewer than `count` have no reference; none was taken.
        """
        if count > self._num_blocks - self._num_held:
            raise PoolExhausted(f"wanted {count} blocks, {self.num_available} available")
        blank = self._blank
        blocks = [blank.popitem()[0] for _ in range(min(count, len(blank)))] if blank else []
        if len(blocks) < count:
            blocks += self.order.evict(count - len(blocks))
        for block in blocks:
            block.references = 1
        self._num_held += count
        return blocks

    def claim(self, blocks: list[Block]) -> None:
        """Take these very blocks, in which nothing is published: books that are opened again know who has which."""
        blank = self._blank
        for block in blocks:
            assert block in blank, f"block {block} is not blank"
            del blank[block]
            block.references = 1
        self._num_held += len(blocks)

    def share(self, blocks: list[Block]) -> None:
        """Add a reference to each of these held or published blocks."""
        revived = [block for block in blocks if not block.references]
        for block in revived:
            assert block.state != UNPUBLISHED, f"block {block} is free: nobody may share it"
        self.order.remove(revived)
        for block in blocks:
            block.references += 1
        self._num_held += len(revived)

    def release(self, blocks: list[Block]) -> None:
        """Take a reference away from each of these blocks of one chain, its tail first."""
        blank, once, proven = self._blank, list[Block](), list[Block]()
        for block in blocks:
            assert block.references > 0, f"block {block} is released without a reference"
            block.references -= 1
            if not block.references:
                self._num_held -= 1
                if block.state == UNPUBLISHED:
                    blank[block] = None
                elif block.state == ONCE:
                    once.append(block)
                else:
                    proven.append(block)
        self.order.add(once, proven)

    def publish(self, blocks: list[Block], account: Account | None = None) -> None:
        """Note that these blocks can be found, and are on that account: worth keeping when their last owner leaves."""
        for block in blocks:
            assert block.references > 0, f"block {block} is published without an owner"
        self.order.publish(blocks, account or self.accounts.others)

    def unpublish_all(self) -> None:
        """Nothing can be found any more: what has no reference is blank, what has one will be when it is released."""
        self.order.clear(self.blocks)
        self._blank = dict.fromkeys(block for block in reversed(self.blocks) if not block.references)

    def free_list(self) -> Iterator[Block]:
        """The blocks without a reference, the next to be allocated first, if nothing happens in between."""
        yield from reversed(self._blank)
        yield from self.order.blocks()

    def check(self) -> None:
        """Assert the invariants that need no tables."""
        violations = list(self.violations([block.references for block in self.blocks]))
        assert not violations, violations

    def violations(self, references: Sequence[int]) -> Iterator[str]:
        """What is wrong with these books, given how many tables really name each block."""
        for block, found in zip(self.blocks, references, strict=True):
            if block.references != found:
                yield f"block {block} has {block.references} references, {found} tables name it"
        unheld = [block for block in self.blocks if not block.references]
        blank = {block for block in unheld if block.state == UNPUBLISHED}
        if self._blank.keys() != blank:
            yield f"{len(self._blank)} blocks count as blank, {len(blank)} are"
        if self._num_held != self._num_blocks - len(unheld):
            yield f"{self._num_held} blocks count as held, {self._num_blocks - len(unheld)} are"
        yield from self.order.violations({block for block in unheld if block.state != UNPUBLISHED})
