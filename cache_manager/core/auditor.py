"""The auditor: recomputes a ledger's books from its tables and says what does not agree.

Independent of how the books are kept in constant time, so it costs time and memory in proportion to the pool.
"""

from collections.abc import Iterator, Mapping

from cache_manager.core.block_pool import BlockPool
from cache_manager.core.block_table import BlockTable, blocks_needed
from cache_manager.core.prefix_index import NextHash, PrefixIndex
from cache_manager.core.single_flight import SingleFlight
from octavo.ids import BlockId, SequenceId


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
        yield from self._pool.violations(self._references())
        yield from self._index.violations()
        yield from self._publication_violations()
        yield from self._flights.violations(self._tables)
        for sequence, table in self._tables.items():
            for violation in self._table_violations(table):
                yield f"sequence {sequence}: {violation}"

    def _references(self) -> list[int]:
        """For each block, how many table entries name it."""
        references = [0] * self._pool.num_blocks
        for table in self._tables.values():
            for block in table.blocks:
                references[block] += 1
        return references

    def _publication_violations(self) -> Iterator[str]:
        """Pool and index agree on what is published, and a chain's tail is evicted before its head."""
        turn = {block: place for place, block in enumerate(self._pool.free_list())}
        for block in map(BlockId, range(self._pool.num_blocks)):
            if self._pool.is_published(block) != (block in self._index):
                yield f"pool and index differ on whether block {block} is published"
            elif block in self._index:
                parent = self._index.block_before(block)
                never = self._pool.num_blocks  # a held block's turn does not come
                if parent is not None and turn.get(parent, never) < turn.get(block, never):
                    yield f"block {parent} would be evicted before block {block}, which follows it"

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
            if self._pool.references(block) != 1 or self._pool.is_published(block):
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
            if block not in self._index or self._index.hash_of(block) != expected:
                yield f"block {block} is not published under this sequence's hash"
