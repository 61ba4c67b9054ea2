"""Paged attention on a CPU without a compiler: torch's fused attention on gathered blocks, sequence by sequence.

It takes several times as long as the native code for a decode, about as long for a chunk. torch's own `enable_gqa` is
left alone: on a CPU it is four times slower than repeating the KV heads.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.kernels.arguments import check_arguments


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`worker.kernels.Attend`, one gather and one fused attention a sequence.

    q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B]; query_starts [B + 1] -> [T, Hq, D].
    """
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts)
    _, kv_heads, block_size, _ = k_pool.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    starts = query_starts.tolist()
    heads = torch.arange(kv_heads)[:, None]
    for b, length in enumerate(lengths.tolist()):
        blocks = tables[b, : -(-length // block_size)].long()
        keys, values = (pool[blocks, heads].flatten(1, 2)[:, :length].to(q.dtype) for pool in (k_pool, v_pool))
        queries = slice(starts[b], starts[b + 1])
        out[queries] = _attend_one(q[queries], keys, values, scale)
    return out


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend one sequence: q [T, Hq, D]; keys, values [Hkv, length, D] -> [T, Hq, D]."""
    tokens, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    if tokens == 1:  # the heads of a group become queries of their KV head: nothing is repeated, nothing is masked
        rows = q.reshape(1, kv_heads, group, head_dim)
        attended = scaled_dot_product_attention(rows, keys[None], values[None], scale=scale)
        return attended.reshape(1, heads, head_dim)
    rows, keys, values = q.transpose(0, 1), *(x.repeat_interleave(group, dim=0) for x in (keys, values))
    visible = None if tokens == length else torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    attended = scaled_dot_product_attention(
        rows[None], keys[None], values[None], visible, is_causal=visible is None, scale=scale
    )
    return attended[0].transpose(0, 1)
