"""Beam search written down once more, over whole texts: every continuation of every beam is looked at."""

from collections.abc import Callable, Collection, Sequence
from math import inf

from octavo.records.sampling import BeamSearch
from octavo.records.serve import FinishReason

Scores = Callable[[Sequence[int]], Sequence[float]]
"""Logarithms of the probabilities of all tokens after a text."""
Found = tuple[list[int], FinishReason, float]
"""Output without the stop token, why it ended, and the logarithm of its probability."""


def beam_search(
    prompt: Sequence[int], scores: Scores, beam: BeamSearch, stops: Collection[int], max_tokens: int
) -> list[Found]:
    """The texts that a search finds, best first."""
    going: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, Found]] = []
    for length in range(1, max_tokens + 1):
        every = [
            (total + logprob, place, -logprob, token, [*output, token])
            for place, (total, output) in enumerate(going)
            for token, logprob in enumerate(scores([*prompt, *output]))
        ]
        every.sort(key=lambda one: (-one[0], one[1], one[2], one[3]))
        best = every[: max(2, 1 + len(stops)) * beam.width]
        going = []
        for rank, (total, _, _, token, output) in enumerate(best):
            if token not in stops and length < max_tokens:
                going.append((total, output))
            elif rank < beam.width:
                stopped = token in stops
                text = output[:-1] if stopped else output
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                ended.append((total / length**beam.length_penalty, (text, reason, total)))
        going = going[: beam.width]
        ended = sorted(ended, key=lambda one: -one[0])[: beam.width]
        full = len(ended) == beam.width
        worst = ended[-1][0] if full else -inf
        end = max_tokens if beam.exhaustive and beam.length_penalty > 0 else length
        if full and going and (beam.early_stopping or going[0][0] / end**beam.length_penalty <= worst):
            break
        if not going:
            break
    return [found for _, found in ended]
