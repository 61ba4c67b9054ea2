"""What a worker knows of its own books, learnt from nothing but its exchanges and their grants."""

from dataclasses import dataclass, field, replace

from octavo.block_record import split_records
from octavo.ids import NEVER_RESET, NOBODY, BlockHash, BlockId, SequenceId, TenantTag
from octavo.records.attend import Exchange, Grant, HeldSequence, Inventory


@dataclass
class Known:
    """One sequence."""

    root: BlockHash
    tokens: list[int]
    table: list[BlockId] = field(default_factory=list[BlockId])
    room: int = 0
    prompt: list[int] = field(default_factory=list[int])
    forgotten: bool = False
    tenant: TenantTag = NOBODY
    retain_seconds: int = 0


class Mirror:
    """A worker's memory: records by block, sequences by id."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self.records: dict[BlockId, bytes] = {}
        self.sequences: dict[SequenceId, Known] = {}
        self.cache_epoch = NEVER_RESET

    def does(self, exchange: Exchange) -> None:
        """What the worker has done itself, before it says so."""
        for cut in exchange.truncations:
            known = self.sequences[cut.sequence]
            used = -(-cut.length // self._size)
            self._let_go(known.table[used:])
            del known.table[used:], known.tokens[cut.length :]
            known.room, known.prompt = cut.length, []
        for commit in exchange.commits:
            self.sequences[commit.sequence].tokens += commit.tokens

    def hears(self, exchange: Exchange, grant: Grant) -> None:
        """What the manager has made of the rest."""
        unmet = set(grant.unmet)
        if grant.cache_epoch != self.cache_epoch:
            self.cache_epoch = grant.cache_epoch
            self.records.clear()
            for known in self.sequences.values():
                known.forgotten = True
        for fork in exchange.forks:
            self._bear(fork.parent, [child for child in fork.children if child not in unmet])
        for sequence in exchange.finished:
            self._let_go(self.sequences.pop(sequence).table)
        attached = {attach.sequence: attach for attach in exchange.attaches}
        for (sequence, reused), root in zip(grant.attached, grant.roots, strict=True):
            attach = attached[sequence]
            self.sequences[sequence] = known = Known(root, list(attach.tokens[:reused]), room=reused)
            known.prompt = list(attach.tokens)
            known.tenant, known.retain_seconds = attach.tenant, attach.retain_seconds
        for change in grant.tables:
            table = self.sequences[change.sequence].table
            table[change.start : change.start + len(change.blocks)] = change.blocks
        wishes = [*exchange.reserves, *((child, fork.reserve) for fork in exchange.forks for child in fork.children)]
        for sequence, count in wishes:
            if sequence not in unmet and sequence in self.sequences:
                self._grow(self.sequences[sequence], count)
        self.records.update(split_records("grant.published", grant.published, self._size))
        for block in grant.evicted:
            self.records.pop(block, None)

    def _bear(self, parent: SequenceId, children: list[SequenceId]) -> None:
        known = self.sequences[parent]
        length = len(known.tokens)
        for child in children:
            self.sequences[child] = replace(known, tokens=known.tokens.copy(), table=[], room=length, prompt=[])
        if children and length % self._size:
            known.room = length

    def _grow(self, known: Known, count: int) -> None:
        """A reserve was met."""
        if len(known.tokens) + count > known.room:
            known.room = len(known.table) * self._size

    def inventory(self, parts: int = 1) -> list[Inventory]:
        """All of it, in so many parts."""
        records, held = list(self.records.values()), list(map(self._held, self.sequences))
        return [Inventory(b"".join(records[part::parts]), tuple(held[part::parts])) for part in range(parts)]

    def _held(self, sequence: SequenceId) -> HeldSequence:
        known = self.sequences[sequence]
        return HeldSequence(
            sequence=sequence,
            root=known.root,
            tokens=tuple(known.tokens),
            table=tuple(known.table),
            room=known.room,
            ahead=tuple(known.prompt[len(known.tokens) :]),
            forgotten=known.forgotten,
            tenant=known.tenant,
            retain_seconds=known.retain_seconds,
        )

    def _let_go(self, blocks: list[BlockId]) -> None:
        for block in reversed(blocks):
            if block in self.records:
                self.records[block] = self.records.pop(block)
