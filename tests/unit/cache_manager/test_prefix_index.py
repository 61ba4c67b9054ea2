import pytest

from cache_manager.core.prefix_index import PrefixIndex
from octavo.hashing import next_hash, token_bytes
from octavo.ids import BlockHash, BlockId
from tests.support.books import colliding_hash

ROOT = BlockHash(b"root" * 8)
A, B, C = (token_bytes([letter, letter + 1]) for letter in (11, 22, 33))
LIKE_A = token_bytes([41, 42])
"""Has the key of A when the hash collides."""


def index_of(*chunks: bytes, root: BlockHash = ROOT, next_hash=next_hash) -> PrefixIndex:
    """An index with one chain, in blocks 0, 1, ..."""
    index = PrefixIndex(8, 2, next_hash)
    parent = root
    for block, chunk in enumerate(map(bytes, chunks)):
        assert index.offer(BlockId(block), parent, chunk) == block
        parent = BlockId(block)
    return index


def test_the_longest_published_prefix_is_found():
    assert index_of(A, B).longest_prefix(ROOT, A + B + C, 3) == [0, 1]


def test_a_prefix_is_no_longer_than_the_limit():
    assert index_of(A, B).longest_prefix(ROOT, A + B, 1) == [0]


def test_the_same_tokens_after_another_prefix_are_another_block():
    assert index_of(A, B).longest_prefix(ROOT, C + B, 2) == []


def test_the_same_tokens_after_another_root_are_another_block():
    assert index_of(A, B).longest_prefix(BlockHash(b"else" * 8), A + B, 2) == []


def test_an_equal_block_gives_way_to_the_one_that_came_first():
    index = index_of(A, B)
    assert index.offer(BlockId(5), BlockId(0), B) == 1
    assert BlockId(5) not in index


def test_a_forgotten_block_is_not_found():
    index = index_of(A, B)
    second = index.hash_of(BlockId(1))
    assert index.forget(BlockId(1)) == second
    assert index.longest_prefix(ROOT, A + B, 2) == [0]
    assert index.forget(BlockId(1)) is None


def test_a_block_knows_what_stands_before_it():
    index = index_of(A, B)
    assert [index.block_before(BlockId(0)), index.block_before(BlockId(1))] == [None, 0]


def test_a_collision_on_the_key_is_a_counted_miss():
    index = index_of(A, next_hash=colliding_hash)
    assert index.longest_prefix(ROOT, LIKE_A, 1) == []
    assert index.collisions == 1


def test_a_collision_on_the_key_cannot_be_published():
    index = index_of(A, next_hash=colliding_hash)
    assert index.offer(BlockId(5), ROOT, LIKE_A) is None
    assert index.collisions == 1
    assert index.longest_prefix(ROOT, A, 1) == [0]
    assert not list(index.violations())


def test_tokens_are_compared_even_when_the_whole_hash_agrees():
    def constant(parent: bytes, tokens: bytes) -> BlockHash:
        return BlockHash(bytes(32))

    index = index_of(A, next_hash=constant)
    assert index.longest_prefix(ROOT, B, 1) == []
    assert index.offer(BlockId(5), ROOT, B) is None
    assert index.collisions == 2


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [
        (lambda index: index.forget(BlockId(0)), "block 1 is published, block 0 before it is not"),
        (lambda index: index._tokens.__setitem__(1, C), "block 1 is published under a hash that is not its own"),
        (lambda index: index._blocks.clear(), "2 blocks have a hash, 0 have a key"),
    ],
)
def test_the_check_finds_what_was_spoilt(spoil, violation):
    index = index_of(A, B)
    assert not list(index.violations())
    spoil(index)
    assert violation in list(index.violations())
