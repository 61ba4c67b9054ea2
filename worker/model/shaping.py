"""What a request does to its logits before anything is drawn from them: biases, penalties, tokens that may not come.

In this order, which is that of transformers' processors where it has them:

    bias        + b of the token                                                    SequenceBiasLogitsProcessor
    repetition  / r where positive, * r where not, for tokens of prompt and output  RepetitionPenaltyLogitsProcessor
    presence    - p for tokens of the output                                        (OpenAI's API defines
    frequency   - f * count of the token in the output                               these two)
    forbidden   -inf                                                                MinNewTokensLengthLogitsProcessor

Each kind is one or two operations on the device, for all rows that ask for it together; who asks for nothing pays for
nothing. Counts are whole numbers in float32, so a row's result does not depend on its company.

Shapes: Q rows, V entries of the vocabulary, P rows with a penalty, N tokens that one is about.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from worker.core.step import Draw


def shape(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Change the float32 `logits` [Q, V] in place as their `draws` [Q] ask."""
    biased = [row for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    if biased:
        pairs = [draws[row].sampling.logit_bias for row in biased]
        at = _places(logits, biased, [[token for token, _ in own] for own in pairs])
        values = torch.tensor([bias for own in pairs for _, bias in own], device=logits.device)
        logits.index_put_(at, values, accumulate=True)
    repeating = [row for row, draw in enumerate(draws) if draw.sampling.repetition_penalty != 1]
    if repeating:
        _penalise_repetition(logits, repeating, draws)
    counting = [row for row, draw in enumerate(draws) if draw.sampling.counts_output]
    if counting:
        _penalise_output(logits, counting, draws)
    held_back = [row for row, draw in enumerate(draws) if draw.forbidden]
    if held_back:
        at = _places(logits, held_back, [draws[row].forbidden for row in held_back])
        logits[at] = -torch.inf


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    known = [draws[row].history for row in rows]
    at = _places(logits, rows, known)
    penalties = np.repeat([draws[row].sampling.repetition_penalty for row in rows], [len(own) for own in known])
    penalty = torch.from_numpy(penalties.astype(np.float32)).to(logits.device)
    now = logits[at]
    logits[at] = torch.where(now < 0, now * penalty, now / penalty)  # a token that comes twice: the same value twice


def _penalise_output(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    outputs = [draws[row].history[draws[row].output_begins :] for row in rows]
    counts = torch.zeros(len(rows), logits.shape[-1], device=logits.device)
    at = _places(logits, range(len(rows)), outputs)
    counts.index_put_(at, torch.ones_like(at[0], dtype=counts.dtype), accumulate=True)
    knobs = [draws[row].sampling for row in rows]
    table = torch.tensor([(own.presence_penalty, own.frequency_penalty) for own in knobs]).to(logits.device)
    presence, frequency = table.split(1, dim=-1)
    logits[torch.tensor(rows, device=logits.device)] -= presence * (counts > 0) + frequency * counts


def _places(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of every token in its row: rows int64 [N], columns int64 [N]."""
    counts = [len(own) for own in tokens]
    columns = np.fromiter(chain.from_iterable(tokens), np.int64, sum(counts))
    places = torch.from_numpy(np.stack((np.repeat(np.asarray(rows, np.int64), counts), columns))).to(logits.device)
    return places[0], places[1]
