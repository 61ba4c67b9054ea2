"""Which published block follows another, and which begins most like some tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.core.branches import Branches, common_tokens
from octavo.hashing import token_bytes
from octavo.ids import BlockHash, BlockId

ROOT = BlockHash(b"root" * 8)
TOKENS = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=3, max_size=3)


def branches_of(parent, *followers: list[int]) -> Branches:
    """Blocks 1, 2, ... after one parent."""
    branches = Branches([b"", *map(token_bytes, followers)])
    for block in range(1, len(followers) + 1):
        branches.add(BlockId(block), parent)
    return branches


@pytest.mark.parametrize("parent", [ROOT, BlockId(0)])
class TestClosest:
    def test_nothing_follows_a_parent_that_is_not_known(self, parent):
        assert branches_of(parent).closest(parent, token_bytes([1])) is None
        assert branches_of(parent).of(parent) == ()

    def test_the_only_one_is_the_closest_even_if_it_begins_otherwise(self, parent):
        assert branches_of(parent, [1, 2, 3]).closest(parent, token_bytes([9, 9])) == (1, 0)

    def test_the_longest_beginning_in_common_wins(self, parent):
        branches = branches_of(parent, [1, 2, 3], [1, 2, 9], [1, 7, 7], [5, 5, 5])
        assert branches.closest(parent, token_bytes([1, 7, 8])) == (3, 2)
        assert branches.closest(parent, token_bytes([1, 2, 9])) == (2, 3)

    def test_a_block_is_found_by_all_of_its_tokens(self, parent):
        branches = branches_of(parent, [1, 2, 3], [1, 2, 9])
        assert branches.find(parent, token_bytes([1, 2, 9])) == 2
        assert branches.find(parent, token_bytes([1, 2])) is None
        assert branches_of(parent, [1, 2, 3]).find(parent, token_bytes([1, 2, 4])) is None

    def test_tokens_that_end_inside_a_block_are_found_in_it(self, parent):
        assert branches_of(parent, [1, 2, 3], [4, 5, 6]).closest(parent, token_bytes([4, 5])) == (2, 2)

    def test_a_block_that_was_dropped_is_not_found(self, parent):
        branches = branches_of(parent, [1, 2, 3], [1, 2, 9])
        branches.remove(BlockId(2), parent)
        assert branches.closest(parent, token_bytes([1, 2, 9])) == (1, 2)
        branches.remove(BlockId(1), parent)
        assert branches.closest(parent, token_bytes([1, 2, 9])) is None

    def test_one_of_ten_thousand_is_found(self, parent):
        branches = branches_of(parent, *([number, number, 0] for number in range(10_000)))
        assert branches.closest(parent, token_bytes([4321, 4321, 1])) == (4322, 2)


@given(kept=st.lists(TOKENS, unique_by=tuple, min_size=1), wanted=st.lists(st.sampled_from([0, 1, 256, 2**32 - 1])))
def test_no_block_begins_more_like_the_tokens_than_the_closest(kept, wanted):
    """Against comparing with every one."""

    def common(tokens):
        return next((at for at, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), 3)

    branches = branches_of(ROOT, *kept)
    found = branches.closest(ROOT, token_bytes(wanted))
    assert found is not None
    best = max(min(common(tokens), len(wanted)) for tokens in kept)
    assert found[1] == min(common(kept[found[0] - 1]), len(wanted)) == best


@given(one=TOKENS, other=st.lists(st.sampled_from([0, 1, 256]), max_size=4))
def test_tokens_in_common_are_counted_from_the_left(one, other):
    counted = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        counted += 1
    assert common_tokens(token_bytes(one), token_bytes(other)) == counted


def test_the_lists_are_audited():
    branches = branches_of(ROOT, [1, 2, 3], [4, 5, 6])
    assert branches.roots() == (ROOT,)
    assert list(branches.violations(ROOT, [None, ROOT, ROOT])) == []
    assert list(branches.violations(ROOT, [None, ROOT, None])) == [f"block 2 is listed after {ROOT.hex()}, wanted None"]
    assert list(branches.violations(ROOT, [None, ROOT, BlockId(1)])) == [
        f"block 2 is listed after {ROOT.hex()}, wanted 1"
    ]


def test_all_blocks_are_named_parents_first():
    branches = Branches([token_bytes([number]) for number in range(5)])
    for block, parent in ((4, ROOT), (2, 4), (0, 2), (1, 4), (3, ROOT)):
        branches.add(BlockId(block), parent)
    order = list(branches.parents_first())
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order.index(4) < order.index(2) < order.index(0)
    assert order.index(4) < order.index(1)
