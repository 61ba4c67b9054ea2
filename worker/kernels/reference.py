"""The meaning of paged attention in plain torch; every other implementation is compared with this one."""

import torch

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
    """`worker.kernels.Attend`, sequence by sequence, computed in float32.

    q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B]; query_starts [B + 1] -> [T, Hq, D].
    """
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    for b, length in enumerate(lengths.tolist()):
        keys, values = (gather(pool, tables[b], length).float() for pool in (k_pool, v_pool))
        queries = slice(starts[b], starts[b + 1])
        out[queries] = _attend_one(q[queries].float(), keys, values, scale)
    return out


def gather(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` positions of one sequence, in order; no other slot is read.

    pool [N, Hkv, S, D], table [M] -> [length, Hkv, D].
    """
    position = torch.arange(length, device=pool.device)
    block_size = pool.shape[2]
    return pool[table.long()[position // block_size], :, position % block_size]


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend one sequence: q [T, Hq, D]; keys, values [length, Hkv, D] -> [T, Hq, D]."""
    tokens, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,nhd->htn", q, keys) * scale
    position = torch.arange(length, device=q.device)
    own_position = position[length - tokens :]
    scores = scores.masked_fill(position > own_position[:, None], -torch.inf)
    return torch.einsum("htn,nhd->thd", scores.softmax(dim=-1), values)
