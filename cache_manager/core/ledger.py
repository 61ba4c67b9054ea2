"""The books of one worker: who may use which block of its pool.

A sequence lives from `attach` or `fork` to `free`. In between, its worker says before each step which positions it
will write (`reserve`) and after each step what it wrote (`commit`); full blocks are published as they are committed.

The rules, each with one home:
- reset raises the cache epoch, which is part of every root, and drops what is published under the last one.
- attach shares the longest run of published blocks and leaves at least one token to compute. If another sequence is
  computing the block after that run, it does nothing at all (single_flight.py). If a published block begins like that
  block, attach copies it into a new one, the only one that it allocates (partial_hits.py).
- reserve is all or nothing, gives whole blocks, and copies the tail block first if a write to it would show elsewhere:
  in another table, or in what is published. The last owner of an unpublished block writes in place.
- commit publishes a block only after the one before it. If an equal block was published first, the sequence takes
  that one and gives its own back, so whoever holds a published block holds all published blocks before it.
- free and truncate release the tail first. With the order of victims (eviction.py) a chain therefore dies
  from its tail and never has a hole.

A call that raises has changed nothing: it is judged as a whole (draft.py), and shortage is found by counting, before
the first block is taken. What the worker must be told gathers until the next grant; what the copies of the prefix
index must be told, until `take_changes`.

Grants also tell the worker what it needs to have these books opened again if they are lost (restoration.py).
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from cache_manager.core.accounts import Account
from cache_manager.core.auditor import Auditor
from cache_manager.core.block import Block
from cache_manager.core.block_table import BlockTable
from cache_manager.core.books import Books, empty_books
from cache_manager.core.changes import Change, ChangeLog, LedgerStats
from cache_manager.core.draft import Draft, judge_commit, judge_count, judge_prompt
from cache_manager.core.explain import Explainer
from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS, PartialHits
from cache_manager.core.prefix_index import NextHash, hashes_of
from cache_manager.core.single_flight import WaitFor
from cache_manager.core.untold import Untold
from cache_manager.core.usage import PoolUsage, usage_of
from octavo.errors import PoolExhausted
from octavo.hashing import NO_SEAM, hit_candidates, next_hash, token_bytes
from octavo.ids import NEVER_RESET, NOBODY, BlockHash, BlockId, CacheEpoch, Epoch, SequenceId, TenantTag
from octavo.records.attend import Attach, Exchange, Fork, Grant, Reservation
from octavo.records.fleet import PoolSpec
from octavo.records.insight import PoolAudit, PromptExplanation, SequenceDescription, TableBlock
from octavo.records.scope import PLAIN, Scope

_ROOTS_REMEMBERED = 1024
"""Scopes whose chain root need not be computed again."""


class Ledger:
    """One worker's block tables, reference counts and prefix index. Belongs to one task."""

    def __init__(
        self,
        spec: PoolSpec,
        epoch: Epoch,
        *,
        cache_epoch: CacheEpoch = NEVER_RESET,
        min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS,
        next_hash: NextHash = next_hash,
        books: Books | None = None,
    ) -> None:
        """Open books: those of an empty pool, unless others are given.

        A block is copied for at least `min_copy_tokens` of its tokens; 0: no part of a block is reused.

        Raises:
            InvalidRequest: there can be no such pool.
        """
        books = books or empty_books(spec, next_hash)
        self.spec = spec
        self.epoch = epoch
        self.cache_epoch = cache_epoch
        self._root = _roots(spec, cache_epoch)
        self._pool = books.pool
        self._index = books.index
        self._vocabulary = books.vocabulary
        self._tables = books.tables
        self._flights = books.flights
        self._partial_hits = PartialHits(self._pool, self._index, spec.block_size, min_copy_tokens)
        self._explainer = Explainer(epoch, self._index, self._flights, self._partial_hits)
        self._rehearsal = books.rehearsal
        self._auditor = Auditor(self._pool, self._index, self._flights, self._tables, next_hash)
        self._stats = LedgerStats()
        self._changes = ChangeLog()
        self._untold = Untold(spec.block_size)

    def __contains__(self, sequence: SequenceId) -> bool:
        """Whether the sequence is in the books."""
        return sequence in self._tables

    def length(self, sequence: SequenceId) -> int:
        """Committed positions. Raises UnknownSequence."""
        return self._tables[sequence].length

    def blocks(self, sequence: SequenceId) -> tuple[BlockId, ...]:
        """The sequence's block table. Raises UnknownSequence."""
        return tuple([block.number for block in self._tables[sequence].blocks])

    def free_list(self) -> Iterator[BlockId]:
        """The blocks without an owner, the next to be allocated first."""
        return (block.number for block in self._pool.free_list())

    @property
    def num_held(self) -> int:
        """Blocks with an owner."""
        return self._pool.num_held

    @property
    def num_cached(self) -> int:
        """Published blocks without an owner: evictable."""
        return self._pool.num_cached

    def published(self) -> list[BlockHash]:
        """The hashes of all published blocks, parents first."""
        return self._index.hashes()

    def stats(self) -> LedgerStats:
        """What happened since the books were opened."""
        return replace(self._stats)

    def usage(self) -> PoolUsage:
        """How full the pool is."""
        return usage_of(self._pool, self._tables.values(), self.spec.block_size)

    def take_changes(self) -> tuple[Change, ...]:
        """What was published and evicted since the last call, in order."""
        return self._changes.take()

    def resume(self, ahead: Mapping[SequenceId, Sequence[int]]) -> None:
        """Go on with tables that were there when the books were opened: publish what is full, let their prompts lead.

        `ahead` holds, for those whose prompt is being computed, the rest of it.
        """
        for sequence, table in self._tables.items():
            if table.forgotten:
                continue
            while table.published < table.full_blocks and table.blocks[table.published].parent is not None:
                table.published += 1
            self._publish(sequence, table, table.full_blocks)
            if rest := ahead.get(sequence):
                self._flights.resume(sequence, token_bytes(table.tokens) + token_bytes(rest), table)

    def tell_time(self, now: float) -> None:
        """It is `now`, in seconds, and not earlier than before. What follows happens then."""
        self._pool.order.tell_time(now)

    def attach(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        scope: Scope = PLAIN,
        tenant: TenantTag = NOBODY,
        retain_seconds: int = 0,
    ) -> int | WaitFor:
        """Create a sequence on the longest published prefix of its tokens.

        Returns:
            How many tokens that covers, those of a block that is copied included; or for whom to wait, when another
            sequence is computing the block after it. In that case this one is not in the books.

        Raises:
            InvalidRequest: the id is taken, there are no tokens or more than the pool can hold, one is no token, or its
                media are not in order within it.
        """
        attach = Attach(sequence, tokens, scope, tenant, retain_seconds)
        self._draft().attach(attach)
        return self._attach(attach)

    def reserve(self, sequence: SequenceId, count: int) -> None:
        """Make positions [length, length + count) writable, and the rest of their last block with them.

        Asking for what is writable already changes nothing.

        Raises:
            PoolExhausted: too few blocks are available for all of it.
            UnknownSequence: it is not in the books.
            InvalidRequest: the count is negative.
        """
        table = self._tables[sequence]
        judge_count(sequence, count)
        self._reserve(sequence, table, count)

    def commit(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Append tokens whose keys and values were written, and publish the blocks that became full.

        Raises:
            UnknownSequence: it is not in the books.
            InvalidRequest: they reach beyond the writable positions, or one is no token.
        """
        table = self._tables[sequence]
        judge_commit(sequence, tokens, len(table.tokens), table.room, self._vocabulary)
        self._commit(sequence, table, tokens)

    def fork(self, parent: SequenceId, children: Sequence[SequenceId], reserve: int = 0) -> None:
        """Create children that alias the parent's committed positions and can each write `reserve` more.

        A parent whose tail is now shared must reserve again before it writes.

        Raises:
            PoolExhausted: too few blocks are available for all children; none exists.
            UnknownSequence: the parent is not in the books.
            InvalidRequest: a child's id is taken, there are no children, or the count is negative.
        """
        self._draft().fork(parent, children, reserve)
        self._fork(parent, children, reserve)

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Go back to `length` tokens and give back every block that they do not need, reserved ones included.

        Raises:
            UnknownSequence: it is not in the books.
            InvalidRequest: it is shorter than that, or the length is negative.
        """
        self._draft().truncate(sequence, length)
        self._truncate(sequence, length)

    def free(self, sequence: SequenceId) -> None:
        """Forget a sequence and give all its references back.

        Raises:
            UnknownSequence: it is not in the books, or no longer.
        """
        self._free(sequence)

    def apply(self, exchange: Exchange) -> Grant:
        """Take in what the worker did, and give what it needs for its next step.

        Forks and reserves that find too few blocks come back as unmet; all else happens. The grant also tells what
        single calls have changed since the last one.

        Raises:
            UnknownSequence: a part names a sequence that is not in the books; nothing of the exchange happened.
            InvalidRequest: a part is wrong, as in the single calls; nothing of the exchange happened.
        """
        assert exchange.epoch == self.epoch, f"exchange of epoch {exchange.epoch}, books of {self.epoch}"
        self._draft().judge(exchange)
        for truncation in exchange.truncations:
            self._truncate(truncation.sequence, truncation.length)
        for sequence, tokens in exchange.commits:
            self._commit(sequence, self._tables[sequence], tokens)
        unmet_children = self._fork_all(exchange.forks)
        for sequence in exchange.finished:
            self._free(sequence)
        attached, waiting = self._attach_all(exchange.attaches)
        unmet = self._reserve_all(exchange.reserves, exchange.attaches)
        return Grant(
            epoch=self.epoch,
            step=exchange.step,
            attached=tuple(attached),
            waiting=tuple(waiting),
            tables=self._untold.take_tables(self._tables),
            copies=self._untold.take_copies(),
            unmet=(*unmet_children, *unmet),
            free_blocks=self._pool.num_available,
            published=self._untold.take_published(),
            evicted=self._untold.take_evicted(),
            roots=tuple([self._tables[sequence].root for sequence, _ in attached]),
            cache_epoch=self.cache_epoch,
        )

    def reset(self, cache_epoch: CacheEpoch) -> int:
        """Forget all that is published: whoever attaches from now on finds only what is computed after this.

        Sequences in the books go on with what they hold and publish nothing more; nobody waits for them.

        Returns:
            How many blocks can be found no longer.
        """
        assert cache_epoch > self.cache_epoch, f"cache epoch {cache_epoch} after {self.cache_epoch}"
        self.cache_epoch = cache_epoch
        self._root = _roots(self.spec, cache_epoch)
        self._flights.end_all()
        for table in self._tables.values():
            table.forget()
        self._pool.unpublish_all()
        self._untold.forgotten()
        self._changes.forgotten()
        return self._index.clear()

    def describe(self, sequence: SequenceId) -> SequenceDescription:
        """Where a sequence lives. Raises UnknownSequence."""
        table = self._tables[sequence]
        return SequenceDescription(
            epoch=self.epoch,
            length=table.length,
            room=table.room,
            blocks=tuple(TableBlock(block.number, block.references, block.is_published) for block in table.blocks),
        )

    def explain(self, tokens: Sequence[int], scope: Scope = PLAIN) -> PromptExplanation:
        """What an attach of this prompt would find now, and why no more.

        Raises:
            InvalidRequest: no such prompt can be attached.
        """
        judge_prompt("the prompt", tokens, scope, self.spec, self._vocabulary)
        root, seam = self._root(scope), scope.seam(self.spec.block_size)
        return self._explainer.explain(root, token_bytes(tokens), self.spec.block_size, seam)

    def audit(self) -> PoolAudit:
        """Count the blocks, and say what is wrong with the books if anything is."""
        return PoolAudit(
            epoch=self.epoch,
            num_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            held_blocks=self._pool.num_held,
            sequences=len(self._tables),
            violation="; ".join(self._auditor.violations()),
        )

    def audit_parts(self) -> Iterator[list[str]]:
        """What is wrong with the books, part by part: they may be used between two of them. All but the last are quick.

        A violation that only part of the books knows of, and that is gone before the rest is asked, is not seen.
        """
        for part in self._auditor.parts():
            yield list(part)

    def check(self) -> None:
        """Assert that the books agree with what can be recomputed from the tables."""
        violations = list(self._auditor.violations())
        assert not violations, violations

    def _draft(self) -> Draft:
        return Draft(self.spec, self._vocabulary, self._tables)

    def _attach(self, attach: Attach) -> int | WaitFor:
        sequence, tokens, size = attach.sequence, attach.tokens, self.spec.block_size
        root, raw, limit = self._root(attach.scope), token_bytes(tokens), hit_candidates(len(tokens), size)
        seam = attach.scope.seam(size)
        hits, missing = self._index.longest_prefix(root, raw, limit, seam)
        reused = len(hits) * size
        committed = array("I", tokens[:reused])
        table = BlockTable(size, root, hits, committed, room=reused, published=len(hits))
        table.tenant = attach.tenant if seam is NO_SEAM else NOBODY  # a chain is on one account: everybody's on none
        table.retain_seconds, table.seam = attach.retain_seconds, seam
        if missing is not None and len(hits) < limit and (leader := self._flights.leader(missing)) is not None:
            self._stats.waits += 1
            return WaitFor(leader)
        self._pool.share(hits)
        self._pool.order.prove(hits)
        self._tables[sequence] = table
        if missing is not None:
            self._flights.begin(sequence, raw, missing)
        self._untold.changed(sequence, 0)
        reused += self._copy_partial_hit(table, tokens, raw)
        self._stats.attached_sequences += 1
        self._stats.attached_tokens += len(tokens)
        self._stats.hit_tokens += reused
        self._stats.too_short_to_hit += limit == 0
        return reused

    def _copy_partial_hit(self, table: BlockTable, tokens: Sequence[int], raw: bytes) -> int:
        """Give a new table a copy of a block that begins like its next one. Returns the tokens that this covers."""
        hit = self._partial_hits.find(table.before(table.full_blocks), raw, table.blocks, table.seam)
        if hit is None:
            return 0
        self._pool.share([hit.source])  # a block was used; and what is copied must not be what is allocated
        (own,) = self._allocate(1)
        self._pool.release([hit.source])
        self._untold.copied(hit.source, own)
        table.blocks.append(own)
        table.tokens.extend(tokens[table.length : table.length + hit.tokens])
        table.room = len(table.blocks) * table.block_size
        self._stats.partial_hits += 1
        self._stats.partial_hit_tokens += hit.tokens
        return hit.tokens

    def _reserve(self, sequence: SequenceId, table: BlockTable, count: int) -> None:
        end = len(table.tokens) + count
        if end > table.room:
            self._make_room(sequence, table, end)

    def _make_room(self, sequence: SequenceId, table: BlockTable, end: int) -> None:
        """Allocate up to position `end`, and copy the tail if a write to it would show elsewhere."""
        missing = table.missing(end)
        if self._must_copy_tail(table):
            self._require_available(1 + missing)
            self._copy_tail(sequence, table)
        if missing:
            blocks = self._allocate(missing)
            self._untold.changed(sequence, len(table.blocks))
            table.blocks += blocks
        table.room = len(table.blocks) * table.block_size

    def _must_copy_tail(self, table: BlockTable) -> bool:
        full, in_tail = divmod(len(table.tokens), table.block_size)
        if not in_tail or table.room > len(table.tokens):
            return False  # nothing in it to keep, or writable already
        tail = table.blocks[full]
        return tail.references > 1 or tail.is_published

    def _copy_tail(self, sequence: SequenceId, table: BlockTable) -> None:
        index = table.full_blocks
        shared, (private,) = table.blocks[index], self._allocate(1)
        table.blocks[index] = private
        self._pool.release([shared])
        self._untold.copied(shared, private)
        self._untold.changed(sequence, index)
        self._stats.copied_blocks += 1

    def _commit(self, sequence: SequenceId, table: BlockTable, tokens: Sequence[int]) -> None:
        size, known = table.block_size, table.tokens
        known.extend(tokens)
        full = len(known) // size
        if full > table.published and not table.forgotten:
            if table.published == (len(known) - len(tokens)) // size:
                self._publish(sequence, table, full)
            self._flights.advance(sequence, table)

    def _publish(self, sequence: SequenceId, table: BlockTable, full: int) -> None:
        """Publish the blocks up to `full`."""
        if table.published < table.seam.block < full:
            self._publish(sequence, table, table.seam.block)
        first, root = table.published, table.root_of(table.published)
        blocks, before, tokens = table.blocks[first:full], table.before(first), table.block_tokens(first, full)
        known = self._index.offer(blocks, before, tokens)
        table.published = full
        if known:
            self._merge(sequence, table, first, known)
            blocks, before, tokens = blocks[len(known) :], known[-1], tokens[len(known) :]
        if blocks:
            account = self._account_of(table, blocks)
            self._pool.publish(blocks, account)
            self._changes.published(hashes_of(blocks))
            self._untold.published(root, before, blocks, tokens, account.tenant, table.retain_seconds)
            self._stats.published_blocks += len(blocks)

    def _account_of(self, table: BlockTable, new: Sequence[Block]) -> Account:
        """The account that the sequence's new blocks are on: that of its first block, wherever it has that from."""
        first = table.blocks[0]
        accounts = self._pool.accounts
        return accounts.of_tenant(table.tenant) if first is new[0] else accounts.of_block(first)

    def _merge(self, sequence: SequenceId, table: BlockTable, first: int, known: Sequence[Block]) -> None:
        """Take the equal blocks that were published first, and give the own ones back."""
        for index, canonical in enumerate(known, start=first):
            own = table.blocks[index]
            if own is not canonical:
                self._pool.share([canonical])
                self._pool.release([own])
                table.blocks[index] = canonical
                self._untold.changed(sequence, index)
                self._stats.merged_blocks += 1

    def _fork(self, parent: SequenceId, children: Sequence[SequenceId], reserve: int) -> None:
        table = self._tables[parent]
        branch = table.fork()
        if reserve:
            # The parent keeps the tail, so each child that writes needs one of its own.
            each = branch.has_tail + branch.missing(branch.length + reserve)
            self._require_available(len(children) * each)
        if branch.has_tail:
            table.room = table.length
        for child in children:
            self._pool.share(branch.blocks)
            self._tables[child] = own = branch.fork()
            self._untold.changed(child, 0)
            self._reserve(child, own, reserve)

    def _truncate(self, sequence: SequenceId, length: int) -> None:
        self._release(self._tables[sequence].truncate(length))
        self._flights.end(sequence)

    def _free(self, sequence: SequenceId) -> None:
        table, order = self._tables[sequence], self._pool.order
        del self._tables[sequence]
        if table.retain_seconds:
            order.retain(table.blocks[: table.published], table.retain_seconds)
        order.ratio = self._rehearsal.use(hashes_of(table.blocks[table.aliased : table.published]))
        self._release(table.blocks)
        self._untold.freed(sequence)
        self._flights.end(sequence)

    def _release(self, blocks: list[Block]) -> None:
        """Give references back, the tail's first."""
        self._pool.release(blocks[::-1])

    def _allocate(self, count: int) -> list[Block]:
        blocks = self._pool.allocate(count)
        evicted = self._index.forget(blocks)
        if evicted:
            self._changes.evicted(evicted)
            self._untold.evicted(blocks)
            self._stats.evicted_blocks += len(evicted)
        return blocks

    def _require_available(self, wanted: int) -> None:
        if wanted > self._pool.num_available:
            raise PoolExhausted(f"wanted {wanted} blocks, {self._pool.num_available} available")

    def _fork_all(self, forks: Sequence[Fork]) -> list[SequenceId]:
        """Returns the children that found too few blocks: they do not exist."""
        unmet: list[SequenceId] = []
        for fork in forks:
            try:
                self._fork(fork.parent, fork.children, fork.reserve)
            except PoolExhausted:
                unmet.extend(fork.children)
        return unmet

    def _attach_all(
        self, attaches: Sequence[Attach]
    ) -> tuple[list[tuple[SequenceId, int]], list[tuple[SequenceId, SequenceId]]]:
        """Returns (sequence, tokens reused) of those that could be attached, (sequence, leader) of the others."""
        attached: list[tuple[SequenceId, int]] = []
        waiting: list[tuple[SequenceId, SequenceId]] = []
        for attach in attaches:
            answer = self._attach(attach)
            if isinstance(answer, WaitFor):
                waiting.append((attach.sequence, answer.leader))
            else:
                attached.append((attach.sequence, answer))
        return attached, waiting

    def _reserve_all(self, reserves: Sequence[Reservation], attaches: Sequence[Attach]) -> list[SequenceId]:
        """Returns the sequences that found too few blocks. A new sequence's count ends at its last token."""
        ends = {attach.sequence: len(attach.tokens) for attach in attaches}
        unmet: list[SequenceId] = []
        find = self._tables.get
        for sequence, count in reserves:
            table = find(sequence)
            if table is None:
                continue  # a child that is unmet already, or a sequence that waits
            if sequence in ends:
                count = min(count, ends[sequence] - table.length)
            try:
                self._reserve(sequence, table, count)
            except PoolExhausted:
                unmet.append(sequence)
        return unmet


def _roots(spec: PoolSpec, cache_epoch: CacheEpoch) -> Callable[[Scope], BlockHash]:
    """Scope -> the root of its chains, which knows the latest ones. It does not know the books, which hold it."""

    def root(scope: Scope) -> BlockHash:
        return spec.chain_root(scope, cache_epoch).hash()

    return lru_cache(_ROOTS_REMEMBERED)(root)


def is_compiled() -> bool:
    """Whether these books run as C, compiled from this source by mypyc (ADR 38)."""
    return hasattr(Ledger, "__mypyc_attrs__")
