"""What follows each block: where chains of published blocks go on and where they part.

A block is found from the block before it by its tokens, compared whole. Nearly every block is followed by one block or
none, which costs one entry of a list. Only where chains part, and at their roots, are the blocks kept as `Siblings`,
sorted by their tokens: so the one that begins most like any tokens stands right before or right after the place where
those would stand, and an equal one stands there.

Invariants:
- A block is listed under its parent exactly while it is published.
- No two that follow one parent hold equal tokens.
"""

from collections.abc import Iterator, Sequence

from cache_manager.core.block import Block, Parent, Siblings
from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash


class Branches:
    """Parent -> the published blocks that follow it."""

    def __init__(self) -> None:
        self._first: dict[BlockHash, Siblings] = {}
        """By root of a chain. What follows a block stands in the block: the prefix index, through whose hands 70 blocks
        go for each request, does the plain cases there by itself."""

    def add(self, block: Block, parent: Parent) -> None:
        """A block was published after `parent`."""
        if isinstance(parent, Block):
            followers = parent.after
            if followers is None:
                parent.after = block
                return
            if isinstance(followers, Block):
                only, followers = followers, Siblings()
                followers.add(only)
                parent.after = followers
        else:
            followers = self._first.get(parent)
            if followers is None:
                followers = self._first[parent] = Siblings()
        followers.add(block)

    def remove(self, block: Block, parent: Parent) -> None:
        """What was published in a block after `parent` is about to be dropped."""
        followers = self._after(parent)
        if isinstance(followers, Siblings):
            followers.remove(block)
            if followers.blocks:
                return
        if isinstance(parent, Block):
            parent.after = None
        else:
            del self._first[parent]

    def find(self, parent: Parent, tokens: bytes) -> Block | None:
        """The published block of these tokens after `parent`."""
        followers = self._after(parent)
        if isinstance(followers, Block):
            return followers if followers.tokens == tokens else None
        return None if followers is None else followers.find(tokens)

    def of(self, parent: Parent) -> Sequence[Block]:
        """The published blocks that follow `parent`."""
        followers = self._after(parent)
        if followers is None:
            return ()
        return (followers,) if isinstance(followers, Block) else followers.blocks

    def closest(self, parent: Parent, tokens: bytes) -> tuple[Block, int] | None:
        """The block after `parent` that begins most like `tokens`, and how many leading tokens they have in common.

        None if no block follows `parent`.
        """
        followers = self._after(parent)
        if followers is None:
            return None
        if isinstance(followers, Block):
            return followers, common_tokens(followers.tokens, tokens)
        beside = followers.beside(tokens)
        common = [common_tokens(block.tokens, tokens) for block in beside]
        most = max(common)
        return beside[common.index(most)], most

    def parents_first(self) -> Iterator[Block]:
        """All listed blocks, each after the one that it follows."""
        waiting = [block for followers in self._first.values() for block in followers.blocks]
        while waiting:
            block = waiting.pop()
            yield block
            waiting += self.of(block)

    def roots(self) -> tuple[BlockHash, ...]:
        """Those of all chains of which a block is listed."""
        return tuple(self._first)

    def violations(self, parent: Parent) -> Iterator[str]:
        """What is wrong with the blocks listed after `parent`."""
        followers = self.of(parent)
        if len(followers) > 1:
            tokens = [block.tokens for block in followers]
            if tokens != sorted(set(tokens)):
                yield f"the blocks after {_named(parent)} are out of order"
        for block in followers:
            if block.parent != parent:
                yield f"block {block} is listed after {_named(parent)}, wanted {_named(block.parent)}"

    def _after(self, parent: Parent) -> Block | Siblings | None:
        return parent.after if isinstance(parent, Block) else self._first.get(parent)


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
