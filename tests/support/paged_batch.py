"""Builds a step's attention arguments over a hostile pool, and what they must come to.

Hostile: blocks lie scrambled; every slot that no position owns holds NaN in K and in V, block 0 among them, where a
masked entry of a table leads; and table entries that no position needs point outside the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from worker.kernels import Options

NOWHERE = 2**31 - 1

ROUNDING_LOSS = {torch.float8_e4m3fn: 6e-2, torch.float8_e5m2: 12e-2}
"""What a result may lose, |out - exact| / |exact|, where keys and values are normal numbers, written in float8.

A number of m bits of fraction is off by at most u = 2^-(m + 1) of itself, evenly, so by u / sqrt(3) on the average of
squares or less. Values pass that on as it is, as all of a sum are weighted alike; keys shift scores of about one by as
much, and so the weights. The two are independent: sqrt(2 / 3) u together, which is 5.1 % for e4m3 (m = 3) and twice
that, 10.2 %, for e5m2 (m = 2), and no arithmetic could get it back. Short sequences scatter around it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Arguments of `worker.kernels.Attend`, with the answer in float64."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor
    scale: float
    options: Options
    expected: torch.Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("q", "k_pool", "v_pool", "tables", "lengths", "query_starts", "scale")
        return {name: getattr(self, name) for name in names} | dict(self.options)

    @property
    def spans(self) -> list[slice]:
        """Each sequence's rows of q."""
        return [slice(start, end) for start, end in pairwise(self.query_starts.tolist())]

    def alone(self, b: int) -> "PagedBatch":
        """Sequence b without its company, on the same pool."""
        span = self.spans[b]
        return replace(
            self,
            q=self.q[span],
            tables=self.tables[b : b + 1],
            lengths=self.lengths[b : b + 1],
            query_starts=torch.tensor([0, span.stop - span.start], dtype=torch.int32, device=self.q.device),
            expected=self.expected[span],
        )

    def to(self, device: torch.device) -> "PagedBatch":
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in self.arguments.items()}
        options = {name: moved.pop(name) for name in self.options}
        return replace(self, **moved, options=options)

    def worst_error(self, out: torch.Tensor) -> float:
        """The largest relative error of any sequence: |out - expected| / |expected|. NaN if there is one in `out`."""
        difference = out.cpu().double() - self.expected
        errors = [difference[span].norm() / self.expected[span].norm() for span in self.spans]
        return torch.stack(errors).max().item()


def make_batch(
    spans: Sequence[tuple[int, int]],
    *,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    scales: bool = False,
    shared_blocks: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """A batch of sequences given as (history, new tokens); what is expected comes from what the pool holds.

    Sequences whose history is long enough begin with the same `shared_blocks` blocks.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = [history + new for history, new in spans]
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + shared_blocks + 3
    k_pool, v_pool = (
        torch.full((num_blocks, kv_heads, block_size, head_dim), torch.nan, dtype=kv_dtype or dtype) for _ in range(2)
    )
    tables = torch.full((len(spans), max(blocks) + 2), NOWHERE, dtype=torch.int32)
    free = (1 + torch.randperm(num_blocks - 1, generator=random)).tolist()
    scale = head_dim**-0.5
    options = Options(window=window, soft_cap=soft_cap)
    if sinks:
        options["sinks"] = torch.randn(heads, generator=random)
    if scales:
        options["k_scale"], options["v_scale"] = (torch.rand(kv_heads, generator=random) + 0.5 for _ in range(2))
    shared = [free.pop() for _ in range(shared_blocks)]
    prefixes = [
        torch.randn(shared_blocks * block_size, kv_heads, head_dim, generator=random).to(k_pool.dtype) for _ in range(2)
    ]
    queries, expected = [], []
    for b, (history, new) in enumerate(spans):
        tables[b, : blocks[b]] = torch.tensor([free.pop() for _ in range(blocks[b])])
        q = torch.randn(new, heads, head_dim, generator=random).to(dtype)
        k, v = (torch.randn(history + new, kv_heads, head_dim, generator=random).to(k_pool.dtype) for _ in range(2))
        if history >= shared_blocks * block_size:
            tables[b, :shared_blocks] = torch.tensor(shared)
            k[: len(prefixes[0])], v[: len(prefixes[1])] = prefixes
        position = torch.arange(history + new)
        block, offset = tables[b, position // block_size].long(), position % block_size
        k_pool[block, :, offset], v_pool[block, :, offset] = k, v
        queries.append(q)
        expected.append(_attend_densely(q.double(), k.double(), v.double(), scale, options))
    return PagedBatch(
        q=torch.cat(queries),
        k_pool=k_pool,
        v_pool=v_pool,
        tables=tables,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.tensor([0, *(new for _, new in spans)]).cumsum(0).int(),
        scale=scale,
        options=options,
        expected=torch.cat(expected),
    )


def _attend_densely(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, options: Options) -> torch.Tensor:
    """One head at a time, in the dtype given: q [T, Hq, D]; k, v [n, Hkv, D] -> [T, Hq, D]."""
    tokens, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    k = k * _factor(options.get("k_scale"), k)
    v = v * _factor(options.get("v_scale"), v)
    cap, sinks = options.get("soft_cap"), options.get("sinks")
    behind = torch.arange(length - tokens, length)[:, None] - torch.arange(length)  # how far, seen from each query
    hidden = (behind < 0) | (behind >= (options.get("window") or length))
    out = torch.empty_like(q)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, kv_head].T * scale
        scores = scores if cap is None else cap * (scores / cap).tanh()
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(dim=1) + (0 if sinks is None else sinks[head].double().exp())
        out[:, head] = weights @ v[:, kv_head] / total[:, None]
    return out


def _factor(head_scale: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, dtype=like.dtype) if head_scale is None else head_scale.to(like.dtype)[:, None]
