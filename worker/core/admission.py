"""When a waiting sequence may come in: when it is next, while there are places, budget and room.

Who is next says order.py; the budget is that of the step to come. Room is what the available blocks leave after
everything that the running sequences already know they will need, and one block more for each, so that nobody who comes
in is sent away again at the next block border. A newcomer shares what the running sequences have computed of its
tokens: that takes no room, unless they were attached before a reset, after which nobody finds it. Other hits do, since
nobody holds their blocks. A sequence that was sent back is given no such credit, since who held those blocks may have
been sent back with it.

Whoever is told that another sequence computes what it is missing *follows* that one: it holds nothing, takes no budget,
those behind it may come in, and it is asked for again when the other one has computed all that the two have in common,
or is gone. So do, unasked, all who wait and begin like a sequence that has just come in.

With nothing running the next one always comes in: the whole pool is its own. Where it does not fit beside those of
lower priority, some of them make way (`make_way`).
"""

from collections.abc import Iterator

from worker.core import order
from worker.core.lineup import Lineup
from worker.core.sequence import Sequence, Wait
from worker.core.tables import Tables


class Doorkeeper:
    """Judges room by the last grant."""

    def __init__(self, tables: Tables, lineup: Lineup, block_size: int) -> None:
        self._tables = tables
        self._lineup = lineup
        self._block_size = block_size
        self._turns = order.Turns()

    def admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Move sequences from waiting to running. Returns them with the tokens that each may compute."""
        admitted: list[tuple[Sequence, int]] = []
        room, running = self._room(), self._lineup.running
        while budget > 0 and (self._may_take_one(room) or not running) and (sequence := self._next()) is not None:
            reuse = self._reuse(sequence)
            if running and not self._fits(sequence, reuse, self._lineup.places_left, room):
                break
            self._lineup.waiting.remove(sequence)
            self._turns.came_in(sequence, self._lineup.waiting)
            self._lineup.run(sequence)
            sequence.follows = None
            count = min(sequence.findable - max(reuse, self._hit(sequence)), budget)
            admitted.append((sequence, count))
            budget -= count
            room -= self._cost(sequence, reuse) + 1
        return admitted

    def make_way(self) -> list[Sequence]:
        """Those of lower priority who must give way before the next can come in; nobody if that would not do."""
        running = self._lineup.running
        highest = next((one.priority for one in self._lineup.waiting if not order.is_sheltered(one)), None)
        if highest is None or not running or highest <= running[-1].priority or (sequence := self._next()) is None:
            return []
        reuse, places, room = self._reuse(sequence), self._lineup.places_left, self._room()
        going: list[Sequence] = []
        for other in order.below(sequence, running):
            if self._fits(sequence, reuse, places, room):
                break
            going.append(other)
            places += other.width
            room += len(other.table) + other.growth(self._block_size) + 1
        return going if self._fits(sequence, reuse, places, room) else []

    def follow(self, leader: Sequence) -> None:
        """Let all who wait for what the leader is computing follow it."""
        size = self._block_size
        ready = leader.computed // size * size
        for sequence in self._lineup.waiting:
            until = sequence.shared_until(leader, ready, len(leader.tokens), size)
            if until > ready and sequence.follows is None:
                sequence.follows = Wait(leader.id, until)

    def _next(self) -> Sequence | None:
        """Whose turn it is."""
        return self._turns.next(self._able(), self._hit)

    def _able(self) -> Iterator[Sequence]:
        """Who waits for nothing but its turn."""
        one_is_sheltered = any(map(order.is_sheltered, self._lineup.running))
        for sequence in self._lineup.waiting:
            if not self._must_wait(sequence) and not (one_is_sheltered and order.is_sheltered(sequence)):
                yield sequence

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether the one that it follows is still at it."""
        if sequence.follows is None:
            return False
        leader = self._tables.known(sequence.follows.leader)
        return leader is not None and leader.computed < sequence.follows.until

    def _may_take_one(self, room: int) -> bool:
        """Whether it is worth looking who is next: there is a place, and a block for the token that each computes."""
        return self._lineup.places_left > 0 and room > 0

    def _fits(self, sequence: Sequence, reuse: int, places: int, room: int) -> bool:
        return sequence.width <= places and self._cost(sequence, reuse) <= room

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

    def _hit(self, sequence: Sequence) -> int:
        """Tokens that it will find published, whoever holds them or nobody."""
        return self._tables.hit(sequence)
