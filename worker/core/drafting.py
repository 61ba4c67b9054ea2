"""Guesses at what comes next, so that one step may find several tokens of a sequence.

A decode step reads all weights for one row of each sequence; a few rows more cost little. So guesses are put behind the
newest token, the model runs over all of them at once, and a token is drawn behind each. The draws are those that would
have been made one by one, as a draw's randomness is a function of seed, sample and position: they are taken up to the
first that was guessed wrong, and the text is the one without guesses, greedy or not.

There are two sources of guesses. `Lookups`: what followed the newest few tokens where they stood last, in prompt or
output (prompt lookup; Saxena, 2023); texts that quote, edit or continue code repeat themselves a lot, others hardly. Or
a small model (worker/draft_model.py). Whoever guesses well may guess further, whoever does not guesses less.

A sequence guesses only within the block that is its own, so a guess needs no room and the manager hears nothing of it;
what was guessed wrong is written over by what is right.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from worker.core.sequence import Sequence
from worker.core.shares import Share

STEP_ROWS = 32
"""Rows of a step up to which one more costs little: weights are still what it reads most."""
FIRST_REACH = 4
MOST_REACH = 15
"""Guesses in a row: with the newest token they are a block of the usual size."""
_LENGTHS = (3, 2)
"""Of what has to recur, the longer first."""


@dataclass(slots=True)
class Counts:
    """Since the process started."""

    drafted: int = 0
    """Tokens guessed."""
    accepted: int = 0
    """Of them, those that were right."""


class Lookup:
    """Where each few tokens of a text stood last. A text only grows."""

    def __init__(self) -> None:
        self._read = 0
        self._follows: dict[tuple[int, ...], int] = {}

    def after(self, tokens: list[int], most: int) -> tuple[int, ...]:
        """What followed the newest tokens where they last stood before; nothing if they never did.

        Where that reaches the newest token, the text is taken to go round.
        """
        for end in range(max(1, self._read), len(tokens)):
            for length in _LENGTHS:
                if length <= end:
                    self._follows[tuple(tokens[end - length : end])] = end
        self._read = len(tokens)
        for length in _LENGTHS:
            if (follows := self._follows.get(tuple(tokens[-length:]))) is not None:
                period = len(tokens) - follows
                return tuple(tokens[follows + at % period] for at in range(most))
        return ()


class Wish(NamedTuple):
    """For guesses."""

    sequence: Sequence
    most: int
    """How many tokens at most, at least 1."""


class Source(Protocol):
    """Where guesses come from."""

    def guess(self, wishes: list[Wish]) -> dict[Sequence, tuple[int, ...]]:
        """What may come after the newest token of each; nothing for those of whom nothing is known."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


class Lookups:
    """Guesses that texts repeat themselves."""

    def __init__(self) -> None:
        self._of: dict[Sequence, Lookup] = {}

    def guess(self, wishes: list[Wish]) -> dict[Sequence, tuple[int, ...]]:
        """See Source."""
        found = {
            sequence: self._of.setdefault(sequence, Lookup()).after(sequence.tokens, most) for sequence, most in wishes
        }
        return {sequence: guess for sequence, guess in found.items() if guess}

    def forget(self, sequence: Sequence) -> None:
        """See Source."""
        self._of.pop(sequence, None)


class Drafter:
    """Who may guess how much in a step, and how good the guesses were."""

    def __init__(self, source: Source) -> None:
        self.counts = Counts()
        self._source = source
        self._reach: dict[Sequence, int] = {}

    def guess(self, shares: Iterable[Share], *, block_size: int, budget: int) -> dict[Sequence, tuple[int, ...]]:
        """What may come after the newest token of those who decode, within their own blocks and the step's budget."""
        shares = list(shares)
        left = min(STEP_ROWS, budget) - sum(share.count for share in shares)
        wishes: list[Wish] = []
        for share in filter(_decodes, shares):
            reach = self._reach.setdefault(share.sequence, FIRST_REACH)
            if (most := min(left, reach, _most(share.sequence, block_size))) > 0:
                wishes.append(Wish(share.sequence, most))
                left -= most
        return self._source.guess(wishes) if wishes else {}

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """So many leading guesses were right."""
        self.counts.drafted += drafted
        self.counts.accepted += accepted
        if (reach := self._reach.get(sequence)) is None:  # it has ended with this
            return
        if accepted == drafted:
            self._reach[sequence] = min(2 * reach, MOST_REACH)
        elif not accepted:
            self._reach[sequence] = max(1, reach // 2)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._reach.pop(sequence, None)
        self._source.forget(sequence)


def _decodes(share: Share) -> bool:
    """Whether exactly its newest token is computed, an output, and the next one of this sample alone is drawn."""
    sequence = share.sequence
    alone = sequence.width == 1 and sequence.request.submission.beam is None
    return alone and sequence.outputs > 0 and share.count == 1 and share.end == len(sequence.tokens)


def _most(sequence: Sequence, block_size: int) -> int:
    """Guesses that have a place, and of which all could become output, a token drawn behind the last included."""
    places = sequence.writable(block_size) - len(sequence.tokens)
    return min(places, sequence.request.submission.max_tokens - sequence.outputs - 1)
