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
from collections.abc import Iterable, Iterator, Sequence

from cache_manager.core.block import Block, Parent, Place
from cache_manager.core.block_table import BlockTable, blocks_needed
from cache_manager.core.books import empty_books
from cache_manager.core.eviction import SEGMENTED, EvictionPolicy
from cache_manager.core.ledger import Ledger
from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from cache_manager.core.prefix_index import NextHash
from octavo.block_record import NO_BLOCK, BlockRecord, read_records
from octavo.errors import InvalidRequest
from octavo.hashing import NO_SEAM, TOKEN_BYTES, Seam, next_hash, token_bytes, tokens_of_bytes
from octavo.ids import NEVER_RESET, NOBODY, BlockHash, BlockId, CacheEpoch, Epoch, SequenceId
from octavo.records.attend import MAX_RETAIN_SECONDS, HeldSequence, Inventory
from octavo.records.fleet import PoolSpec

BLOCKS_AT_ONCE = 512
"""Between two steps: about a millisecond."""

MAX_SEQUENCES = 1 << 16
"""Of one inventory: many times those of the largest batch."""


class Restoration:
    """The books of one worker while they are opened again: `add` every part, go through `steps`, then `open`."""

    def __init__(
        self,
        spec: PoolSpec,
        *,
        next_hash: NextHash = next_hash,
        eviction: EvictionPolicy = SEGMENTED,
        now: float = 0.0,
    ) -> None:
        """What requests have had retained is so for as long again from `now` on.

        Raises:
            InvalidRequest: there can be no such pool.
        """
        self._spec = spec
        self._next_hash = next_hash
        self._books = empty_books(spec, next_hash, eviction)
        self._books.pool.order.tell_time(now)
        self._records: dict[BlockId, BlockRecord] = {}
        """Not published yet, the one to be reused first ahead."""
        self._roots: dict[Block, BlockHash] = {}
        """Of the published blocks, parents first."""
        self._retained: dict[Block, int] = {}
        """Seconds, of the published blocks that are to be retained."""
        self._held: dict[SequenceId, HeldSequence] = {}
        self._places: dict[Block, Place] = {}
        """What tables say of blocks that are not published, full ones and tails."""

    def add(self, part: Inventory) -> None:
        """Take in the next part.

        Raises:
            InvalidRequest: it names a block, a token or a sequence that there cannot be, or one a second time.
        """
        field = "inventory.published"
        records = list(read_records(field, part.published, self._spec.block_size))
        self._require_blocks(field, [record[0] for record in records])
        for record in records:
            if self._records.setdefault(record[0], record) is not record:
                raise InvalidRequest(f"{field}: block {record[0]} twice, wanted once")
        for held in part.sequences:
            name = f"inventory.sequences: sequence {held.sequence}"
            if held.sequence in self._held:
                raise InvalidRequest(f"{name} twice, wanted once")
            if len(self._held) == MAX_SEQUENCES:
                raise InvalidRequest(f"{name} is one more than {MAX_SEQUENCES}")
            self._require_shape(name, held)
            self._held[held.sequence] = held

    def steps(self) -> Iterator[None]:
        """Do the work, and stop now and then so that others get their turn.

        Raises:
            InvalidRequest: the inventory contradicts itself, or its pool.
        """
        stop = BLOCKS_AT_ONCE
        for chain in self._chains():
            self._publish(chain)
            if len(self._roots) >= stop:
                stop = len(self._roots) + BLOCKS_AT_ONCE
                yield
        for held in self._held.values():
            self._enter(held)
            yield
        for sequence, table in self._books.tables.items():
            self._require_private(sequence, table)
        tails_first = list(reversed(self._roots))
        if self._retained:
            self._retain(tails_first)
        for at in range(0, len(tails_first), BLOCKS_AT_ONCE):
            self._books.pool.release(tails_first[at : at + BLOCKS_AT_ONCE])
            yield

    def open(
        self,
        epoch: Epoch,
        cache_epoch: CacheEpoch = NEVER_RESET,
        *,
        min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS,
    ) -> Ledger:
        """The books, once all steps are done; from now on `min_copy_tokens` holds, as for any ledger."""
        ledger = Ledger(
            self._spec,
            epoch,
            cache_epoch=cache_epoch,
            min_copy_tokens=min_copy_tokens,
            next_hash=self._next_hash,
            books=self._books,
        )
        ledger.resume({sequence: held.ahead for sequence, held in self._held.items()})
        return ledger

    # ---- what is published -----------------------------------------------------------------------------------

    def _chains(self) -> Iterator[list[BlockRecord]]:
        """All records as `_parents_first`, in runs of one root that follow one another, none too long for a step."""
        chain: list[BlockRecord] = []
        for record in self._parents_first():
            if chain and (record[1:3] != (chain[-1][0], chain[-1][2]) or len(chain) == BLOCKS_AT_ONCE):
                yield chain
                chain = []
            chain.append(record)
        if chain:
            yield chain

    def _parents_first(self) -> Iterator[BlockRecord]:
        """All records, the most recent block and what stands before it first."""
        records = self._records
        for block in reversed(list(records)):
            chain: list[BlockRecord] = []
            at = block
            while at in records:
                chain.append(records.pop(at))  # so a chain that runs into itself ends, and is found out
                at = chain[-1][1]
            yield from reversed(chain)

    def _publish(self, chain: Sequence[BlockRecord]) -> None:
        """Publish blocks that follow one another. They keep a reference until all tables have theirs."""
        numbers, _, roots, tokens, tenants, retained = map(list, zip(*chain, strict=True))
        blocks: list[Block] = self._blocks(numbers)
        root: BlockHash = roots[0]
        field = "inventory.published"
        self._require_tokens(field, b"".join(tokens))
        before = self._before(chain[0])
        if isinstance(before, Block) and self._roots[before] != root:
            tokens[0] = Seam(0, root).joined(0, tokens[0])  # from here on the chain is private
        if known := self._books.index.offer(blocks, before, tokens):
            raise InvalidRequest(f"{field}: block {blocks[0]} holds what block {known[0]} holds")
        self._roots.update(dict.fromkeys(blocks, root))
        pool = self._books.pool
        pool.claim(blocks)
        first = pool.accounts.of_tenant(tenants[0])
        pool.publish(blocks, pool.accounts.of_block(before) if isinstance(before, Block) else first)
        self._retained.update((block, seconds) for block, seconds in zip(blocks, retained, strict=True) if seconds)

    def _retain(self, tails_first: Sequence[Block]) -> None:
        """Retain blocks as their records say, and those before them for as long."""
        for block in tails_first:
            seconds = min(self._retained.get(block, 0), MAX_RETAIN_SECONDS)
            if seconds:
                self._books.pool.order.retain((block,), seconds)
                before = block.parent
                if isinstance(before, Block):
                    self._retained[before] = max(seconds, self._retained.get(before, 0))

    def _before(self, record: BlockRecord) -> Parent:
        """What stands before the first block of a chain, or of a piece of one."""
        block, before, root, *_ = record
        if before == NO_BLOCK:
            return root
        blocks = self._books.pool.blocks
        if before >= len(blocks) or blocks[before] not in self._roots:
            raise InvalidRequest(f"inventory.published: block {block} follows block {before}, which is not published")
        return blocks[before]

    # ---- who holds what --------------------------------------------------------------------------------------

    def _enter(self, held: HeldSequence) -> None:
        """Give a sequence its table."""
        name = f"inventory.sequences: sequence {held.sequence}"
        size, pool = self._spec.block_size, self._books.pool
        table = BlockTable(
            size,
            held.root,
            self._blocks(held.table),
            array("I", held.tokens),
            room=held.room,
            published=0,
            forgotten=held.forgotten,
            tenant=held.tenant if held.seam is NO_SEAM else NOBODY,
            retain_seconds=min(held.retain_seconds, MAX_RETAIN_SECONDS),
            seam=held.seam,
        )
        self._require_places(name, table)
        pool.share([block for block in table.blocks if block.references])
        pool.claim([block for block in table.blocks if not block.references])
        self._books.tables[held.sequence] = table

    def _require_shape(self, name: str, held: HeldSequence) -> None:
        """A sequence by itself: its numbers agree with one another and with the pool."""
        size, length = self._spec.block_size, len(held.tokens)
        places = size * len(held.table)
        if not length <= held.room <= places:
            raise InvalidRequest(f"{name} has {length} tokens, room {held.room}, blocks for {places}")
        self._require_blocks(name, held.table)
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
            before, tokens = table.before(index), table.seam.joined(index, raw[index * width : (index + 1) * width])
            known_before, known = self._place(block, (before, tokens))
            common = min(len(known), len(tokens))
            if known_before != before or known[:common] != tokens[:common]:
                start = index * table.block_size
                raise InvalidRequest(f"{name} has other tokens in block {block}, from position {start} on")

    def _place(self, block: Block, said: Place) -> Place:
        """What is known of a block; if nothing is, what is said of it now. The longest word is remembered."""
        known = self._places.get(block) if block.parent is None else (block.parent, block.tokens)
        if known is None or len(known[1]) < len(said[1]):
            self._places[block] = said
        return known or said

    def _require_private(self, sequence: SequenceId, table: BlockTable) -> None:
        """What may be written is nobody else's."""
        first = table.full_blocks if table.room > table.length else blocks_needed(table.length, table.block_size)
        for block in table.blocks[first:]:
            name = f"inventory.sequences: sequence {sequence} may write block {block}"
            if block.is_published:
                raise InvalidRequest(f"{name}, which is published")
            if block.references != 1:
                raise InvalidRequest(f"{name}, which {block.references} tables name, wanted 1")

    # ---- both ------------------------------------------------------------------------------------------------

    def _blocks(self, numbers: Iterable[BlockId]) -> list[Block]:
        blocks = self._books.pool.blocks
        return [blocks[number] for number in numbers]

    def _require_blocks(self, field: str, blocks: Sequence[BlockId]) -> None:
        if blocks and max(blocks) >= self._spec.num_blocks:
            raise InvalidRequest(f"{field}: block {max(blocks)}, num_blocks is {self._spec.num_blocks}")

    def _require_tokens(self, field: str, raw: bytes) -> None:
        if not self._books.vocabulary.holds_bytes(raw):
            stranger = self._books.vocabulary.first_stranger(tokens_of_bytes(raw))
            raise InvalidRequest(f"{field}: token id {stranger}, vocab_size is {self._spec.vocab_size}")
