"""How likely tokens are: the logarithm of the softmax of a row of logits, as the model gave it.

That is the model's own distribution. Biases, penalties, temperature and cuts change what is drawn, not what is told.
Computed in float32, a few rows at a time: a prompt may ask for every row of a chunk.

Shapes: R rows of logits, V entries of the vocabulary, Q tokens, K of the likeliest.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from octavo.records.serve import TokenLogprobs
from worker.core.step import Continuation, Draw
from worker.model.shaping import shape

_ROWS_AT_ONCE = 64
"""Bounds the float32 copies: 12 MB for a vocabulary of 49,152."""


def logprobs(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """What to tell of every token, in their order.

    Args:
        logits: [R, V], in any floating dtype.
        rows: [Q]: of every token, the row of `logits` that it is judged by.
        tokens: [Q].
        tops: [Q]: how many of the likeliest to list with each; no more than V are.
    """
    told: list[TokenLogprobs] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        told += _some(logits, rows[part], tokens[part], tops[part])
    return told


def _some(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    device = logits.device
    scores = logits[torch.tensor(rows, device=device)].float().log_softmax(-1)
    chosen = scores.gather(-1, torch.tensor(tokens, device=device)[:, None])[:, 0].tolist()
    most = min(max(tops), scores.shape[-1])
    if not most:
        return [TokenLogprobs(logprob) for logprob in chosen]
    likeliest = scores.topk(most, dim=-1)
    listed = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:top], values[:top], strict=True)))
        for logprob, (ids, values), top in zip(chosen, listed, tops, strict=True)
    ]


def continuations(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[tuple[Continuation, ...]]:
    """The best continuations of beams, best first, as many as each asks for.

    As in transformers' beam search, it is the logarithms that are shaped, not the logits, and they are not normalised
    again.

    Args:
        logits: [R, V].
        rows: [Q]: of every beam, the row of `logits` that it goes on from.
        draws: [Q].

    Raises:
        FloatingPointError: a row holds NaN, or infinity as its highest value.
    """
    if not draws:
        return []
    scores = logits[torch.tensor(rows, device=logits.device)].float().log_softmax(-1)
    shape(scores, draws)
    best = scores.topk(max(draw.continuations for draw in draws), dim=-1)
    found: list[tuple[Continuation, ...]] = []
    for row, draw, ids, values in zip(rows, draws, best.indices.tolist(), best.values.tolist(), strict=True):
        if not isfinite(values[0]):
            raise FloatingPointError(f"the logits for position {draw.position} (row {row}) are not finite")
        wanted = draw.continuations
        found.append(tuple(map(Continuation, ids[:wanted], values[:wanted])))
    return found
