"""Who computes a missing block, so that nobody computes it a second time meanwhile.

A sequence whose prompt has full blocks that are not published *leads*: it is registered under the place of the block
that it publishes next. Another sequence whose longest hit ends before that very block is told to wait for it. One place
for each leader is enough, since every block before it is published and held by the leader: whoever follows the leader's
prompt misses this block first, and whoever has left that prompt earlier misses another one.

Invariants:
- A leader is in the books. It stops leading when its prompt's full blocks are published, and when it is freed or
  truncated. So a wait always ends.
- Who waits holds nothing and leads nothing: no sequence waits for one that waits.
- A block has one leader at most.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from cache_manager.core.block import Place
from cache_manager.core.block_table import BlockTable
from cache_manager.core.prefix_index import PrefixIndex
from octavo.hashing import TOKEN_BYTES
from octavo.ids import SequenceId


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The answer to an attach that has to wait: nothing was kept for the sequence."""

    leader: SequenceId
    """It computes the first block that the sequence is missing."""


class SingleFlight:
    """The leaders of one worker's books."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._leaders: dict[Place, SequenceId] = {}
        self._led: dict[SequenceId, Place] = {}
        self._prompts: dict[SequenceId, bytes] = {}
        """Of those whose prompt is being computed: its tokens, as they are hashed."""

    def leader(self, place: Place) -> SequenceId | None:
        """Who computes the block of that place; None if nobody does."""
        return self._leaders.get(place)

    def begin(self, sequence: SequenceId, prompt: bytes, place: Place) -> None:
        """A new sequence computes the rest of its prompt, from this place on."""
        self._prompts[sequence] = prompt
        self._lead(sequence, place)

    def resume(self, sequence: SequenceId, prompt: bytes, table: BlockTable) -> None:
        """A sequence computes the rest of its prompt, part of which is in its table."""
        self._prompts[sequence] = prompt
        self.advance(sequence, table)

    def advance(self, sequence: SequenceId, table: BlockTable) -> None:
        """Blocks of the sequence have become full: it goes on with the next one, if it can publish one."""
        prompt = self._prompts.get(sequence)
        if prompt is None:
            return
        self._land(sequence)
        index, width = table.full_blocks, table.block_size * TOKEN_BYTES
        tokens = prompt[index * width : (index + 1) * width]
        if len(tokens) == width:
            self._lead(sequence, (table.before(index), table.seam.joined(index, tokens)))
        else:
            del self._prompts[sequence]

    def end(self, sequence: SequenceId) -> None:
        """It computes nothing more that others may wait for."""
        self._land(sequence)
        self._prompts.pop(sequence, None)

    def end_all(self) -> None:
        """Nobody computes anything that others may wait for."""
        self._leaders.clear()
        self._led.clear()
        self._prompts.clear()

    def violations(self, tables: Container[SequenceId]) -> Iterator[str]:
        """What is wrong with the leaders, given who is in the books."""
        if {sequence: place for place, sequence in self._leaders.items()} != self._led:
            yield "leaders and what they lead do not agree"
        for sequence in self._prompts:
            if sequence not in tables:
                yield f"sequence {sequence} leads and is not in the books"
        if not self._led.keys() <= self._prompts.keys():
            yield "a sequence leads without a prompt"

    def _lead(self, sequence: SequenceId, place: Place) -> None:
        """Register a place, unless a block is published there or another sequence leads it."""
        if self._index.is_vacant(place) and self._leaders.setdefault(place, sequence) == sequence:
            self._led[sequence] = place

    def _land(self, sequence: SequenceId) -> None:
        place = self._led.pop(sequence, None)
        if place is not None:
            del self._leaders[place]
