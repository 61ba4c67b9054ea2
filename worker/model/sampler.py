"""Draw the next tokens of a batch from its logits.

The logits are first shaped as the request asks (shaping.py). Greedy takes the highest, of equals the lowest id, as
transformers does. Otherwise every token gets a weight, its probability at the temperature relative to the likeliest
one's. The vocabulary is ranked by falling logit (of equals the lowest id first), cut to its first `top_k`, cut again to
the fewest leading tokens that hold `top_p` of the probability left, again to those with at least `min_p` of the first
one's probability: what is cut weighs nothing. The order of the cuts is transformers'.

A race decides among the rest: every runner takes an exponential time, and the highest weight over time wins, which each
does as often as its share of the weights says (Gumbel's maximum, in another form). It is run in two heats, as one among
a whole vocabulary takes a random number for each entry: first groups of 256 neighbours, by the sum of their weights;
then the members of the group that has won. The chances are the same, and 448 numbers serve 49,152 entries.

Why a race: logits differ by rounding between one batch and another. A running sum of probabilities, compared with one
random number, moves with every token that it passes, so among many unlikely tokens it nearly always stops at another.
A race falls otherwise only where two were about as fast (Maddison et al., "A* sampling", 2014): a request carried over,
and a draft model that guesses with the same numbers (ADR 26), draw the same much more often.

The numbers are a counter's, not a generator's: SHAKE-128 of (seed, sample, position), so a token depends on no other
draw, batch, worker or restart. (Counters in place of state: Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", 2011; a hash of the standard library that is as long as one likes serves as well, at ten microseconds a draw.)

Shapes: R rows of logits, V entries of the vocabulary, filled up to whole groups, Q draws, K candidates.
"""

import struct
from collections.abc import Sequence
from hashlib import shake_128
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from octavo.records.sampling import SamplingParams
from worker.core.step import Draw
from worker.model.shaping import shape

