"""Who computes a missing block, so that nobody computes it a second time meanwhile.

A sequence whose prompt has full blocks that are not published *leads*: it is registered under the hash of the block
that it publishes next. Another sequence whose longest hit ends before that very block is told to wait for it. One hash
for each leader is enough, since every block before it is published and held by the leader: whoever follows the leader's
prompt misses this block first, and whoever has left that prompt earlier misses another one.

Invariants:
- A leader is in the books. It stops leading when its prompt's full blocks are published, when it is freed or truncated,
  and when a collision keeps its blocks from being published. So a wait always ends.
- Who waits holds nothing and leads nothing: no sequence waits for one that waits.
- A block has one leader at most.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from cache_manager.core.block_table import BlockTable
from cache_manager.core.prefix_index import PrefixIndex
from octavo.hashing import TOKEN_BYTES
from octavo.ids import BlockHash, SequenceId


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The answer to an attach that has to wait: nothing was kept for the sequence."""

    leader: SequenceId
    """It computes the first block that the sequence is missing."""


class SingleFlight:
    """The leaders of one worker's books."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._leaders: dict[BlockHash, SequenceId] = {}
        self._led: dict[SequenceId, BlockHash] = {}
        self._prompts: dict[SequenceId, bytes] = {}
        """Of those whose prompt is being computed: its tokens, as they are hashed."""

    def next_block(self, table: BlockTable, prompt: bytes) -> BlockHash | None:
        """The hash of the first block that a table does not hold of a prompt; None if the rest fills none."""
        index, width = table.full_blocks, table.block_size * TOKEN_BYTES
        tokens = prompt[index * width : (index + 1) * width]
        return self._index.hash_after(table.before(index), tokens) if len(tokens) == width else None

    def leader(self, block_hash: BlockHash | None) -> SequenceId | None:
        """Who computes that block; None if nobody does."""
        return None if block_hash is None else self._leaders.get(block_hash)

    def begin(self, sequence: SequenceId, prompt: bytes, block_hash: BlockHash | None) -> None:
        """A new sequence computes the rest of its prompt, from this block on."""
        if block_hash is not None:
            self._prompts[sequence] = prompt
            self._lead(sequence, block_hash)

    def advance(self, sequence: SequenceId, table: BlockTable) -> None:
        """Blocks of the sequence have become full: it goes on with the next one, if it can publish one."""
        prompt = self._prompts.get(sequence)
        if prompt is None:
            return
        self._land(sequence)
        collided = table.published < table.full_blocks
        block_hash = None if collided else self.next_block(table, prompt)
        if block_hash is None:
            del self._prompts[sequence]
        else:
            self._lead(sequence, block_hash)

    def end(self, sequence: SequenceId) -> None:
        """It computes nothing more that others may wait for."""
        self._land(sequence)
        self._prompts.pop(sequence, None)

    def violations(self, tables: Container[SequenceId]) -> Iterator[str]:
        """What is wrong with the leaders, given who is in the books."""
        if {sequence: block_hash for block_hash, sequence in self._leaders.items()} != self._led:
            yield "leaders and what they lead do not agree"
        for sequence in self._prompts:
            if sequence not in tables:
                yield f"sequence {sequence} leads and is not in the books"
        if not self._led.keys() <= self._prompts.keys():
            yield "a sequence leads without a prompt"

    def _lead(self, sequence: SequenceId, block_hash: BlockHash) -> None:
        """Register a block, unless its key is taken or another sequence leads it."""
        if self._index.is_vacant(block_hash) and self._leaders.setdefault(block_hash, sequence) == sequence:
            self._led[sequence] = block_hash

    def _land(self, sequence: SequenceId) -> None:
        block_hash = self._led.pop(sequence, None)
        if block_hash is not None:
            del self._leaders[block_hash]
