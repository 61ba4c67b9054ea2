"""Beam search over one request: which beams go on, which texts have ended, and when no better one can come.

The rules are those of transformers' `generate(num_beams=width)` (5.24), so that the texts are, too:

- Of the beams' continuations together, the best (1 + stop tokens, at least 2) * width are looked at: among so many,
  `width` do not end, whatever the others do. The best `width` of those go on.
- A continuation ends with a stop token, or by being the last that `max_tokens` allows. It becomes a finished text if it
  is among the best `width` of all; the best `width` finished texts are kept. They are ranked by the logarithm of their
  probability over their length, the stop token counted, to the power of `length_penalty`.
- The search is over when nothing can go on; with `early_stopping` when `width` texts have finished; without it when the
  best beam, ranked as if it ended now, does not beat the worst of `width` finished texts; an `exhaustive` one ranks it
  as if it ended with `max_tokens`, where a longer text counts for more (transformers' early_stopping="never").

Of equals, the earlier beam's and the one listed first comes first. Pure: knows no sequences and no blocks.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from octavo.records.sampling import BeamSearch
from octavo.records.serve import FinishReason
from worker.core.step import Continuation


class Branch(NamedTuple):
    """A beam that goes on."""

    parent: int
    """Place of the beam that it continues, among those before."""
    token: int
    cumulative: float
    """Logarithm of the probability of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A beam that has ended."""

    tokens: tuple[int, ...]
    """Without the stop token."""
    reason: FinishReason
    cumulative: float
    """The stop token's logarithm included."""
    score: float
    """With the length penalty."""


def continuations_wanted(beam: BeamSearch, stops: Collection[int]) -> int:
    """How many of the likeliest continuations of a beam have to be known."""
    return max(2, 1 + len(stops)) * beam.width


class Beams:
    """The beams of one request, by rank."""

    def __init__(self, beam: BeamSearch, stops: Collection[int], max_tokens: int) -> None:
        """One beam, which is empty."""
        self._beam = beam
        self._stops = stops
        self._max_tokens = max_tokens
        self._cumulative = [0.0]
        self._finished: list[Text] = []

    def __len__(self) -> int:
        """Beams that go on."""
        return len(self._cumulative)

    def advance(self, outputs: Sequence[Sequence[int]], found: Sequence[Sequence[Continuation]]) -> list[Branch]:
        """The beams that go on, by rank; none when the search is over.

        Args:
            outputs: of each beam, all of one length.
            found: the likeliest continuations of each, likeliest first, as many as `continuations_wanted`.
        """
        assert len(outputs) == len(found) == len(self), (len(outputs), len(found), len(self))
        length = len(outputs[0]) + 1
        branches = self._best(found)
        lasts = length >= self._max_tokens
        going = [branch for branch in branches if not lasts and branch.token not in self._stops]
        ending = [branch for branch in branches[: self._beam.width] if lasts or branch.token in self._stops]
        self._finish([self._text(branch, outputs[branch.parent], length) for branch in ending])
        kept = going[: self._beam.width]
        if not kept or self._is_over(kept[0].cumulative, length):
            return []
        self._cumulative = [branch.cumulative for branch in kept]
        return kept

    def best(self, count: int) -> list[Text]:
        """The best finished texts, best first, when the search is over."""
        assert len(self._finished) >= count, (len(self._finished), count)
        return self._finished[:count]

    def _best(self, found: Sequence[Sequence[Continuation]]) -> list[Branch]:
        """The best continuations of all beams."""
        branches = (
            Branch(place, one.token, cumulative + one.logprob)
            for place, (cumulative, own) in enumerate(zip(self._cumulative, found, strict=True))
            for one in own
        )
        ranked = sorted(branches, key=lambda branch: -branch.cumulative)
        return list(islice(ranked, continuations_wanted(self._beam, self._stops)))

    def _text(self, branch: Branch, output: Sequence[int], length: int) -> Text:
        stopped = branch.token in self._stops
        return Text(
            tokens=tuple(output) if stopped else (*output, branch.token),
            reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            cumulative=branch.cumulative,
            score=branch.cumulative / length**self._beam.length_penalty,
        )

    def _finish(self, texts: list[Text]) -> None:
        ranked = sorted((*self._finished, *texts), key=lambda text: -text.score)
        self._finished = ranked[: self._beam.width]

    def _is_over(self, best: float, length: int) -> bool:
        if len(self._finished) < self._beam.width:
            return False
        penalty = self._beam.length_penalty
        end = self._max_tokens if self._beam.exhaustive and penalty > 0 else length
        return self._beam.early_stopping or best / end**penalty <= self._finished[-1].score
