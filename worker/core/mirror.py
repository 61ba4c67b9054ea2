"""The worker's copy of what its manager has published in the pool, and what a manager without books is told.

Records are opaque but for the block that each is of. They lie in about the order in which their blocks would be reused:
a block that a sequence gives back moves to the end, the sequence's last block before its first.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from octavo.block_record import record_bytes, split_records
from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockId
from octavo.records import HeldSequence, Inventory

PART_BYTES = 1 << 20
"""Of one message: what its reader takes in without keeping others waiting."""


class Mirror:
    """A record for every published block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: dict[BlockId, bytes] = {}

    def __len__(self) -> int:
        return len(self._records)

    def take_in(self, published: bytes, evicted: Iterable[BlockId]) -> None:
        """Follow a grant: records of new blocks, then blocks in which nothing is published any more."""
        for block, record in split_records("grant.published", published, self._block_size):
            self._records.pop(block, None)
            self._records[block] = record
        for block in evicted:
            self._records.pop(block, None)

    def returned(self, table: Sequence[BlockId]) -> None:
        """A sequence gives its blocks back."""
        for block in reversed(table):
            if (record := self._records.pop(block, None)) is not None:
                self._records[block] = record

    def inventory(self, held: Iterable[HeldSequence]) -> tuple[Inventory, ...]:
        """Everything, in messages of about PART_BYTES; none where there is nothing."""
        parts = [Inventory(published=part) for part in self._parts()]
        group: list[HeldSequence] = []
        size = 0
        for sequence in held:
            group.append(sequence)
            size += TOKEN_BYTES * (len(sequence.tokens) + len(sequence.ahead) + len(sequence.table))
            if size >= PART_BYTES:
                parts.append(Inventory(sequences=tuple(group)))
                group, size = [], 0
        return (*parts, Inventory(sequences=tuple(group))) if group else tuple(parts)

    def _parts(self) -> Iterator[bytes]:
        """All records, joined, so many to a message."""
        records = iter(self._records.values())
        count = max(1, PART_BYTES // record_bytes(self._block_size))
        while part := b"".join(islice(records, count)):
            yield part
