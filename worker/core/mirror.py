"""The worker's copy of what its manager has published in the pool, and what a manager without books is told.

Records are opaque but for the block that each is of and for what it is found by. They lie in about the order in which
their blocks would be reused: a block that a sequence gives back moves to the end, the sequence's last block before its
first.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from octavo.block_record import NO_BLOCK, find_key, find_key_of, record_bytes, split_records
from octavo.hashing import TOKEN_BYTES, hit_candidates, token_bytes
from octavo.ids import BlockHash, BlockId
from octavo.records.attend import HeldSequence, Inventory

PART_BYTES = 1 << 20
"""Of one message: what its reader takes in without keeping others waiting."""


class Mirror:
    """A record for every published block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: dict[BlockId, bytes] = {}
        self._found: dict[bytes, BlockId] = {}
        """The same blocks by what they are found by."""

    def __len__(self) -> int:
        return len(self._records)

    def take_in(self, published: bytes, evicted: Iterable[BlockId]) -> None:
        """Follow a grant: records of new blocks, then blocks in which nothing is published any more."""
        for block, record in split_records("grant.published", published, self._block_size):
            self._drop(block)
            self._records[block] = record
            self._found[find_key_of(record)] = block
        for block in evicted:
            self._drop(block)

    def hit(self, root: BlockHash, tokens: Sequence[int]) -> int:
        """How many of the tokens an attach would find in whole blocks, as far as grants have told."""
        width = TOKEN_BYTES * self._block_size
        candidates = hit_candidates(len(tokens), self._block_size)
        raw = token_bytes(tokens[: candidates * self._block_size])
        block = NO_BLOCK
        for at in range(candidates):
            found = self._found.get(find_key(block, root, raw[at * width : (at + 1) * width]))
            if found is None:
                return at * self._block_size
            block = found
        return candidates * self._block_size

    def _drop(self, block: BlockId) -> None:
        if (record := self._records.pop(block, None)) is not None and self._found.get(find_key_of(record)) == block:
            del self._found[find_key_of(record)]

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
