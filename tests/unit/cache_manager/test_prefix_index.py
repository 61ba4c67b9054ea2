import pytest

from cache_manager.core.block import Block
from cache_manager.core.prefix_index import PrefixIndex
from octavo.hashing import next_hash, token_bytes
from octavo.ids import BlockHash, BlockId
from tests.support.books import numbers

ROOT = BlockHash(b"root" * 8)
A, B, C = (token_bytes([letter, letter + 1]) for letter in (11, 22, 33))
OTHER_ROOT = BlockHash(b"else" * 8)


class Chain:
    """An index with blocks 0, 1, ..., the first of which hold one chain."""

    def __init__(self, *chunks: bytes, next_hash=next_hash):
        self.index = PrefixIndex(2, next_hash)
        self.blocks = [Block(BlockId(number)) for number in range(8)]
        assert self.offer(range(len(chunks)), *chunks) == []

    def __getitem__(self, number):
        return self.blocks[number]

    def offer(self, wanted, *chunks):
        """Returns the numbers of the equals."""
        return numbers(self.index.offer([self.blocks[number] for number in wanted], ROOT, list(chunks)))

    def forget(self, *wanted):
        return self.index.forget([self.blocks[number] for number in wanted])

    def found(self, tokens, limit, root=ROOT):
        """The numbers of the hits, and the place after them."""
        hits, missing = self.index.longest_prefix(root, tokens, limit)
        return numbers(hits), missing

    def violations(self):
        return [*self.index.violations(self.blocks), *self.index.root_violations()]


def test_the_longest_published_prefix_is_found_and_what_is_missing_after_it():
    chain = Chain(A, B)
    assert chain.found(A + B + C, 3) == ([0, 1], (chain[1], C))


def test_a_prefix_is_no_longer_than_the_limit():
    chain = Chain(A, B)
    assert chain.found(A + B, 1) == ([0], (chain[0], B))


def test_tokens_that_fill_no_block_have_no_place():
    assert Chain(A).found(A + B[:-1], 2) == ([0], None)
    assert Chain(A).found(A[:-1], 1) == ([], None)


def test_the_same_tokens_after_another_prefix_are_another_block():
    assert Chain(A, B).found(C + B, 2) == ([], (ROOT, C))


def test_the_same_tokens_after_another_root_are_another_block():
    assert Chain(A, B).found(A + B, 2, OTHER_ROOT) == ([], (OTHER_ROOT, A))


def test_a_place_is_vacant_until_something_is_published_there():
    chain = Chain(A, B)
    assert not chain.index.is_vacant((chain[0], B))
    assert chain.index.is_vacant((chain[1], B))


def test_equal_blocks_give_way_to_those_that_came_first():
    chain = Chain(A, B)
    assert chain.offer([4, 5, 6], A, B, C) == [0, 1]
    assert [block.number for block in chain.blocks if block.parent is not None] == [0, 1, 6]
    assert chain[6].parent is chain[1]
    assert chain[6].hash == next_hash(chain[1].hash, C)
    assert not chain.violations()


def test_a_forgotten_block_is_not_found():
    chain = Chain(A, B)
    assert chain.forget(1, 7) == [chain[1].hash]
    assert chain.found(A + B, 2) == ([0], (chain[0], B))
    assert chain.forget(1) == []


def test_nothing_is_found_of_what_was_cleared():
    chain = Chain(A, B)
    assert chain.index.clear() == 2
    assert chain.found(A + B, 2) == ([], (ROOT, A))
    assert chain.index.hashes() == []
    assert not chain.violations()


def test_a_block_knows_what_stands_before_it():
    chain = Chain(A, B)
    assert [chain[0].parent, chain[1].parent] == [ROOT, chain[0]]


def test_a_block_is_found_by_its_tokens_even_when_all_hashes_are_the_same():
    chain = Chain(A, next_hash=lambda parent, tokens: BlockHash(bytes(32)))
    assert chain.found(B, 1) == ([], (ROOT, B))
    assert chain.offer([5], B) == []
    assert chain.found(B, 1) == ([5], None)
    assert chain.forget(5) == [bytes(32)]
    assert chain.found(A, 1) == ([0], None)


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [
        (lambda chain: chain.forget(0), "block 1 is published, block 0 before it is not"),
        (lambda chain: setattr(chain[1], "hash", ROOT), "block 1 is published under a hash that is not its own"),
        (lambda chain: setattr(chain[1], "parent", ROOT), "block 1 is not found in its own place"),
        (lambda chain: setattr(chain[0], "after", None), "block 1 is not found in its own place"),
        (lambda chain: setattr(chain[1], "after", chain[5]), "block 5 is listed after 1, wanted None"),
    ],
)
def test_the_check_finds_what_was_spoilt(spoil, violation):
    chain = Chain(A, B)
    assert not chain.violations()
    spoil(chain)
    assert violation in chain.violations()
