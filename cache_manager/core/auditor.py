"""The auditor: recomputes a ledger's books from its tables and says what does not agree.

Independent of how the books are kept in constant time, so it costs time and memory in proportion to the pool: 0.3 s for
100,000 blocks. Most of it is what can be said of a block by itself, and comes in small parts; what is about the pool as
a whole comes in two, of 0.05 and 0.15 s.
"""

from collections.abc import Iterator, Mapping, Sequence

from cache_manager.core.block import Block
from cache_manager.core.block_pool import BlockPool
from cache_manager.core.block_table import BlockTable, blocks_needed
from cache_manager.core.prefix_index import NextHash, PrefixIndex
from cache_manager.core.single_flight import SingleFlight
from octavo.ids import SequenceId

BLOCKS_AT_ONCE = 512
"""Of one part."""


class Auditor:
    """Reads the parts of a ledger; changes nothing."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        flights: SingleFlight,
        tables: Mapping[SequenceId, BlockTable],
        next_hash: NextHash,
    ) -> None:
        self._pool = pool
        self._index = index
        self._flights = flights
        self._tables = tables
        self._next_hash = next_hash

    def violations(self) -> Iterator[str]:
        """Every invariant that does not hold, in words; nothing when the books balance."""
        for part in self.parts():
            yield from part

    def parts(self) -> Iterator[Iterator[str]]:
        """The same in parts: the books may change between two of them, not within one. The longest parts come last."""
        for first in range(0, self._pool.num_blocks, BLOCKS_AT_ONCE):
            yield self._block_violations(self._pool.blocks[first : first + BLOCKS_AT_ONCE])
        yield self._index.root_violations()
        yield self._flights.violations(self._tables)
        yield self._sequence_violations()
        yield self._pool.violations(self._references())
        yield self._order_violations()

    def _references(self) -> list[int]:
        """For each block, how many table entries name it."""
        references = [0] * self._pool.num_blocks
        for table in self._tables.values():
            for block in table.blocks:
                references[block.number] += 1
        return references

    def _block_violations(self, blocks: Sequence[Block]) -> Iterator[str]:
        """Each of these blocks stands well in the index, and pool and index agree on whether it is published."""
        yield from self._index.violations(blocks)
        for block in blocks:
            if block.is_published != (block.parent is not None):
                yield f"pool and index differ on whether block {block} is published"

    def _order_violations(self) -> Iterator[str]:
        """A chain's tail is evicted before its head."""
        never = self._pool.num_blocks  # a held block's turn does not come
        turns = [never] * never
        for turn, block in enumerate(self._pool.free_list()):
            turns[block.number] = turn
        for block, turn in zip(self._pool.blocks, turns, strict=True):
            parent = block.parent
            if isinstance(parent, Block) and turns[parent.number] < turn:
                yield f"block {parent} would be evicted before block {block}, which follows it"

    def _sequence_violations(self) -> Iterator[str]:
        for sequence, table in self._tables.items():
            for violation in self._table_violations(table):
                yield f"sequence {sequence}: {violation}"

    def _table_violations(self, table: BlockTable) -> Iterator[str]:
        length, size = table.length, table.block_size
        held = len(table.blocks) * size
        if not length <= table.room <= held:
            yield f"length {length}, room {table.room}, blocks for {held}"
        if len(set(table.blocks)) != len(table.blocks):
            yield "a block stands twice in its table"
        # The tail is writable if there is room in it; blocks behind it always are.
        first = table.full_blocks if table.room > length else blocks_needed(length, size)
        for block in table.blocks[first:]:
            if block.references != 1 or block.is_published:
                yield f"block {block} is to be written, and others can see it"
        yield from self._chain_violations(table)

    def _chain_violations(self, table: BlockTable) -> Iterator[str]:
        if table.published > table.full_blocks:
            yield f"{table.published} blocks published, {table.full_blocks} full"
            return
        if table.forgotten and table.published:
            yield f"{table.published} blocks published, and it is forgotten"
        expected = table.root
        published = table.blocks[: table.published]
        for block, tokens in zip(published, table.block_tokens(0, table.published), strict=True):
            expected = self._next_hash(expected, tokens)
            if block.parent is None or block.hash != expected:
                yield f"block {block} is not published under this sequence's hash"
