"""Opens a worker's books again from its inventory: it holds what it says, unless it contradicts itself.

Nothing is believed that can be computed: hashes, reference counts and the free list are made anew, and whatever the
books guarantee (see the modules of the parts) is either built so or checked here. So books that open are books that
balance. An inventory that contradicts itself opens none.

The worker's copy of the index may lag behind the books that were lost by a grant that did not arrive. Then blocks are
full that it does not know as published; the ledger publishes them as it opens. What the lost grant gave away is still
the worker's, since it never heard otherwise.

The eviction order is the inventory's, but for one thing: a block is as recent as the most recent block after it, so
that chains die from their tail.
"""

from array import array
from collections.abc import Iterator

from cache_manager.core.block_table import BlockTable, blocks_needed
from cache_manager.core.books import empty_books
from cache_manager.core.ledger import Ledger
from cache_manager.core.prefix_index import NextHash, Parent, Place
from octavo.block_record import BlockRecord, read_records
from octavo.errors import InvalidRequest
from octavo.hashing import TOKEN_BYTES, next_hash, token_bytes, tokens_of_bytes
from octavo.ids import BlockHash, BlockId, Epoch, SequenceId
from octavo.records import HeldSequence, Inventory, PoolSpec

RECORDS_AT_ONCE = 512
"""Blocks that are published between two steps: about a millisecond."""


