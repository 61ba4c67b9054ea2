import pytest

from cache_manager.core.rings import Rings


def rings_of(*contents):
    """Rings that hold these blocks, put there at times 1, 2, ..."""
    rings = Rings(10, len(contents))
    for ring, blocks in zip(rings, contents, strict=True):
        for time, block in enumerate(blocks, start=1):
            rings.append(ring, [block], time)
    return rings


def contents_of(rings):
    return [list(rings.blocks(ring)) for ring in rings]


def test_blocks_are_taken_in_the_order_in_which_they_were_put_there():
    rings = rings_of([3, 1, 2], [5])
    first, second = rings
    assert rings.take(first, 2, 9) == [3, 1]
    assert rings.take(second, 2, 9) == [5]
    assert contents_of(rings) == [[2], []]


def test_no_block_is_taken_that_was_put_there_later_than_asked():
    rings = rings_of([3, 1, 2])
    (ring,) = rings
    assert rings.take(ring, 9, 2) == [3, 1]
    assert rings.take(ring, 9, 2) == []
    assert contents_of(rings) == [[2]]


def test_blocks_leave_from_any_place_and_may_come_back():
    rings = rings_of([3, 1, 2], [5, 6])
    first, second = rings
    rings.remove([1, 3, 6])
    rings.append(second, [3, 1], 4)
    assert contents_of(rings) == [[2], [5, 3, 1]]
    assert [*rings.violations(first), *rings.violations(second)] == []


@pytest.mark.parametrize("links", ["next", "_previous"])
def test_the_check_finds_a_broken_link_and_ends(links):
    rings = rings_of([0, 1, 2])
    (ring,) = rings
    getattr(rings, links)[1] = 1
    assert any("links of ring 0 break" in violation for violation in rings.violations(ring))
