"""Who is next, and who goes.

- Higher priority first, then older first: so the running are served, and so the manager meets what they ask for.
- *Coming in*, whoever was sent back comes before those of its priority who never ran. Of these, the one goes first that
  finds most of its prompt computed, among the oldest LOOKAHEAD: its blocks are there now, and may not be later. Nobody
  is passed so by more than MOST_PASSED.
- A priority is no wall: when MOST_BEFORE_LOWER have come in while lower priorities waited, the oldest of all is next,
  until one of the lowest has come in. So whoever waits comes in after a number of others that depends on how many were
  there before it, and not on how many come after it.
- *Going*, the lowest priority is sent away first; of it, who has just come and computed nothing, then the newest. The
  first in order is never sent away, so somebody always gets on.
- Who was sent back MOST_SETBACKS times without getting on is *sheltered*: it is first in every order. One of them runs
  at a time, so nobody is ever sent back more often than that without having got on.

Both orders of a line are fixed while a sequence stands in it.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice, takewhile

from worker.core.sequence import Sequence

Age = tuple[int, int]

LOOKAHEAD = 16
"""Waiting sequences, the oldest of the highest priority, whose hits are looked at."""

MOST_PASSED = 8
"""Times that a sequence may be passed by younger ones of its priority, before it is next."""

MOST_BEFORE_LOWER = 16
"""Sequences that come in, one after another, while lower priorities wait."""

MOST_SETBACKS = 3
"""Times that a sequence is sent back without getting on."""


def service(sequence: Sequence) -> tuple[bool, int, Age]:
    """Sorts the running ones, who is served first ahead."""
    return not is_sheltered(sequence), -sequence.priority, sequence.age


def entry(sequence: Sequence) -> tuple[bool, int, bool, Age]:
    """Sorts the waiting ones, hits and patience left aside."""
    return not is_sheltered(sequence), -sequence.priority, not sequence.sent_back, sequence.age


def is_sheltered(sequence: Sequence) -> bool:
    """Whether nobody sends it away any more."""
    return sequence.setbacks >= MOST_SETBACKS


def set_back(sequence: Sequence) -> None:
    """It is sent back for want of blocks or places, and has computed what it has computed."""
    got_on = sequence.computed > sequence.furthest
    sequence.setbacks = 1 if got_on else sequence.setbacks + 1
    sequence.furthest = max(sequence.furthest, sequence.computed)


def got_on(sequence: Sequence) -> None:
    """It has computed all that it was let in for."""
    sequence.setbacks = 0
    sequence.furthest = max(sequence.furthest, sequence.computed)


def going(running: list[Sequence], newcomers: Container[Sequence]) -> list[Sequence]:
    """Who is sent away for want of blocks, who goes first ahead; `running` is sorted by `service`."""

    def staying(sequence: Sequence) -> tuple[bool, int, bool, Age]:
        return not is_sheltered(sequence), -sequence.priority, sequence in newcomers, sequence.age

    return sorted(running, key=staying)[:0:-1]


def below(newcomer: Sequence, running: list[Sequence]) -> Iterator[Sequence]:
    """Whom a newcomer may displace, who goes first ahead; `running` is sorted by `service`.

    Nobody who has just come in: it would have come for nothing.
    """
    lower = (other for other in reversed(running) if other.priority < newcomer.priority)
    return (other for other in lower if other.computed > other.reused and not is_sheltered(other))


class Turns:
    """Whose turn it is to come in."""

    def __init__(self) -> None:
        self._before_lower = 0

    def next(self, able: Iterable[Sequence], hit: Callable[[Sequence], int]) -> Sequence | None:
        """Of those that wait for nothing but their turn, sorted by `entry`; `hit`: tokens that one would find."""
        waiting = iter(able)
        first = next(waiting, None)
        if first is None or is_sheltered(first):
            return first
        if self._before_lower >= MOST_BEFORE_LOWER:
            return min((first, *waiting), key=lambda other: other.age)
        if first.sent_back:
            return first
        level = takewhile(lambda other: other.priority == first.priority, waiting)
        oldest = (first, *islice(level, LOOKAHEAD - 1))
        return next((other for other in oldest if other.passed >= MOST_PASSED), None) or max(oldest, key=hit)

    def came_in(self, newcomer: Sequence, waiting: list[Sequence]) -> None:
        """It was next; `waiting`, sorted by `entry`, are those that it leaves behind."""
        lower = bool(waiting) and waiting[-1].priority < newcomer.priority
        self._before_lower = self._before_lower + 1 if lower else 0
        for other in waiting:
            if entry(other) > entry(newcomer):
                break
            if other.priority == newcomer.priority and other.follows is None:
                other.passed += 1
