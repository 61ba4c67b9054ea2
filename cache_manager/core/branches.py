"""Where chains of published blocks part: which blocks follow one block, and which of them begins most like some tokens.

Invariants:
- A block is listed under its parent exactly while it is published. No two that follow one parent hold equal tokens.
- The blocks that follow one parent are sorted by the bytes of their tokens. So the one that has the longest beginning
  in common with any tokens stands right before or right after the place where those would stand.

Nearly every block is followed by one block or none, which costs one entry of a list; only where chains part, and at
their roots, are the blocks kept in a list of their own.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, BlockId

Parent = BlockId | BlockHash
"""What stands before a block: a published block, or the root of its chain."""

Place = tuple[Parent, bytes]
"""What stands before a block, and the block's tokens as they are hashed. Means nothing once the parent is evicted."""


class Branches:
    """Parent -> the published blocks that follow it."""

    def __init__(self, places: Sequence[Place | None]) -> None:
        """`places` are those of each block, kept by the caller: they stay the same while the block is listed."""
        self._places = places
        self.after: list[BlockId | list[BlockId] | None] = [None] * len(places)
        """By block: what follows it, a list where that is more than one block, or was. The prefix index, through whose
        hands 70 blocks go for each request, does the plain cases here by itself."""
        self._first: dict[BlockHash, list[BlockId]] = {}

    def add(self, block: BlockId, place: Place) -> None:
        """A block was published in this place."""
        parent, _ = place
        if isinstance(parent, int):
            followers = self.after[parent]
            if followers is None:
                self.after[parent] = block
                return
            if isinstance(followers, int):
                followers = self.after[parent] = [followers]
        else:
            followers = self._first.setdefault(parent, [])
        insort(followers, block, key=self._tokens)

    def remove(self, block: BlockId, place: Place) -> None:
        """What was published in this place is about to be dropped."""
        parent, tokens = place
        followers = self.after[parent] if isinstance(parent, int) else self._first[parent]
        if isinstance(followers, list):
            at = bisect_left(followers, tokens, key=self._tokens)
            assert followers[at] == block, f"block {block} does not stand after {_named(parent)}"
            del followers[at]
            if followers:
                return
        if isinstance(parent, int):
            self.after[parent] = None
        else:
            del self._first[parent]

    def of(self, parent: Parent) -> Sequence[BlockId]:
        """The published blocks that follow `parent`."""
        followers = self.after[parent] if isinstance(parent, int) else self._first.get(parent)
        if followers is None:
            return ()
        return (followers,) if isinstance(followers, int) else followers

    def closest(self, parent: Parent, tokens: bytes) -> tuple[BlockId, int] | None:
        """The block after `parent` that begins most like `tokens`, and how many leading tokens they have in common.

        None if no block follows `parent`.
        """
        followers = self.of(parent)
        if not followers:
            return None
        at = bisect_left(followers, tokens, key=self._tokens)
        beside = followers[max(0, at - 1) : at + 1]
        return max(
            ((block, common_tokens(self._tokens(block), tokens)) for block in beside), key=lambda found: found[1]
        )

    def violations(self, places: Mapping[BlockId, Place]) -> Iterator[str]:
        """What is wrong with the lists, given the places of all published blocks."""
        listed: dict[BlockId, Parent] = {}
        for parent in (*map(BlockId, range(len(self.after))), *self._first):
            followers = self.of(parent)
            listed.update(dict.fromkeys(followers, parent))
            tokens = [self._tokens(block) for block in followers if block in places]
            if tokens != sorted(set(tokens)):
                yield f"the blocks after {_named(parent)} are out of order"
        parents = {block: parent for block, (parent, _) in places.items()}
        for block in listed.keys() | parents.keys():
            if listed.get(block) != parents.get(block):
                yield f"block {block} is listed after {_named(listed.get(block))}, wanted {_named(parents.get(block))}"

    def _tokens(self, block: BlockId) -> bytes:
        place = self._places[block]
        assert place is not None, f"block {block} is listed and not published"
        return place[1]


def common_tokens(one: bytes, other: bytes) -> int:
    """How many leading tokens two runs of little-endian u32 have in common."""
    length = min(len(one), len(other))
    differs = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not differs:
        return length // TOKEN_BYTES
    lowest_bit = (differs & -differs).bit_length() - 1  # in little-endian order the first difference is the lowest
    return lowest_bit // (8 * TOKEN_BYTES)


def _named(parent: Parent | None) -> str:
    return parent.hex() if isinstance(parent, bytes) else str(parent)
