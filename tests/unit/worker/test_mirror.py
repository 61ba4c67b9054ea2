"""The worker's copy of what is published, and the messages that it becomes."""

from collections.abc import Sequence

from octavo.block_record import NO_BLOCK, read_records, record_bytes, record_packer
from octavo.ids import NOBODY, BlockHash, BlockId, SequenceId
from octavo.records.attend import HeldSequence, Inventory
from worker.core.mirror import PART_BYTES, Mirror

SIZE = 16
ROOT = BlockHash(bytes(32))


def record(block: int, filler: int = 0) -> bytes:
    return record_packer(SIZE)(BlockId(block), NO_BLOCK, ROOT, bytes([filler]) * 4 * SIZE, NOBODY, 0)


def blocks_of(inventory: Sequence[Inventory]) -> list[int]:
    return [block for part in inventory for block, *_ in read_records("", part.published, SIZE)]


def mirror_of(*blocks: int) -> Mirror:
    mirror = Mirror(SIZE)
    mirror.take_in(b"".join(map(record, blocks)), ())
    return mirror


def test_a_new_record_replaces_the_one_before_and_what_is_evicted_is_dropped():
    mirror = mirror_of(1, 2, 3)
    mirror.take_in(record(1, filler=9), [BlockId(2), BlockId(7)])
    (part,) = mirror.inventory([])
    assert part.published == record(3) + record(1, filler=9)


def test_blocks_that_are_given_back_are_the_last_to_be_reused_the_tail_before_the_head():
    mirror = mirror_of(1, 2, 3, 4)
    mirror.returned([BlockId(1), BlockId(3), BlockId(99)])
    assert blocks_of(mirror.inventory([])) == [2, 4, 3, 1]


def test_where_there_is_nothing_there_is_no_inventory():
    assert Mirror(SIZE).inventory([]) == ()


def test_an_inventory_comes_in_parts_that_are_soon_read():
    many = 3 * (PART_BYTES // record_bytes(SIZE))
    tokens = (7,) * (PART_BYTES // 16)
    held = [HeldSequence(sequence=SequenceId(n), root=ROOT, tokens=tokens, table=(), room=0) for n in range(9)]
    inventory = mirror_of(*range(many)).inventory(held)
    assert blocks_of(inventory) == list(range(many))
    assert all(len(part.published) <= PART_BYTES for part in inventory)
    assert [len(part.sequences) for part in inventory] == [0, 0, 0, 4, 4, 1]
    assert [one.sequence for part in inventory for one in part.sequences] == list(range(9))
