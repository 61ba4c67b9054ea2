"""Draw the next tokens of a batch from its logits.

The logits are first shaped as the request asks (shaping.py). Greedy takes the highest, of equals the lowest id, as
transformers does. Otherwise the vocabulary is ranked by falling logit (of equals the lowest id first), divided by the
temperature, cut to its first `top_k`, cut again to the fewest leading tokens that hold `top_p` of the probability left,
again to those with at least `min_p` of the first one's probability, and one number in (0, 1) picks by inverse
transform: the first rank at which the running sum of probability reaches that share of the whole. The order of the
cuts is transformers'.

That number is a counter's, not a generator's: blake2b of (seed, sample, position), so a token depends on no other draw,
batch, worker or restart. (Counters in place of state: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011; a hash that the standard library has serves as well as theirs at a microsecond a draw.)

Shapes: R rows of logits, V entries of the vocabulary, Q draws, K candidates.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch

from worker.core.step import Draw
from worker.model.shaping import shape

_CANDIDATES = 256
"""Ranks that a first look keeps on a CPU, where sorting a whole vocabulary takes 3 ms a row and this 0.1."""
_COLDEST = 1e-30
"""Any temperature below gives the same token: float32 has no room for a difference."""


def sample(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """The token of every draw, in their order. One device-to-host copy, and one more in the rare case.

    Args:
        logits: [R, V].
        rows: of every draw, the row of `logits` that it is from.
        draws: [Q].

    Raises:
        FloatingPointError: a row that is drawn from holds NaN, or infinity as its highest value.
    """
    assert len(rows) == len(draws), (len(rows), len(draws))
    if not draws:
        return []
    picked = logits[torch.tensor(rows, device=logits.device)].float()
    if any(draw.shaped for draw in draws):
        shape(picked, draws)
    best = picked.argmax(-1)  # of a row with NaN: where the NaN is
    peak = picked.gather(-1, best[:, None])
    warm = [at for at, draw in enumerate(draws) if draw.sampling.temperature > 0]
    tokens = best
    if warm:
        at = torch.tensor(warm, device=logits.device)
        tokens = best.index_copy(0, at, _draw(picked[at], peak[at], [draws[i] for i in warm]))
    host = torch.stack((tokens, peak[:, 0].isfinite().long())).tolist()
    if not all(host[1]):
        bad = host[1].index(0)
        raise FloatingPointError(f"the logits for position {draws[bad].position} (row {rows[bad]}) are not finite")
    return host[0]


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in (0, 1), never an end of it, that only these three decide; 53 bits of blake2b, and a half."""
    counter = struct.pack("<QQQ", seed % 2**64, sample, position)
    bits = int.from_bytes(blake2b(counter, digest_size=8, person=b"octavo draw").digest(), "little") >> 12
    return (bits + 0.5) * 2.0**-52


class _Ranked(NamedTuple):
    """The head of a ranking: K candidates of every draw."""

    ids: torch.Tensor
    """int64 [Q, K]."""
    weights: torch.Tensor
    """float32 [Q, K]: probability relative to the first one's."""
    running: torch.Tensor
    """float64 [Q, K]: sum of weight up to and with each rank."""
    total: torch.Tensor
    """float64 [Q, 1]: weight of the whole vocabulary."""
    sure: torch.Tensor
    """int64 [Q, 1]: leading candidates whose rank is certain; behind them an equal may have been left out."""


