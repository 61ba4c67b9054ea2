"""Which published block follows another, and which begins most like some tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.core.block import Block
from cache_manager.core.branches import Branches, common_tokens
from octavo.hashing import token_bytes
from octavo.ids import BlockHash, BlockId
from tests.support.books import numbers

ROOT = BlockHash(b"root" * 8)
BLOCK = Block(BlockId(0))
TOKENS = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=3, max_size=3)


class Followers:
    """Blocks 1, 2, ... of these tokens after one parent."""

    def __init__(self, parent, *followers: list[int]):
        self.parent, self.branches = parent, Branches()
        self.blocks = [self.published(number, tokens) for number, tokens in enumerate(followers, start=1)]

    def published(self, number, tokens):
        block = Block(BlockId(number))
        block.parent, block.tokens = self.parent, token_bytes(tokens)
        self.branches.add(block, self.parent)
        return block

    def remove(self, number):
        self.branches.remove(self.blocks[number - 1], self.parent)

    def find(self, *tokens):
        block = self.branches.find(self.parent, token_bytes(tokens))
        return block and block.number

    def closest(self, *tokens):
        found = self.branches.closest(self.parent, token_bytes(tokens))
        return found and (found[0].number, found[1])


@pytest.mark.parametrize("parent", [ROOT, BLOCK])
class TestClosest:
    @pytest.fixture(autouse=True)
    def nothing_follows(self):
        BLOCK.after = None

    def test_nothing_follows_a_parent_that_is_not_known(self, parent):
        assert Followers(parent).closest(1) is None
        assert Branches().of(parent) == ()

    def test_the_only_one_is_the_closest_even_if_it_begins_otherwise(self, parent):
        assert Followers(parent, [1, 2, 3]).closest(9, 9) == (1, 0)

    def test_the_longest_beginning_in_common_wins(self, parent):
        followers = Followers(parent, [1, 2, 3], [1, 2, 9], [1, 7, 7], [5, 5, 5])
        assert followers.closest(1, 7, 8) == (3, 2)
        assert followers.closest(1, 2, 9) == (2, 3)

    def test_a_block_is_found_by_all_of_its_tokens(self, parent):
        followers = Followers(parent, [1, 2, 3], [1, 2, 9])
        assert followers.find(1, 2, 9) == 2
        assert followers.find(1, 2) is None

    def test_the_only_one_is_found_by_all_of_its_tokens(self, parent):
        followers = Followers(parent, [1, 2, 3])
        assert followers.find(1, 2, 3) == 1
        assert followers.find(1, 2, 4) is None

    def test_tokens_that_end_inside_a_block_are_found_in_it(self, parent):
        assert Followers(parent, [1, 2, 3], [4, 5, 6]).closest(4, 5) == (2, 2)

    def test_a_block_that_was_dropped_is_not_found(self, parent):
        followers = Followers(parent, [1, 2, 3], [1, 2, 9])
        followers.remove(2)
        assert followers.closest(1, 2, 9) == (1, 2)
        followers.remove(1)
        assert followers.closest(1, 2, 9) is None

    def test_one_of_ten_thousand_is_found(self, parent):
        followers = Followers(parent, *([number, number, 0] for number in range(10_000)))
        assert followers.closest(4321, 4321, 1) == (4322, 2)


@given(kept=st.lists(TOKENS, unique_by=tuple, min_size=1), wanted=st.lists(st.sampled_from([0, 1, 256, 2**32 - 1])))
def test_no_block_begins_more_like_the_tokens_than_the_closest(kept, wanted):
    """Against comparing with every one."""

    def common(tokens):
        return next((at for at, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), 3)

    found = Followers(ROOT, *kept).closest(*wanted)
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
    followers = Followers(ROOT, [1, 2, 3], [4, 5, 6])
    branches, (first, second) = followers.branches, followers.blocks
    assert branches.roots() == (ROOT,)
    assert list(branches.violations(ROOT)) == []
    second.parent = None
    assert list(branches.violations(ROOT)) == [f"block 2 is listed after {ROOT.hex()}, wanted None"]
    second.parent = first
    assert list(branches.violations(ROOT)) == [f"block 2 is listed after {ROOT.hex()}, wanted 1"]
    second.parent, second.tokens = ROOT, first.tokens
    assert list(branches.violations(ROOT)) == [f"the blocks after {ROOT.hex()} are out of order"]


def test_all_blocks_are_named_parents_first():
    branches = Branches()
    blocks = [Block(BlockId(number)) for number in range(5)]
    for block in blocks:
        block.tokens = token_bytes([block.number])
    for number, parent in ((4, ROOT), (2, blocks[4]), (0, blocks[2]), (1, blocks[4]), (3, ROOT)):
        branches.add(blocks[number], parent)
    order = numbers(branches.parents_first())
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order.index(4) < order.index(2) < order.index(0)
    assert order.index(4) < order.index(1)