_CANDIDATES = 256
"""Ranks that a first look keeps on a CPU, where sorting a whole vocabulary takes 5 ms a row and this 0.4."""
_RUN = 16
"""Neighbours of which the highest tells whether to look for candidates among them."""
_COLDEST = 1e-30
"""Any temperature below gives the same token: float32 has no room for a difference."""
GROUP = 256
"""Neighbours that run as one in the first heat. Another number would give other tokens for the same seeds."""


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
    picked = _take(logits, rows).float()
    if any(draw.shaped for draw in draws):
        picked = picked.clone() if picked is logits else picked
        shape(picked, draws)
    if lacking := -picked.shape[-1] % GROUP:
        picked = pad(picked, (0, lacking), value=-torch.inf)
    highest = _groups(picked).amax(-1)  # of a group with NaN: NaN
    peak = highest.amax(-1, keepdim=True)
    tokens = _member(highest.argmax(-1), picked)
    warm = [at for at, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if warm:
        drawn = _draw(_take(picked, warm), _take(peak, warm), [draws[at] for at in warm])
        tokens = tokens.index_copy(0, torch.tensor(warm, device=logits.device), drawn)
    host = torch.stack((tokens, peak[:, 0].isfinite().long())).tolist()
    if not all(host[1]):
        bad = host[1].index(0)
        raise FloatingPointError(f"the logits for position {draws[bad].position} (row {rows[bad]}) are not finite")
    return host[0]


def _take(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of `values`; where that is all of them, `values` itself: a copy costs as much as a look at them."""
    return values if list(rows) == list(range(len(values))) else values[torch.tensor(rows, device=values.device)]


def uniforms(seed: int, sample: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1), never an end of it, that only these three decide: 52 bits of SHAKE-128 each, and a half.

    A larger count gives more of the same.
    """
    counter = struct.pack("<QQQ", seed % 2**64, sample, position)
    bits = np.frombuffer(shake_128(b"octavo draw" + counter).digest(8 * count), "<u8") >> 12
    return np.multiply(bits + 0.5, 2.0**-52, dtype=np.float64)


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


class _Cuts(NamedTuple):
    """Where draws ask for their ranking to end, a column each, [Q, 1]; V, 1 and 0 are no cut."""

    top_k: torch.Tensor
    """int64."""
    top_p: torch.Tensor
    """float64."""
    min_p: torch.Tensor
    """float32."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], width: int, device: torch.device) -> "_Cuts":
        """Those that the draws ask for, among `width` entries."""
        columns = [(min(one.top_k or width, width), one.top_p, one.min_p) for one in params]
        top_k, top_p, min_p = torch.tensor(columns, dtype=torch.float64).to(device).split(1, dim=-1)
        return cls(top_k.long(), top_p, min_p.float())

    def those(self, rows: torch.Tensor) -> "_Cuts":
        """Of some draws."""
        return _Cuts(*(column[rows] for column in self))


def _draw(logits: torch.Tensor, peak: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens int64 [Q], drawn from `logits` [Q, V] whose highest values are `peak` [Q, 1]."""
    device, width = logits.device, logits.shape[-1]
    temperature = torch.tensor([[max(draw.sampling.temperature, _COLDEST)] for draw in draws], device=device)
    weights = (logits - peak).div_(temperature).exp_()
    params = [draw.sampling for draw in draws]
    ranked = [at for at, one in enumerate(params) if 0 < one.top_k < width or one.top_p < 1]
    least = [[0.0 if at in ranked else one.min_p] for at, one in enumerate(params)]
    if any(one > 0 for (one,) in least):
        weights.masked_fill_(weights < torch.tensor(least, device=device), 0)
    if ranked:
        # Whether a few candidates suffice is an answer from the device, and there a whole sort is cheap.
        count = width if logits.is_cuda else min(_CANDIDATES, width)
        _cut(logits, weights, ranked, _Cuts.of([params[at] for at in ranked], width, device), count)
    return _race(weights, _times(draws, _groups(weights).shape[1]).to(device))


def _times(draws: Sequence[Draw], num_groups: int) -> torch.Tensor:
    """Exponential times float32 [Q, GROUP + groups]: of the members of any group, and of the groups."""
    count = GROUP + num_groups
    drawn = [uniforms(draw.sampling.seed, draw.sample, draw.position, count) for draw in draws]
    return torch.from_numpy(-np.log(np.stack(drawn)).astype(np.float32))


def _race(weights: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The winners int64 [Q] of two heats among `weights` [Q, V], which is of whole groups."""
    of_members, of_groups = times[:, :GROUP], times[:, GROUP:]
    return _member((_groups(weights).sum(-1) / of_groups).argmax(-1), weights, of_members)


def _member(group: torch.Tensor, values: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
    """Of one group of each row, the first entry that is the highest, over its time if there are any: int64 [Q]."""
    of_group = _groups(values)[torch.arange(len(group), device=group.device), group]
    return group * GROUP + (of_group if times is None else of_group / times).argmax(-1)


def _groups(values: torch.Tensor) -> torch.Tensor:
    """[Q, V] as [Q, groups, GROUP]."""
    return values.unflatten(-1, (-1, GROUP))


def _cut(logits: torch.Tensor, weights: torch.Tensor, rows: Sequence[int], cuts: _Cuts, count: int) -> None:
    """Set to zero, in some rows of the weights [Q, V], what their `cuts` leave out, by a first look at `count`."""
    ranked = _rank(_take(logits, rows), _take(weights, rows), count)
    kept, known = _kept(ranked, cuts, weights.shape[-1])
    left = ranked.weights * (torch.arange(count, device=kept.device) < kept)
    at, ids = torch.tensor(rows, device=kept.device), ranked.ids
    if count < weights.shape[-1]:
        if rest := (~known).nonzero()[:, 0].tolist():
            _cut(logits, weights, [rows[place] for place in rest], cuts.those(~known), weights.shape[-1])
        at, ids, left = at[known], ids[known], left[known]
    weights.index_fill_(0, at, 0)
    weights[at[:, None], ids] = left


def _rank(logits: torch.Tensor, weights: torch.Tensor, count: int) -> _Ranked:
    """The first `count` ranks of every row."""
    if count == logits.shape[-1]:
        ids = logits.argsort(dim=-1, descending=True, stable=True)
        sure = torch.full_like(ids[:, :1], count)
    else:
        ids = _leaders(logits, count).sort(dim=-1).values  # by id, so that the stable sort leaves equals so
        values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
        sure = (values > values[:, -1:]).sum(-1, keepdim=True)
    ranked = weights.gather(-1, ids)
    total = _groups(weights).sum(-1).sum(-1, keepdim=True, dtype=torch.float64)
    return _Ranked(ids, ranked, ranked.cumsum(-1, dtype=torch.float64), total, sure)


def _leaders(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` highest entries of every row, int64 [Q, count], in no order.

    They are in the `count` runs of neighbours whose highest entries are highest, so few others have to be looked at.
    """
    runs = logits.unflatten(-1, (-1, _RUN))
    if runs.shape[1] <= count:
        return logits.topk(count, dim=-1).indices
    best = runs.amax(-1).topk(count, dim=-1).indices
    found = runs.gather(1, best[..., None].expand(-1, -1, _RUN)).flatten(1).topk(count, dim=-1).indices
    return best.gather(1, found // _RUN) * _RUN + found % _RUN


def _kept(ranked: _Ranked, cuts: _Cuts, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many leading ranks of `width` stay, int64 [Q, 1], and bool [Q]: whether the candidates suffice to know it."""
    last = (cuts.top_k - 1).clamp(max=ranked.ids.shape[-1] - 1)
    mass = torch.where(cuts.top_k < width, ranked.running.gather(-1, last), ranked.total)
    knows_mass = (cuts.top_k <= ranked.sure) | (cuts.top_k == width)
    nucleus = torch.searchsorted(ranked.running, cuts.top_p * mass) + 1
    likely = (ranked.weights >= cuts.min_p).sum(-1, keepdim=True)
    kept = torch.minimum(cuts.top_k, likely)
    kept = torch.where(cuts.top_p < 1, torch.minimum(kept, nucleus), kept)
    known = (kept <= ranked.sure) & (knows_mass | (cuts.top_p == 1))
    return kept, known[:, 0]
