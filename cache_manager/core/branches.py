"""What follows each block: where chains of published blocks go on and where they part.

A block is found from the block before it by its tokens, compared whole. Nearly every block is followed by one block or
none, which costs one entry of a list. Only where chains part, and at their roots, are the blocks kept as `Siblings`,
sorted by their tokens: so the one that begins most like any tokens stands right before or right after the place where
those would stand, and an equal one stands there.

Invariants:
- A block is listed under its parent exactly while it is published.
- No two that follow one parent hold equal tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, BlockId

Parent = BlockId | BlockHash
"""What stands before a block: a published block, or the root of its chain."""

Place = tuple[Parent, bytes]
"""What stands before a block, and the block's tokens as they are hashed. Means nothing once the parent is evicted."""


class Siblings:
    """Blocks that follow one parent, sorted by the bytes of their tokens."""

    __slots__ = ("blocks", "tokens")

    def __init__(self) -> None:
        self.blocks: list[BlockId] = []
        self.tokens: list[bytes] = []

    def add(self, block: BlockId, tokens: bytes) -> None:
        """Another one, of other tokens."""
        at = bisect_left(self.tokens, tokens)
        self.tokens.insert(at, tokens)
        self.blocks.insert(at, block)

    def remove(self, block: BlockId, tokens: bytes) -> None:
        """One of them is there no longer."""
        at = bisect_left(self.tokens, tokens)
        assert self.blocks[at] == block, f"block {block} does not stand among those that follow its parent"
        del self.tokens[at], self.blocks[at]

    def find(self, tokens: bytes) -> BlockId | None:
        """The one of these tokens."""
        at = bisect_left(self.tokens, tokens)
        return self.blocks[at] if at < len(self.tokens) and self.tokens[at] == tokens else None

    def beside(self, tokens: bytes) -> slice:
        """Where those stand between which these tokens would."""
        at = bisect_left(self.tokens, tokens)
        return slice(max(0, at - 1), at + 1)


class Branches:
    """Parent -> the published blocks that follow it."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """`tokens` are those of each block, kept by the caller: they stay the same while the block is listed."""
        self._tokens = tokens
        self.after: list[BlockId | Siblings | None] = [None] * len(tokens)
        """By block: what follows it, `Siblings` where that is more than one block, or was. The prefix index, through
        whose hands 70 blocks go for each request, does the plain cases here by itself."""
        self._first: dict[BlockHash, Siblings] = {}

    def add(self, block: BlockId, parent: Parent) -> None:
        """A block was published after `parent`."""
        if isinstance(parent, int):
            followers = self.after[parent]
            if followers is None:
                self.after[parent] = block
                return
            if isinstance(followers, int):
                only, followers = followers, Siblings()
                followers.add(only, self._tokens[only])
                self.after[parent] = followers
        else:
            followers = self._first.get(parent)
            if followers is None:
                followers = self._first[parent] = Siblings()
        followers.add(block, self._tokens[block])

    def remove(self, block: BlockId, parent: Parent) -> None:
        """What was published in a block after `parent` is about to be dropped."""
        followers = self.after[parent] if isinstance(parent, int) else self._first[parent]
        if isinstance(followers, Siblings):
            followers.remove(block, self._tokens[block])
            if followers.blocks:
                return
        if isinstance(parent, int):
            self.after[parent] = None
        else:
            del self._first[parent]

    def find(self, parent: Parent, tokens: bytes) -> BlockId | None:
        """The published block of these tokens after `parent`."""
        followers = self.after[parent] if isinstance(parent, int) else self._first.get(parent)
        if isinstance(followers, int):
            return followers if self._tokens[followers] == tokens else None
        return None if followers is None else followers.find(tokens)

    def of(self, parent: Parent) -> Sequence[BlockId]:
        """The published blocks that follow `parent`."""
        followers = self.after[parent] if isinstance(parent, int) else self._first.get(parent)
        if followers is None:
            return ()
        return (followers,) if isinstance(followers, int) else followers.blocks

    def closest(self, parent: Parent, tokens: bytes) -> tuple[BlockId, int] | None:
        """The block after `parent` that begins most like `tokens`, and how many leading tokens they have in common.

        None if no block follows `parent`.
        """
        followers = self.after[parent] if isinstance(parent, int) else self._first.get(parent)
        if followers is None:
            return None
        if isinstance(followers, int):
            return followers, common_tokens(self._tokens[followers], tokens)
        beside = followers.blocks[followers.beside(tokens)]
        common = [common_tokens(self._tokens[block], tokens) for block in beside]
        most = max(common)
        return beside[common.index(most)], most

    def parents_first(self) -> Iterator[BlockId]:
        """All listed blocks, each after the one that it follows."""
        waiting = [block for followers in self._first.values() for block in followers.blocks]
        while waiting:
            block = waiting.pop()
            yield block
            waiting += self.of(block)

    def roots(self) -> tuple[BlockHash, ...]:
        """Those of all chains of which a block is listed."""
        return tuple(self._first)

    def violations(self, parent: Parent, parents: Sequence[Parent | None]) -> Iterator[str]:
        """What is wrong with the blocks listed after `parent`, given the parent of each block, None if unpublished."""
        followers = self.of(parent)
        if len(followers) > 1:
            tokens = [self._tokens[block] for block in followers]
            if tokens != sorted(set(tokens)):
                yield f"the blocks after {_named(parent)} are out of order"
        for block in followers:
            if parents[block] != parent:
                yield f"block {block} is listed after {_named(parent)}, wanted {_named(parents[block])}"


def common_tokens(one: bytes, other: bytes) -> int:
    """How many leading tokens two runs of little-endian u32 have in common."""
    if one[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0  # as nearly always where chains part
    length = min(len(one), len(other))
    differs = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not differs:
        return length // TOKEN_BYTES
    lowest_bit = (differs & -differs).bit_length() - 1  # in little-endian order the first difference is the lowest
    return lowest_bit // (8 * TOKEN_BYTES)


def _named(parent: Parent | None) -> str:
    return parent.hex() if isinstance(parent, bytes) else str(parent)
