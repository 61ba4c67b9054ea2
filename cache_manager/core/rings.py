"""Lists of blocks in which every step takes the same time: append, remove, take from the front.

A block is in one ring at most, under the time at which it was put there. The links are the blocks' own, so that a block
leaves its ring without anyone asking which it is.
"""

from collections.abc import Iterator, Mapping

from cache_manager.core.block import NO_NUMBER, Block


class Ring:
    """From its front to its back and over `end`, which is no block of the pool, to its front again."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end = Block(NO_NUMBER)

    @property
    def front(self) -> Block | None:
        """The block that has been here for longest; None if there is none."""
        front = self.end.next
        return None if front is self.end else front

    def append(self, blocks: list[Block], time: int) -> None:
        """Put blocks, which are in no ring, at the back, in this order."""
        end = self.end
        place = end.previous
        for block in blocks:
            place.next = block
            block.previous = place
            block.time = time
            place = block
        place.next = end
        end.previous = place

    def take(self, most: int, until: int) -> list[Block]:
        """Take at most `most` blocks from the front, none of a time after `until`."""
        end = self.end
        taken: list[Block] = []
        block = end.next
        for _ in range(most):
            if block is end or block.time > until:
                break
            taken.append(block)
            block = block.next
        end.next = block
        block.previous = end
        return taken

    def __iter__(self) -> Iterator[Block]:
        """The blocks, from the front, as far as the links agree with one another: so each comes once."""
        end = place = self.end
        while place.next is not end and place.next.previous is place:
            place = place.next
            yield place

    def copy(self, twins: Mapping[Block, Block]) -> "Ring":
        """Another one, of the twins of these blocks."""
        twin = Ring()
        place = end = twin.end
        for block in self:
            following = twins[block]
            place.next, following.previous = following, place
            place = following
        place.next, end.previous = end, place
        return twin

    def is_whole(self) -> bool:
        """Whether the links lead from the front to the back, and agree with one another."""
        *_, last = (self.end, *self)
        return last.next is self.end and self.end.previous is last


def unlink(blocks: list[Block]) -> None:
    """Take blocks out of their rings."""
    for block in blocks:
        before, after = block.previous, block.next
        before.next = after
        after.previous = before