class _Knobs(NamedTuple):
    """What the draws ask for, a column each: [Q, 1] in float64, `top_k` in int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    min_p: torch.Tensor | None
    """None where nobody asks for a cut by it."""

    def of(self, rows: torch.Tensor) -> "_Knobs":
        """Those of some draws."""
        return _Knobs(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


def _draw(logits: torch.Tensor, peak: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens int64 [Q], drawn from `logits` [Q, V] whose highest values are `peak` [Q, 1]."""
    knobs = _knobs(draws, logits)
    weights = ((logits - peak) / knobs.temperature.float()).exp()
    vocabulary = logits.shape[-1]
    # The look at a few candidates needs an answer from the device, and there a whole sort is cheap.
    count = vocabulary if logits.is_cuda else min(_CANDIDATES, vocabulary)
    tokens, known = _pick(_rank(logits, weights, count), knobs, vocabulary)
    if count < vocabulary and not bool(known.all()):
        rest = (~known).nonzero()[:, 0]
        tokens[rest] = _pick(_rank(logits[rest], weights[rest], vocabulary), knobs.of(rest), vocabulary)[0]
    return tokens


def _knobs(draws: Sequence[Draw], logits: torch.Tensor) -> _Knobs:
    vocabulary = logits.shape[-1]
    columns = [
        (
            max(draw.sampling.temperature, _COLDEST),
            min(draw.sampling.top_k or vocabulary, vocabulary),
            draw.sampling.top_p,
            uniform(draw.sampling.seed, draw.sample, draw.position),
            draw.sampling.min_p,
        )
        for draw in draws
    ]
    table = torch.tensor(columns, dtype=torch.float64).to(logits.device)
    temperature, top_k, top_p, uniforms, min_p = table.split(1, dim=-1)
    cut = any(draw.sampling.min_p > 0 for draw in draws)
    return _Knobs(temperature, top_k.long(), top_p, uniforms, min_p.float() if cut else None)


def _rank(logits: torch.Tensor, weights: torch.Tensor, count: int) -> _Ranked:
    """The first `count` ranks of every row."""
    vocabulary = logits.shape[-1]
    if count == vocabulary:
        ids = logits.argsort(dim=-1, descending=True, stable=True)
        ranked = weights.gather(-1, ids)
        running = ranked.cumsum(-1, dtype=torch.float64)
        return _Ranked(ids, ranked, running, running[:, -1:], torch.full_like(ids[:, :1], count))
    ids = logits.topk(count, dim=-1).indices.sort(dim=-1).values  # by id, so that the stable sort leaves equals so
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    ranked = weights.gather(-1, ids)
    running = ranked.cumsum(-1, dtype=torch.float64)
    sure = (values > values[:, -1:]).sum(-1, keepdim=True)
    return _Ranked(ids, ranked, running, weights.sum(-1, keepdim=True, dtype=torch.float64), sure)


def _pick(ranked: _Ranked, knobs: _Knobs, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [Q], and bool [Q]: whether the candidates sufficed to know them."""
    count = ranked.ids.shape[-1]
    last_k = (knobs.top_k - 1).clamp(max=count - 1)
    cut_by_k = knobs.top_k <= ranked.sure
    mass = torch.where(cut_by_k, ranked.running.gather(-1, last_k), ranked.total)
    nucleus = torch.searchsorted(ranked.running, knobs.top_p * mass).clamp(max=count - 1)
    cut_by_p = knobs.top_p < 1
    kept = torch.where(cut_by_p, ranked.running.gather(-1, nucleus), mass)
    sure_of_k = cut_by_k | (knobs.top_k == vocabulary)
    sure = sure_of_k & (~cut_by_p | (nucleus < ranked.sure))
    if knobs.min_p is not None:
        likely = (ranked.weights >= knobs.min_p).sum(-1, keepdim=True).clamp(min=1)
        held = ranked.running.gather(-1, likely - 1)
        cut_by_min = held < kept
        kept = torch.where(cut_by_min, held, kept)
        # A cut that is surely the last need not know where the others would have been.
        sure = torch.where(cut_by_min, (likely <= ranked.sure) & (sure_of_k | ~cut_by_p), sure)
    rank = torch.searchsorted(ranked.running, knobs.uniform * kept)
    known = sure & (rank < ranked.sure)
    return ranked.ids.gather(-1, rank.clamp(max=count - 1))[:, 0], known[:, 0]
