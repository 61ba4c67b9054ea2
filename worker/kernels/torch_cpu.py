"""Paged attention on a CPU without a compiler: torch's fused attention on gathered blocks, sequence by sequence.

It takes several times as long as the native code for a decode, about as long for a chunk. torch's own `enable_gqa` is
left alone: on a CPU it is four times slower than repeating the KV heads. The fused attention knows neither a soft cap
nor sinks: with those the scores are written out, a sequence at a time.
"""

from typing import Unpack

import torch
from torch.nn.functional import scaled_dot_product_attention

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
    """`worker.kernels.Attend`, one gather and one fused attention a sequence.

    q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B]; query_starts [B + 1] -> [T, Hq, D].
    """
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
    window = options.get("window")
    fused = options.get("soft_cap") is None and options.get("sinks") is None
    attend_one = _attend_fused if fused else _attend_written_out
    out = torch.empty(q.shape, dtype=q.dtype)
    starts = query_starts.tolist()
    for b, length in enumerate(lengths.tolist()):
        queries = slice(starts[b], starts[b + 1])
        tokens = starts[b + 1] - starts[b]
        first = 0 if window is None else max(0, length - tokens + 1 - window)
        keys = _gather(k_pool, tables[b], first, length, options.get("k_scale")).to(q.dtype)
        values = _gather(v_pool, tables[b], first, length, options.get("v_scale")).to(q.dtype)
        out[queries] = attend_one(q[queries], keys, values, scale, options)
    return out


def _gather(
    pool: torch.Tensor, table: torch.Tensor, first: int, length: int, head_scale: torch.Tensor | None
) -> torch.Tensor:
    """Positions [first, length) of one sequence: pool [N, Hkv, S, D], table [M], head_scale [Hkv] -> [Hkv, n, D]."""
    _, kv_heads, block_size, _ = pool.shape
    begin = first // block_size
    blocks = table[begin : -(-length // block_size)].long()
    stored = pool[blocks, torch.arange(kv_heads)[:, None]].flatten(1, 2)
    stored = stored[:, first - begin * block_size : length - begin * block_size]
    return stored if head_scale is None else stored.float() * head_scale[:, None, None]


def _visible(tokens: int, length: int, window: int | None) -> torch.Tensor:
    """Which of the last `length` positions each of the last `tokens` sees: bool [T, length]."""
    visible = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    return visible if window is None else visible.triu(length - tokens - window + 1)


def _attend_fused(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, options: Options
) -> torch.Tensor:
    """Attend one sequence: q [T, Hq, D]; keys, values [Hkv, n, D], from the first visible one -> [T, Hq, D]."""
    tokens, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    if tokens == 1:  # the heads of a group become queries of their KV head: nothing is repeated, nothing is masked
        rows = q.reshape(1, kv_heads, group, head_dim)
        attended = scaled_dot_product_attention(rows, keys[None], values[None], scale=scale)
        return attended.reshape(1, heads, head_dim)
    rows, keys, values = q.transpose(0, 1), *(x.repeat_interleave(group, dim=0) for x in (keys, values))
    window = options.get("window")
    plain = tokens == length and window is None
    visible = None if plain else _visible(tokens, length, window)
    attended = scaled_dot_product_attention(rows[None], keys[None], values[None], visible, is_causal=plain, scale=scale)
    return attended[0].transpose(0, 1)


def _attend_written_out(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, options: Options
) -> torch.Tensor:
    """`_attend_fused` with all options, its scores in memory and in float32."""
    tokens, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    rows = q.float().reshape(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = rows @ keys.float()[:, None].mT * scale  # [Hkv, Hq / Hkv, T, n]
    if (soft_cap := options.get("soft_cap")) is not None:
        scores = (scores / soft_cap).tanh_() * soft_cap
    scores = scores.masked_fill_(~_visible(tokens, length, options.get("window")), -torch.inf)
    if (sinks := options.get("sinks")) is not None:  # one more score a row, whose value is zero
        scores = torch.cat([scores, sinks.reshape(kv_heads, -1, 1, 1).expand(-1, -1, tokens, 1)], dim=3)
    attended = scores.softmax(dim=3)[..., :length] @ values.float()[:, None]
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim).to(q.dtype)
