import pytest

from cache_manager.core.prefix_index import PrefixIndex
from octavo.hashing import next_hash, token_bytes
from octavo.ids import BlockHash, BlockId

ROOT = BlockHash(b"root" * 8)
A, B, C = (token_bytes([letter, letter + 1]) for letter in (11, 22, 33))
OTHER_ROOT = BlockHash(b"else" * 8)


def index_of(*chunks: bytes, next_hash=next_hash) -> PrefixIndex:
    """An index with one chain, in blocks 0, 1, ..."""
    index = PrefixIndex(8, 2, next_hash)
    blocks = [BlockId(block) for block in range(len(chunks))]
    assert index.offer(blocks, ROOT, list(chunks)) == []
    return index


def violations_of(index: PrefixIndex) -> list[str]:
    return [*index.violations(map(BlockId, range(8))), *index.root_violations()]


def test_the_longest_published_prefix_is_found_and_what_is_missing_after_it():
    assert index_of(A, B).longest_prefix(ROOT, A + B + C, 3) == ([0, 1], (1, C))


def test_a_prefix_is_no_longer_than_the_limit():
    assert index_of(A, B).longest_prefix(ROOT, A + B, 1) == ([0], (0, B))


def test_tokens_that_fill_no_block_have_no_place():
    assert index_of(A).longest_prefix(ROOT, A + B[:-1], 2) == ([0], None)
    assert index_of(A).longest_prefix(ROOT, A[:-1], 1) == ([], None)


def test_the_same_tokens_after_another_prefix_are_another_block():
    assert index_of(A, B).longest_prefix(ROOT, C + B, 2) == ([], (ROOT, C))


def test_the_same_tokens_after_another_root_are_another_block():
    assert index_of(A, B).longest_prefix(OTHER_ROOT, A + B, 2) == ([], (OTHER_ROOT, A))


def test_a_place_is_vacant_until_something_is_published_there():
    index = index_of(A, B)
    assert not index.is_vacant((BlockId(0), B))
    assert index.is_vacant((BlockId(1), B))


def test_equal_blocks_give_way_to_those_that_came_first():
    index = index_of(A, B)
    assert index.offer([BlockId(4), BlockId(5), BlockId(6)], ROOT, [A, B, C]) == [0, 1]
    assert [block in index for block in map(BlockId, range(7))] == [True, True, False, False, False, False, True]
    assert index.block_before(BlockId(6)) == 1
    assert index.hash_of(BlockId(6)) == next_hash(index.hash_of(BlockId(1)), C)
    assert not violations_of(index)


def test_a_forgotten_block_is_not_found():
    index = index_of(A, B)
    second = index.hash_of(BlockId(1))
    assert index.forget([BlockId(1), BlockId(7)]) == [second]
    assert index.longest_prefix(ROOT, A + B, 2) == ([0], (0, B))
    assert index.forget([BlockId(1)]) == []


def test_a_block_knows_what_stands_before_it():
    index = index_of(A, B)
    assert [index.block_before(BlockId(0)), index.block_before(BlockId(1))] == [None, 0]


def test_a_block_is_found_by_its_tokens_even_when_all_hashes_are_the_same():
    index = index_of(A, next_hash=lambda parent, tokens: BlockHash(bytes(32)))
    assert index.longest_prefix(ROOT, B, 1) == ([], (ROOT, B))
    assert index.offer([BlockId(5)], ROOT, [B]) == []
    assert index.longest_prefix(ROOT, B, 1) == ([5], None)
    assert index.forget([BlockId(5)]) == [bytes(32)]
    assert index.longest_prefix(ROOT, A, 1) == ([0], None)


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [
        (lambda index: index.forget([BlockId(0)]), "block 1 is published, block 0 before it is not"),
        (lambda index: index._hashes.__setitem__(1, ROOT), "block 1 is published under a hash that is not its own"),
        (lambda index: index._parents.__setitem__(1, ROOT), "block 1 is not found in its own place"),
        (lambda index: index.branches.after.__setitem__(0, None), "block 1 is not found in its own place"),
        (lambda index: index.branches.after.__setitem__(1, BlockId(5)), "block 5 is listed after 1, wanted None"),
    ],
)
def test_the_check_finds_what_was_spoilt(spoil, violation):
    index = index_of(A, B)
    assert not violations_of(index)
    spoil(index)
    assert violation in violations_of(index)
