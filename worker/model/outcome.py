"""Which rows of a batch need logits, and what comes of them: drawn tokens, and how likely tokens were.

The rows of a chunk are those of its targets, then those that it draws from: its last, and one for each draft before.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.records.serve import TokenLogprobs
from worker.core.step import Chunk, StepResult
from worker.model.likelihood import continuations, logprobs
from worker.model.sampler import sample


def logit_rows(chunks: Sequence[Chunk], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows of the batch whose logits are wanted, int64 [R]; `starts` [B + 1] are those where chunks begin."""
    last = starts[1:] - 1
    if not any(chunk.targets or chunk.drafts for chunk in chunks):
        return last[[bool(chunk.draws) for chunk in chunks]]
    rows = [
        np.array([*range(start, start + len(chunk.targets)), *range(end + 1 - _drawn_rows(chunk), end + 1)], np.int64)
        for chunk, start, end in zip(chunks, starts[:-1], last, strict=True)
    ]
    return np.concatenate(rows)


def outcome(chunks: Sequence[Chunk], logits: torch.Tensor) -> StepResult:
    """Draw and judge what the chunks ask for, from the logits [R, V] of their rows.

    Raises:
        FloatingPointError: logits that are drawn from are not finite.
    """
    ends = np.cumsum([len(chunk.targets) + _drawn_rows(chunk) for chunk in chunks]).tolist()
    drawing = [() if _searches(chunk) else chunk.draws for chunk in chunks]
    rows = [
        _rows_of_draws(chunk, end) if draws else [] for chunk, draws, end in zip(chunks, drawing, ends, strict=True)
    ]
    drawn = iter(sample(logits, [row for own in rows for row in own], [draw for own in drawing for draw in own]))
    tokens = tuple(tuple(next(drawn) for _ in draws) for draws in drawing)
    beams = {place: ends[place] - 1 for place, chunk in enumerate(chunks) if _searches(chunk)}
    found = continuations(logits, list(beams.values()), [chunks[place].draws[0] for place in beams])
    wanted = _Wanted()
    for place, chunk in enumerate(chunks):
        if tokens[place] and (top := chunk.draws[0].logprobs) is not None:
            wanted.add(place, rows[place], tokens[place], top)
    judged = _Wanted()
    for place, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        if chunk.targets:
            first = end - _drawn_rows(chunk) - len(chunk.targets)
            judged.add(place, range(first, first + len(chunk.targets)), chunk.targets, chunk.top_logprobs)
    return StepResult(tokens, wanted.told(logits), judged.told(logits), dict(zip(beams, found, strict=True)))


def _searches(chunk: Chunk) -> bool:
    return bool(chunk.draws and chunk.draws[0].continuations)


def _drawn_rows(chunk: Chunk) -> int:
    """How many rows of the chunk are drawn from."""
    return chunk.drafts + 1 if chunk.draws else 0


def _rows_of_draws(chunk: Chunk, end: int) -> list[int]:
    """The row of every draw, if the chunk's rows end before `end`."""
    return list(range(end - len(chunk.draws), end)) if chunk.drafts else [end - 1] * len(chunk.draws)


class _Wanted:
    """Tokens of several chunks, to be judged together."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._tops: list[int] = []

    def add(self, place: int, rows: Sequence[int], tokens: Sequence[int], top: int) -> None:
        self._places += [place] * len(rows)
        self._rows += rows
        self._tokens += tokens
        self._tops += [top] * len(rows)

    def told(self, logits: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By chunk, in the order in which they were added."""
        told: dict[int, list[TokenLogprobs]] = {}
        for place, token in zip(self._places, logprobs(logits, self._rows, self._tokens, self._tops), strict=True):
            told.setdefault(place, []).append(token)
        return {place: tuple(own) for place, own in told.items()}
