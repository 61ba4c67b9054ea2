"""Paged decode in Triton: one program for each sequence and query head, one block of keys and values at a time.

This module imports Triton: it is imported where a CUDA device is, or by tests that run the kernel in the interpreter.
Chunks of several queries go through the plain torch reference.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl

from worker.kernels import reference
from worker.kernels.arguments import FP8_DTYPES, Options, check_arguments, options_of


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    S: tl.constexpr,
    S_PADDED: tl.constexpr,
):
    """One query head of one sequence: a softmax that is corrected as larger scores come.

    Grid (B, Hq). Offsets into the pools are 64-bit: a pool may hold more than 2^31 elements. K *and* V loads are
    masked, since an unwritten slot may hold NaN and 0 * NaN is NaN. Arithmetic is float32 whatever is stored.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head = head // GROUP
    element, offset = tl.arange(0, D_PADDED), tl.arange(0, S_PADDED)
    in_head = element < D
    q = tl.load(q_ptr + sequence * q_token_stride + head * q_head_stride + element, mask=in_head, other=0.0)
    q = q.to(tl.float32) * scale
    length = tl.load(lengths_ptr + sequence)
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    out = tl.zeros((D_PADDED,), tl.float32)
    for i in range(tl.cdiv(length, S)):
        block = tl.load(tables_ptr + sequence * table_stride + i).to(tl.int64)
        written = (offset < S) & (i * S + offset < length)
        mask = written[:, None] & in_head[None, :]
        k_at = block * k_block_stride + kv_head * k_head_stride + offset[:, None] * k_slot_stride + element[None, :]
        v_at = block * v_block_stride + kv_head * v_head_stride + offset[:, None] * v_slot_stride + element[None, :]
        k = tl.load(k_ptr + k_at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(written, tl.sum(k * q[None, :], axis=1), -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=0))
        fade = tl.exp(peak - new_peak)
        weights = tl.exp(scores - new_peak)
        total = total * fade + tl.sum(weights, axis=0)
        out = out * fade + tl.sum(weights[:, None] * v, axis=0)
        peak = new_peak
    at = (sequence * tl.num_programs(1) + head) * D + element
    tl.store(out_ptr + at, (out / total).to(out_ptr.dtype.element_ty), mask=in_head)


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend one query a sequence: q [B, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B].

    Returns [B, Hq, D] in q's dtype. The arguments were checked.
    """
    sequences, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_pool.shape
    out = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=q.device)
    sizes = {
        "GROUP": heads // kv_heads,
        "D": head_dim,
        "D_PADDED": triton.next_power_of_2(head_dim),
        "S": block_size,
        "S_PADDED": triton.next_power_of_2(block_size),
    }
    _decode_kernel[(sequences, heads)](
        q,
        k_pool,
        v_pool,
        tables,
        lengths,
        out,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        k_pool.stride(2),
        v_pool.stride(0),
        v_pool.stride(1),
        v_pool.stride(2),
        tables.stride(0),
        scale,
        **sizes,  # pyright: ignore[reportArgumentType] - Triton makes constants of plain integers
    )
    return out


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
    """`worker.kernels.Attend`: decodes through the kernel, chunks of several queries through the reference.

    q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B]; query_starts [B + 1] -> [T, Hq, D].
    """
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
    if options_of(options) or k_pool.dtype in FP8_DTYPES:
        return reference.attend(q, k_pool, v_pool, tables, lengths, query_starts, scale, **options)
    if q.shape[0] == tables.shape[0]:  # every sequence has a query, so each has one: nothing is read back
        return decode(q, k_pool, v_pool, tables, lengths, scale)
    counts = query_starts.diff()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences, rows = _rows_of(counts == 1, counts)
    if len(sequences):
        out[rows] = decode(q[rows], k_pool, v_pool, tables[sequences], lengths[sequences], scale)
    sequences, rows = _rows_of(counts > 1, counts)
    starts = torch.nn.functional.pad(counts[sequences].cumsum(0), (1, 0)).int()
    out[rows] = reference.attend(q[rows], k_pool, v_pool, tables[sequences], lengths[sequences], starts, scale)
    return out


def _rows_of(chosen: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the chosen sequences, and of their rows of q; chosen bool [B], counts [B]."""
    rows = chosen.repeat_interleave(counts).nonzero()[:, 0]
    return chosen.nonzero()[:, 0], rows
