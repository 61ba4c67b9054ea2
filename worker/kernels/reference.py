"""The meaning of paged attention in plain torch; every other implementation is compared with this one."""

from typing import Unpack

import torch

from worker.kernels.arguments import Options, check_arguments


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    **options: Unpack[Options],
) -> torch.Tensor:
    """`worker.kernels.Attend`, sequence by sequence, computed in float32.

    q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B]; query_starts [B + 1] -> [T, Hq, D].
    """
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    for b, length in enumerate(lengths.tolist()):
        queries = slice(starts[b], starts[b + 1])
        window = options.get("window") or length
        first = max(0, length - (starts[b + 1] - starts[b]) + 1 - window)
        keys = gather(k_pool, tables[b], first, length, options.get("k_scale"))
        values = gather(v_pool, tables[b], first, length, options.get("v_scale"))
        out[queries] = _attend_one(q[queries].float(), keys, values, scale, options)
    return out


def gather(
    pool: torch.Tensor, table: torch.Tensor, first: int, length: int, head_scale: torch.Tensor | None
) -> torch.Tensor:
    """Positions [first, length) of one sequence, in order, as they are meant; no other slot is read.

    pool [N, Hkv, S, D], table [M], head_scale [Hkv] -> float32 [length - first, Hkv, D].
    """
    position = torch.arange(first, length, device=pool.device)
    block_size = pool.shape[2]
    stored = pool[table.long()[position // block_size], :, position % block_size].float()
    return stored if head_scale is None else stored * head_scale[:, None]


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, options: Options
) -> torch.Tensor:
    """Attend one sequence: q [T, Hq, D]; keys, values [n, Hkv, D], from the first visible one -> [T, Hq, D]."""
    tokens, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,nhd->htn", q, keys) * scale
    if (soft_cap := options.get("soft_cap")) is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length, device=q.device)
    own_position = position[length - tokens :, None]
    hidden = position > own_position
    if (window := options.get("window")) is not None:
        hidden |= position <= own_position - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if (sinks := options.get("sinks")) is not None:  # one more score a row, whose value is zero
        scores = torch.cat([scores, sinks[:, None, None].expand(heads, tokens, 1)], dim=2)
    weights = scores.softmax(dim=2)[:, :, :length]
    return torch.einsum("htn,nhd->thd", weights, values)
