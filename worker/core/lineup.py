"""Who waits and who runs, each list in its order (order.py).

Invariants: a live sequence that is not about to be forked is in exactly one of the two; a waiting one has no table and
an id that never had one; a running one follows nobody; the widths of the running ones sum to at most `max_running`.
"""

from bisect import insort

from octavo.ids import SequenceId
from worker.core import order
from worker.core.sequence import Request, Sequence, blocks_for
from worker.core.tables import Tables

_ID_BITS = 32


class Lineup:
    """The two lists, and the only way back from running to waiting."""

    def __init__(self, tables: Tables, *, max_running: int, block_size: int) -> None:
        self._tables = tables
        self._max_running = max_running
        self._block_size = block_size
        self._last_id = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        """Sequences that lost a table for which they had computed something."""

    @property
    def places_left(self) -> int:
        """How much wider the running sequences may become."""
        return self._max_running - sum(sequence.width for sequence in self.running)

    @property
    def queued_tokens(self) -> int:
        """Known tokens that prefills have still to compute. A decode step's one token is not queued."""
        prefills = (sequence.remaining for sequence in self.running if sequence.remaining > 1)
        return sum(_left_to_compute(sequence) for sequence in self.waiting) + sum(prefills)

    def new_sequence(self, request: Request, sample: int, tokens: list[int]) -> Sequence:
        """A sample of the request, in neither list yet."""
        sequence = Sequence(request=request, sample=sample, id=self._new_id(), tokens=tokens)
        request.live.append(sequence)
        return sequence

    def new_child(self, parent: Sequence, sample: int) -> Sequence:
        """A sample that knows what its parent knows and is to alias its table."""
        child = self.new_sequence(parent.request, sample, parent.tokens.copy())
        child.computed = child.reused = child.told = parent.computed
        child.cache_epoch = parent.cache_epoch
        child.root = parent.root
        child.table = parent.table[: blocks_for(parent.computed, self._block_size)]
        return child

    def wait(self, sequence: Sequence) -> None:
        """Take its place among the waiting."""
        insort(self.waiting, sequence, key=order.entry)

    def run(self, sequence: Sequence) -> None:
        """Take its place among the running."""
        insort(self.running, sequence, key=order.service)

    def give_way(self, sequence: Sequence) -> None:
        """Send it back for want of blocks or places."""
        self.running.remove(sequence)
        order.set_back(sequence)
        sequence.sent_back = True
        self._start_over(sequence)

    def start_over(self, sequence: Sequence) -> None:
        """Send it back for a reason that lies in nobody's needs."""
        self.running.remove(sequence)
        sequence.sent_back = False
        self._start_over(sequence)

    def rest(self, sequence: Sequence) -> None:
        """Out of both lines, with all that it knows computed: its blocks are freed with the next exchange."""
        self.running.remove(sequence)
        order.got_on(sequence)
        sequence.sent_back = False
        self._leave_table(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        """Among the waiting: its blocks are freed with the next exchange, its tokens computed again later."""
        self.preemptions += sequence.computed > sequence.reused
        self._leave_table(sequence)
        self.wait(sequence)

    def _leave_table(self, sequence: Sequence) -> None:
        """As if nothing of it had been computed."""
        self._tables.leave(sequence)
        sequence.id = self._new_id()
        sequence.table = []
        sequence.computed = sequence.reused = sequence.told = 0
        sequence.root, sequence.forked = None, False

    def turn_away(self, sequence: Sequence) -> None:
        """From running to waiting: it got no table, so its id is as good as new."""
        self.running.remove(sequence)
        self.wait(sequence)

    def end(self, sequence: Sequence) -> None:
        """Out of both lists, for good."""
        sequence.ended = True
        sequence.request.live.remove(sequence)
        for line in (self.running, self.waiting):
            if sequence in line:
                line.remove(sequence)
        self._tables.leave(sequence)

    def check(self) -> None:
        """Assert the invariants."""
        for line, key in ((self.running, order.service), (self.waiting, order.entry)):
            assert line == sorted(line, key=key), [sequence.age for sequence in line]
            assert not any(sequence.ended for sequence in line)
        assert not set(self.running) & set(self.waiting)
        assert not any(sequence.table or sequence.computed or sequence in self._tables for sequence in self.waiting)
        assert not any(sequence.follows for sequence in self.running)
        assert self.places_left >= 0, self.places_left
        assert sum(map(order.is_sheltered, self.running)) <= 1

    def _new_id(self) -> SequenceId:
        self._last_id = (self._last_id + 1) % (1 << _ID_BITS)
        return SequenceId(self._last_id)


def _left_to_compute(sequence: Sequence) -> int:
    """Tokens of a waiting sequence that nobody computes for it."""
    return len(sequence.tokens) - (0 if sequence.follows is None else sequence.follows.until)