class Restoration:
    """The books of one worker while they are opened again: `add` every part, go through `steps`, then `open`."""

    def __init__(self, spec: PoolSpec, *, next_hash: NextHash = next_hash) -> None:
        """Raises InvalidRequest where there can be no such pool."""
        self._spec = spec
        self._next_hash = next_hash
        self._books = empty_books(spec, next_hash)
        self._records: dict[BlockId, BlockRecord] = {}
        """Not published yet, the one to be reused first ahead."""
        self._roots: dict[BlockId, BlockHash] = {}
        """Of the published blocks."""
        self._held: dict[SequenceId, HeldSequence] = {}
        self._places: dict[BlockId, Place] = {}
        """What tables say of blocks that are not published, full ones and tails."""

    def add(self, part: Inventory) -> None:
        """Take in the next part.

        Raises:
            InvalidRequest: it names a block or a sequence that there cannot be, or a second time.
        """
        for record in read_records("inventory.published", part.published, self._spec.block_size):
            self._require_block("inventory.published", record.block)
            if record.block in self._records:
                raise InvalidRequest(f"inventory.published: block {record.block} twice, wanted once")
            self._records[record.block] = record
        for held in part.sequences:
            if held.sequence in self._held:
                raise InvalidRequest(f"inventory.sequences: sequence {held.sequence} twice, wanted once")
            self._held[held.sequence] = held

    def steps(self) -> Iterator[None]:
        """Do the work, and stop now and then so that others get their turn.

        Raises:
            InvalidRequest: the inventory contradicts itself, or its pool.
        """
        published: list[BlockId] = []
        for record in self._parents_first():
            self._publish(record)
            published.append(record.block)
            if len(published) % RECORDS_AT_ONCE == 0:
                yield
        for held in self._held.values():
            self._enter(held)
            yield
        for sequence, table in self._books.tables.items():
            self._require_private(sequence, table)
        published.reverse()
        for at in range(0, len(published), RECORDS_AT_ONCE):
            self._books.pool.release(published[at : at + RECORDS_AT_ONCE])
            yield

    def open(self, epoch: Epoch) -> Ledger:
        """The books, once all steps are done."""
        ledger = Ledger(self._spec, epoch, next_hash=self._next_hash, books=self._books)
        ledger.resume({sequence: held.ahead for sequence, held in self._held.items()})
        return ledger

    # ---- what is published -----------------------------------------------------------------------------------

    def _parents_first(self) -> Iterator[BlockRecord]:
        """All records, the most recent block and what stands before it first."""
        for block in reversed(list(self._records)):
            chain: list[BlockRecord] = []
            at: BlockId | None = block
            while at is not None and at in self._records:
                chain.append(self._records.pop(at))  # so a chain that runs into itself ends, and is found out
                at = chain[-1].parent
            yield from reversed(chain)

    def _publish(self, record: BlockRecord) -> None:
        """The block keeps a reference until all tables have theirs."""
        block, pool = record.block, self._books.pool
        before: Parent = record.root
        if record.parent is not None:
            self._require_block("inventory.published", record.parent)
            if self._roots.get(record.parent) != record.root:
                raise InvalidRequest(
                    f"inventory.published: block {block} follows block {record.parent}, "
                    "which is not published before it under the same root"
                )
            before = record.parent
        self._require_tokens(f"inventory.published: block {block}", record.tokens)
        (known,) = self._books.index.offer([block], before, [record.tokens])
        if known != block:
            raise InvalidRequest(f"inventory.published: block {block} holds what block {known} holds")
        self._roots[block] = record.root
        pool.claim(block)
        pool.publish((block,))

    # ---- who holds what --------------------------------------------------------------------------------------

    def _enter(self, held: HeldSequence) -> None:
        """Give a sequence its table."""
        name = f"inventory.sequences: sequence {held.sequence}"
        self._require_shape(name, held)
        size, pool = self._spec.block_size, self._books.pool
        table = BlockTable(size, held.root, list(held.table), array("I", held.tokens), room=held.room, published=0)
        self._require_places(name, table)
        for block in table.blocks:
            if pool.references(block):
                pool.share((block,))
            else:
                pool.claim(block)
        self._books.tables[held.sequence] = table

    def _require_shape(self, name: str, held: HeldSequence) -> None:
        """A sequence by itself: its numbers agree with one another and with the pool."""
        size, length = self._spec.block_size, len(held.tokens)
        places = size * len(held.table)
        if not length <= held.room <= places:
            raise InvalidRequest(f"{name} has {length} tokens, room {held.room}, blocks for {places}")
        for block in held.table:
            self._require_block(name, block)
        if len(set(held.table)) != len(held.table):
            raise InvalidRequest(f"{name} names {len(held.table)} blocks, {len(set(held.table))} different ones")
        known = length + len(held.ahead)
        if held.ahead and known > self._spec.capacity_tokens:
            raise InvalidRequest(f"{name} knows {known} tokens, {self._spec.capacity_tokens} (capacity_tokens) fit")
        self._require_tokens(name, token_bytes(held.tokens))
        self._require_tokens(name, token_bytes(held.ahead))

    def _require_places(self, name: str, table: BlockTable) -> None:
        """Who shares a block agrees on its place: one's tokens there are the beginning of the other's.

        So what a table holds published is the beginning of it, all in its own places.
        """
        raw, width = token_bytes(table.tokens), table.block_size * TOKEN_BYTES
        for index, block in zip(range(blocks_needed(table.length, table.block_size)), table.blocks, strict=False):
            before, tokens = table.before(index), raw[index * width : (index + 1) * width]
            known_before, known = self._place(block, (before, tokens))
            common = min(len(known), len(tokens))
            if known_before != before or known[:common] != tokens[:common]:
                start = index * table.block_size
                raise InvalidRequest(f"{name} has other tokens in block {block}, from position {start} on")

    def _place(self, block: BlockId, said: Place) -> Place:
        """What is known of a block; if nothing is, what is said of it now. The longest word is remembered."""
        known = self._books.index.place_of(block) or self._places.get(block)
        if known is None or len(known[1]) < len(said[1]):
            self._places[block] = said
        return known or said

    def _require_private(self, sequence: SequenceId, table: BlockTable) -> None:
        """What may be written is nobody else's."""
        first = table.full_blocks if table.room > table.length else blocks_needed(table.length, table.block_size)
        for block in table.blocks[first:]:
            name = f"inventory.sequences: sequence {sequence} may write block {block}"
            if block in self._books.index:
                raise InvalidRequest(f"{name}, which is published")
            if (owners := self._books.pool.references(block)) != 1:
                raise InvalidRequest(f"{name}, which {owners} tables name, wanted 1")

    # ---- both ------------------------------------------------------------------------------------------------

    def _require_block(self, field: str, block: BlockId) -> None:
        if block >= self._spec.num_blocks:
            raise InvalidRequest(f"{field}: block {block}, num_blocks is {self._spec.num_blocks}")

    def _require_tokens(self, field: str, raw: bytes) -> None:
        if not self._books.vocabulary.holds_bytes(raw):
            stranger = self._books.vocabulary.first_stranger(tokens_of_bytes(raw))
            raise InvalidRequest(f"{field}: token id {stranger}, vocab_size is {self._spec.vocab_size}")
