"""When a waiting sequence may come in: while there are places, tokens left in the step's budget, and room.

Room is what the available blocks leave after everything that the running sequences already know they will need, and one
block more for each, so that nobody who comes in is sent away again at the next block border. A newcomer shares what the
running sequences have computed of its tokens: that takes no room, unless they were attached before a reset, after which
nobody finds it. Other hits do, since nobody holds their blocks. A sequence that was sent back is given no such credit,
since who held those blocks may have been sent back with it.

Whoever is told that another sequence computes what it is missing *follows* that one: it holds nothing, those behind it
may come in, and it is asked for again when the other one has computed all that the two have in common, or is gone. So
do, unasked, all who wait and begin like a sequence that has just come in.

With nothing running the oldest always comes in: the whole pool is its own.
"""

from worker.core.lineup import Lineup
from worker.core.sequence import Sequence, Wait
from worker.core.tables import Tables


class Doorkeeper:
    """Judges room by the last grant."""

    def __init__(self, tables: Tables, lineup: Lineup, block_size: int) -> None:
        self._tables = tables
        self._lineup = lineup
        self._block_size = block_size

    def admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Move sequences from waiting to running. Returns them with the tokens that each may compute."""
        admitted: list[tuple[Sequence, int]] = []
        room = self._room()
        while budget > 0 and (found := self._next(room)) is not None:
            sequence, reuse = found
            self._lineup.waiting.remove(sequence)
            self._lineup.run(sequence)
            sequence.follows = None
            count = min(sequence.findable - reuse, budget)
            admitted.append((sequence, count))
            budget -= count
            room -= self._cost(sequence, reuse) + 1
        return admitted

    def would_admit(self) -> bool:
        """Whether `admit` would find anyone now."""
        return self._next(self._room()) is not None

    def follow(self, leader: Sequence) -> None:
        """Let all who wait for what the leader is computing follow it."""
        size = self._block_size
        ready = leader.computed // size * size
        for sequence in self._lineup.waiting:
            until = sequence.shared_until(leader, ready, len(leader.tokens), size)
            if until > ready and sequence.follows is None:
                sequence.follows = Wait(leader.id, until)

    def _next(self, room: int) -> tuple[Sequence, int] | None:
        """The oldest that waits for nothing but its turn, and how much it will reuse; None if it may not come in."""
        sequence = next((waiting for waiting in self._lineup.waiting if not self._must_wait(waiting)), None)
        if sequence is None:
            return None
        reuse = self._reuse(sequence)
        fits = sequence.width <= self._lineup.places_left and self._cost(sequence, reuse) <= room
        return (sequence, reuse) if fits or not self._lineup.running else None

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether the one that it follows is still at it."""
        if sequence.follows is None:
            return False
        leader = self._tables.known(sequence.follows.leader)
        return leader is not None and leader.computed < sequence.follows.until

    def _room(self) -> int:
        """Blocks that are free, or are freed by the next exchange before anything takes them, and that nobody needs."""
        running = self._lineup.running
        needed = sum(sequence.growth(self._block_size) for sequence in running)
        return self._tables.free_blocks + self._tables.returning - needed - len(running)

    def _cost(self, sequence: Sequence, reuse: int) -> int:
        """Blocks that it will take from the free ones."""
        return sequence.growth(self._block_size) - (0 if sequence.sent_back else reuse // self._block_size)

    def _reuse(self, sequence: Sequence) -> int:
        """Tokens that it will find computed by a running sequence, in whole blocks."""
        reuse = 0
        for other in filter(self._tables.publishes, self._lineup.running):
            reuse = sequence.shared_until(other, reuse, other.computed, self._block_size)
        return reuse
