import pytest

from cache_manager.core.block import Block
from cache_manager.core.rings import Ring, unlink
from octavo.ids import BlockId
from tests.support.books import numbers


class Blocks:
    """Ten of them, and rings in which they stand."""

    def __init__(self):
        self.all = [Block(BlockId(number)) for number in range(10)]

    def of(self, *wanted):
        """The blocks of these numbers."""
        return [self.all[number] for number in wanted]

    def ring(self, *wanted):
        """One with these blocks, put there at times 1, 2, ..."""
        ring = Ring()
        for time, block in enumerate(self.of(*wanted), start=1):
            ring.append([block], time)
        return ring


def test_blocks_are_taken_in_the_order_in_which_they_were_put_there():
    ring = Blocks().ring(3, 1, 2)
    assert numbers(ring.take(2, 9)) == [3, 1]
    assert numbers(ring) == [2]
    assert numbers(ring.take(2, 9)) == [2]
    assert ring.front is None


def test_no_block_is_taken_that_was_put_there_later_than_asked():
    ring = Blocks().ring(3, 1, 2)
    assert numbers(ring.take(9, 2)) == [3, 1]
    assert numbers(ring.take(9, 2)) == []
    assert numbers(ring) == [2]


def test_blocks_leave_from_any_place_and_may_come_back():
    blocks = Blocks()
    first, second = blocks.ring(3, 1, 2), blocks.ring(5, 6)
    unlink(blocks.of(1, 3, 6))
    second.append(blocks.of(3, 1), 4)
    assert (numbers(first), numbers(second)) == ([2], [5, 3, 1])
    assert first.is_whole()
    assert second.is_whole()


@pytest.mark.parametrize("links", ["next", "previous"])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_check_finds_a_broken_link_and_ends(links, broken):
    blocks = Blocks()
    ring = blocks.ring(0, 1, 2)
    block = blocks.all[broken]
    setattr(block, links, block)
    assert not ring.is_whole()
