from array import array

import pytest

from cache_manager.core.block import Block
from cache_manager.core.block_table import BlockTable, blocks_needed
from octavo.hashing import token_bytes
from octavo.ids import BlockHash, BlockId
from tests.support.books import numbers


def table_of(length: int, *, room: int = 0, size: int = 4) -> BlockTable:
    """Blocks 10, 11, ... over tokens 0, 1, ..., with every full block published."""
    blocks = [Block(BlockId(10 + index)) for index in range(blocks_needed(max(length, room), size))]
    return BlockTable(
        block_size=size,
        root=BlockHash(b"root"),
        blocks=blocks,
        tokens=array("I", range(length)),
        room=len(blocks) * size,
        published=length // size,
    )


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_positions_need_whole_blocks(positions, blocks):
    """Boundary lengths kS-1, kS, kS+1."""
    assert blocks_needed(positions, 4) == blocks


@pytest.mark.parametrize(
    ("length", "full", "has_tail"),
    [(0, 0, False), (1, 0, True), (3, 0, True), (4, 1, False), (5, 1, True), (7, 1, True), (8, 2, False)],
)
def test_a_table_knows_its_full_blocks_and_whether_a_tail_follows(length, full, has_tail):
    table = table_of(length)
    assert (table.length, table.full_blocks, table.has_tail) == (length, full, has_tail)


def test_full_blocks_tell_their_tokens():
    assert table_of(13).block_tokens(1, 3) == [token_bytes([4, 5, 6, 7]), token_bytes([8, 9, 10, 11])]


@pytest.mark.parametrize(("end", "missing"), [(0, 0), (6, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_blocks_are_missing_only_beyond_the_last_one(end, missing):
    assert table_of(6).missing(end) == missing


def test_a_fork_covers_the_committed_positions_only():
    parent = table_of(6, room=12)
    child = parent.fork()
    assert (numbers(child.blocks), child.length, child.published) == ([10, 11], 6, 1)
    assert child.room == 6
    assert numbers(parent.blocks) == [10, 11, 12]


def test_a_fork_goes_its_own_way():
    parent = table_of(6)
    child = parent.fork()
    child.blocks[1] = Block(BlockId(99))
    child.tokens.append(77)
    assert (numbers(parent.blocks), parent.length) == ([10, 11], 6)


@pytest.mark.parametrize(
    ("length", "kept", "cut", "published"),
    [
        (9, [10, 11, 12], [], 2),
        (8, [10, 11], [12], 2),
        (7, [10, 11], [12], 1),
        (5, [10, 11], [12], 1),
        (4, [10], [11, 12], 1),
        (3, [10], [11, 12], 0),
        (0, [], [10, 11, 12], 0),
    ],
)
def test_truncation_cuts_the_blocks_behind(length, kept, cut, published):
    """Boundary lengths kS-1, kS, kS+1."""
    table = table_of(9)
    assert numbers(table.truncate(length)) == cut
    assert (numbers(table.blocks), table.length, table.published) == (kept, length, published)
    assert table.room == length


def test_truncation_to_the_same_length_gives_the_room_back():
    table = table_of(6, room=12)
    assert numbers(table.truncate(6)) == [12]
    assert (numbers(table.blocks), table.room) == ([10, 11], 6)
