"""When a waiting sequence may come in: while there are places, tokens left in the step's budget, and room.

Room is what the available blocks leave after everything that the running sequences already know they will need, and one
block more for each, so that nobody who comes in is sent away again at the next block border. How much of a prompt a
prefix hit covers is known only when it is attached; until then the last hit is taken as the guess, for prompts that
begin with it. A sequence that was sent back is given no such credit: it waits until all of its tokens have room.

With nothing running the oldest always comes in: the whole pool is its own.
"""

from worker.core.lineup import Lineup
from worker.core.sequence import Sequence
from worker.core.tables import Tables


class Doorkeeper:
    """Judges room by the last grant."""

    def __init__(self, tables: Tables, lineup: Lineup, block_size: int) -> None:
        self._tables = tables
        self._lineup = lineup
        self._block_size = block_size
        self._last_hit: list[int] = []
        """The tokens that the last attach with a hit found published."""
        self._last_salt = b""

    def admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Move sequences from waiting to running. Returns them with the tokens that each may compute."""
        admitted: list[tuple[Sequence, int]] = []
        room = self._room()
        while budget > 0 and (sequence := self._next(room)) is not None:
            self._lineup.waiting.pop(0)
            self._lineup.run(sequence)
            count = min(len(sequence.tokens) - self._likely_reuse(sequence), budget)
            admitted.append((sequence, count))
            budget -= count
            room -= self._cost(sequence) + 1
        return admitted

    def would_admit(self) -> bool:
        """Whether `admit` would find anyone now."""
        return self._next(self._room()) is not None

    def learn(self, sequence: Sequence) -> None:
        """Remember what the sequence's attach has found, if anything."""
        if sequence.reused:
            self._last_hit = sequence.tokens[: sequence.reused]
            self._last_salt = sequence.request.submission.salt

    def shortfall(self) -> int:
        """Blocks that the running sequences will need for what they know, beyond those that are available."""
        return self._needed() - self._available()

    def _next(self, room: int) -> Sequence | None:
        """The oldest that waits, if it may come in."""
        if not self._lineup.waiting:
            return None
        sequence = self._lineup.waiting[0]
        if not self._lineup.running:
            return sequence
        fits = sequence.width <= self._lineup.places_left and self._cost(sequence) <= room
        return sequence if fits else None

    def _room(self) -> int:
        return self._available() - self._needed() - len(self._lineup.running)

    def _available(self) -> int:
        """Free blocks, and those that the next exchange frees before anything else takes them."""
        return self._tables.free_blocks + self._tables.returning

    def _needed(self) -> int:
        return sum(sequence.growth(self._block_size) for sequence in self._lineup.running)

    def _cost(self, sequence: Sequence) -> int:
        """Blocks that it will take from the free ones."""
        likely = 0 if sequence.sent_back else self._likely_reuse(sequence)
        return sequence.growth(self._block_size) - likely // self._block_size

    def _likely_reuse(self, sequence: Sequence) -> int:
        """Tokens that a prefix hit will probably cover; whole blocks, and never all tokens."""
        hit, tokens = self._last_hit, sequence.tokens
        if sequence.request.submission.salt != self._last_salt or tokens[: len(hit)] != hit:
            return 0
        return min(len(hit), (len(tokens) - 1) // self._block_size * self._block_size)
