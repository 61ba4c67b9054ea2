"""Guesses at what comes next, so that one step may find several tokens of a sequence.

A decode step reads all weights for one row of each sequence; a few rows more cost little. So guesses are put behind the
newest token, the model runs over all of them at once, and a token is drawn behind each. The draws are those that would
have been made one by one, as a draw's randomness is a function of seed, sample and position: they are taken up to the
first that was guessed wrong, and the text is the one without guesses, greedy or not.

The guess is what followed the newest few tokens where they stood last, in the prompt or the output (prompt lookup;
Saxena, 2023). Texts that quote, edit or continue code repeat themselves a lot, others hardly: whoever guesses well may
guess further, whoever does not guesses one token at a time.

A sequence guesses only within the block that is its own, so a guess needs no room and the manager hears nothing of it;
what was guessed wrong is written over by what is right.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Guessing:
    """One sequence's."""

    lookup: Lookup = field(default_factory=Lookup)
    reach: int = FIRST_REACH


class Drafter:
    """Guesses for the sequences of a step, and learns how good they were."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._guessing: dict[Sequence, _Guessing] = {}

    def guess(self, shares: Iterable[Share], *, block_size: int, budget: int) -> dict[Sequence, tuple[int, ...]]:
        """What may come after the newest token of those who decode, within their own blocks and the step's budget."""
        shares = list(shares)
        left = min(STEP_ROWS, budget) - sum(share.count for share in shares)
        guesses: dict[Sequence, tuple[int, ...]] = {}
        for share in shares:
            if left <= 0:
                break
            sequence = share.sequence
            if _decodes(share) and (most := min(left, _most(sequence, block_size))) > 0:
                own = self._guessing.setdefault(sequence, _Guessing())
                if guess := own.lookup.after(sequence.tokens, min(most, own.reach)):
                    guesses[sequence] = guess
                    left -= len(guess)
        return guesses

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """So many leading guesses were right."""
        self.counts.drafted += drafted
        self.counts.accepted += accepted
        own = self._guessing.get(sequence)
        if own is None:  # it has ended with this
            return
        if accepted == drafted:
            own.reach = min(2 * own.reach, MOST_REACH)
        elif not accepted:
            own.reach = max(1, own.reach // 2)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._guessing.pop(sequence, None)


def _decodes(share: Share) -> bool:
    """Whether exactly its newest token is computed, an output, and the next one of this sample alone is drawn."""
    sequence = share.sequence
    alone = sequence.width == 1 and sequence.request.submission.beam is None
    return alone and sequence.outputs > 0 and share.count == 1 and share.end == len(sequence.tokens)


def _most(sequence: Sequence, block_size: int) -> int:
    """Guesses that have a place, and of which all could become output, a token drawn behind the last included."""
    places = sequence.writable(block_size) - len(sequence.tokens)
    return min(places, sequence.request.submission.max_tokens - sequence.outputs - 1)
