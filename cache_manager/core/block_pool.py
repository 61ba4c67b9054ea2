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
from cache_manager.core.eviction import ONCE, UNPUBLISHED, EvictionOrder
from octavo.errors import PoolExhausted
from octavo.ids import BlockId


class BlockPool:
    """Allocates, shares and releases blocks, many in one call. Knows nothing of sequences or hashes."""

    def __init__(self, num_blocks: int, allowances: Allowances = NO_ALLOWANCES) -> None:
        self._num_blocks = num_blocks
        self._blank = dict.fromkeys(map(BlockId, reversed(range(num_blocks))))
        self._references = [0] * num_blocks
        self._num_held = 0
        self.accounts = Accounts(allowances)
        self.order = EvictionOrder(num_blocks, self.accounts)
        self._state = self.order.state

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

    def references(self, block: BlockId) -> int:
        """How many tables name the block."""
        return self._references[block]

    def is_published(self, block: BlockId) -> bool:
        """Whether the block was published since it was allocated."""
        return self._state[block] != UNPUBLISHED

    def allocate(self, count: int) -> list[BlockId]:
        """Take blocks without a reference. What was published in them is lost: the caller takes it out of the index.

        Raises:
            PoolExhausted: fewer than `count` have no reference; none was taken.
        """
        if count > self._num_blocks - self._num_held:
            raise PoolExhausted(f"wanted {count} blocks, {self.num_available} available")
        references, blank = self._references, self._blank
        blocks = [blank.popitem()[0] for _ in range(min(count, len(blank)))] if blank else []
        if len(blocks) < count:
            blocks += self.order.evict(count - len(blocks))
        for block in blocks:
            references[block] = 1
        self._num_held += count
        return blocks

    def claim(self, blocks: list[BlockId]) -> None:
        """Take these very blocks, in which nothing is published: books that are opened again know who has which."""
        blank, references = self._blank, self._references
        for block in blocks:
            assert block in blank, f"block {block} is not blank"
            del blank[block]
            references[block] = 1
        self._num_held += len(blocks)

    def share(self, blocks: list[BlockId]) -> None:
        """Add a reference to each of these held or published blocks."""
        references = self._references
        revived = [block for block in blocks if not references[block]]
        for block in revived:
            assert self._state[block], f"block {block} is free: nobody may share it"
        self.order.remove(revived)
        for block in blocks:
            references[block] += 1
        self._num_held += len(revived)

    def release(self, blocks: list[BlockId]) -> None:
        """Take a reference away from each of these blocks of one chain, its tail first."""
        references, state = self._references, self._state
        unpublished: list[BlockId] = []
        once: list[BlockId] = []
        proven: list[BlockId] = []
        by_state = (unpublished, once, proven)
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} is released without a reference"
            references[block] = left
            if not left:
                by_state[state[block]].append(block)
        self.order.add(once, proven)
        self._blank.update(dict.fromkeys(unpublished))
        self._num_held -= len(unpublished) + len(once) + len(proven)

    def publish(self, blocks: list[BlockId], account: Account | None = None) -> None:
        """Note that these blocks can be found, and are on that account: worth keeping when their last owner leaves."""
        references, state = self._references, self._state
        for block in blocks:
            assert references[block] > 0, f"block {block} is published without an owner"
            state[block] = ONCE
        if account is not None and account is not self.accounts.others:
            self.order.publish(blocks, account)

    def unpublish_all(self) -> None:
        """Nothing can be found any more: what has no reference is blank, what has one will be when it is released."""
        self.order.clear()
        references, blocks = self._references, map(BlockId, reversed(range(self._num_blocks)))
        self._blank = dict.fromkeys([block for block in blocks if not references[block]])

    def free_list(self) -> Iterator[BlockId]:
        """The blocks without a reference, the next to be allocated first, if nothing happens in between."""
        yield from reversed(self._blank)
        yield from self.order.blocks()

    def check(self) -> None:
        """Assert the invariants that need no tables."""
        violations = list(self.violations(self._references))
        assert not violations, violations

    def violations(self, references: Sequence[int]) -> Iterator[str]:
        """What is wrong with these books, given how many tables really name each block."""
        for block, (counted, found) in enumerate(zip(self._references, references, strict=True)):
            if counted != found:
                yield f"block {block} has {counted} references, {found} tables name it"
        unheld = [BlockId(block) for block, count in enumerate(self._references) if count == 0]
        blank = [block for block in unheld if not self._state[block]]
        if sorted(self._blank) != blank:
            yield f"{len(self._blank)} blocks count as blank, {len(blank)} are"
        if self._num_held != self._num_blocks - len(unheld):
            yield f"{self._num_held} blocks count as held, {self._num_blocks - len(unheld)} are"
        yield from self.order.violations([block for block in unheld if self._state[block]])
