"""Lists of blocks in which every step takes the same time: append, remove, take from the front.

A block is in one ring at most, under the time at which it was put there. The links are two plain lists; block objects
cost as much and make the garbage collector stop for 0.1 s at a million blocks.
"""

from collections.abc import Iterator
from typing import cast

from octavo.ids import BlockId


class Rings:
    """A ring goes by a number that no block has: the place between its back and its front."""

    def __init__(self, num_blocks: int, num_rings: int) -> None:
        self._num_blocks = num_blocks
        places = cast(list[BlockId], [*range(num_blocks + num_rings)])  # to call BlockId for each takes twice as long
        self.next = places
        """Of each place the one behind it; of a ring its front, or itself if it is empty. For reading."""
        self._previous = places.copy()
        self.times = [0] * num_blocks
        """When each block was put into its ring. For reading."""

    def __iter__(self) -> Iterator[BlockId]:
        """The numbers of the rings."""
        yield from map(BlockId, range(self._num_blocks, len(self.next)))

    def append(self, ring: BlockId, blocks: list[BlockId], time: int) -> None:
        """Put blocks, which are in no ring, at the back, in this order."""
        following, previous, times = self.next, self._previous, self.times
        place = previous[ring]
        for block in blocks:
            following[place] = block
            previous[block] = place
            times[block] = time
            place = block
        following[place], previous[ring] = ring, place

    def remove(self, blocks: list[BlockId]) -> None:
        """Take blocks out of their rings."""
        following, previous = self.next, self._previous
        for block in blocks:
            before, after = previous[block], following[block]
            following[before] = after
            previous[after] = before

    def take(self, ring: BlockId, most: int, until: int) -> list[BlockId]:
        """Take at most `most` blocks from the front, none of a time after `until`."""
        following, times = self.next, self.times
        taken: list[BlockId] = []
        block = following[ring]
        for _ in range(most):
            if block == ring or times[block] > until:
                break
            taken.append(block)
            block = following[block]
        following[ring], self._previous[block] = block, ring
        return taken

    def blocks(self, ring: BlockId) -> Iterator[BlockId]:
        """The blocks of a ring, from the front, as far as its links agree with one another."""
        place = ring
        for _ in range(self._num_blocks + 1):
            before, place = place, self.next[place]
            if self._previous[place] != before or place >= self._num_blocks:
                return
            yield place

    def violations(self, ring: BlockId) -> Iterator[str]:
        """What is wrong with a ring."""
        blocks = list(self.blocks(ring))
        if self.next[blocks[-1] if blocks else ring] != ring:
            yield f"the links of ring {ring - self._num_blocks} break after {len(blocks)} blocks"

    def copy(self) -> "Rings":
        """Others of the same blocks."""
        twin = Rings(self._num_blocks, len(self.next) - self._num_blocks)
        twin.next, twin._previous, twin.times = self.next[:], self._previous[:], self.times[:]
        return twin
