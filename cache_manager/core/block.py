"""One block of a worker's pool: all that the books know of it, in one place.

Whoever touches a block touches most of this, so it lies together. Each part has one owner, which alone writes it. All
others read it.
"""

import gc
from bisect import bisect_left

from octavo.collector import collector_at_rest
from octavo.ids import BlockHash, BlockId

UNPUBLISHED, ONCE, PROVEN = range(3)
"""What a block holds: nothing that can be found; what was used once; what a later request has found."""

NO_HASH = BlockHash(b"")

NO_NUMBER = BlockId(-1)
"""Of what stands where a block might, and is none of a pool."""


class Block:
    """Equal to itself only. As text it is its number."""

    __slots__ = ("after", "hash", "next", "number", "parent", "previous", "references", "state", "time", "tokens")

    def __init__(self, number: BlockId) -> None:
        self.number = number
        """By which the worker and the wire know it."""

        # The pool's (block_pool.py):
        self.references = 0
        """How many tables name it."""

        # The eviction order's (eviction.py, rings.py):
        self.state: int = UNPUBLISHED
        """UNPUBLISHED, ONCE or PROVEN."""
        self.previous = self
        self.next = self
        """Its neighbours in its ring. Mean nothing while it is in none."""
        self.time = 0
        """When it was put into its ring."""

        # The prefix index's (prefix_index.py, branches.py):
        self.parent: Parent | None = None
        """None: nothing is published in it, and its tokens and hash mean nothing."""
        self.tokens = b""
        """As they are hashed."""
        self.hash = NO_HASH
        self.after: Block | Siblings | None = None
        """What follows it: `Siblings` where that is more than one block, or was."""

    @property
    def is_published(self) -> bool:
        """Whether it can be found: published since it was allocated, and not reset since."""
        return self.state != UNPUBLISHED

    def twin(self) -> "Block":
        """One that stands alike in the pool and in the eviction order, and in no ring; nothing is published in it."""
        twin = Block(self.number)
        twin.references, twin.state, twin.time = self.references, self.state, self.time
        return twin

    def part(self) -> None:
        """Let go of all other blocks, and of itself: nobody asks for it any more."""
        self.previous = self.next = NOWHERE
        self.parent = self.after = None

    def __str__(self) -> str:
        return str(self.number)

    def __repr__(self) -> str:
        return f"Block({self.number})"


NOWHERE = Block(NO_NUMBER)
"""Where the links of a block lead that nobody asks for any more."""

Parent = Block | BlockHash
"""What stands before a block: a published block, or the root of its chain."""

Place = tuple[Parent, bytes]
"""What stands before a block, and the block's tokens as they are hashed. Means nothing once the parent is evicted."""


class Siblings:
    """Blocks that follow one parent, sorted by the bytes of their tokens."""

    __slots__ = ("_tokens", "blocks")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        """For reading."""
        self._tokens: list[bytes] = []

    def add(self, block: Block) -> None:
        """Another one, of other tokens."""
        at = bisect_left(self._tokens, block.tokens)
        self._tokens.insert(at, block.tokens)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """One of them is there no longer."""
        at = bisect_left(self._tokens, block.tokens)
        assert self.blocks[at] is block, f"block {block} does not stand among those that follow its parent"
        del self._tokens[at], self.blocks[at]

    def find(self, tokens: bytes) -> Block | None:
        """The one of these tokens."""
        at = bisect_left(self._tokens, tokens)
        return self.blocks[at] if at < len(self._tokens) and self._tokens[at] == tokens else None

    def beside(self, tokens: bytes) -> list[Block]:
        """Those between which these tokens would stand: one or two."""
        at = bisect_left(self._tokens, tokens)
        return self.blocks[max(0, at - 1) : at + 1]


def make_blocks(count: int) -> list[Block]:
    """Blocks 0, 1, ... They count as old at once, as all else does then, so the collector leaves them alone."""
    with collector_at_rest():
        blocks = [Block(BlockId(number)) for number in range(count)]
        gc.freeze()
        gc.unfreeze()
    return blocks
