"""`worker.kernels.Attend` in Triton: decodes and chunks of one batch, each through its own kernel, on one stream.

This module imports Triton: it is imported where a GPU is, or by tests that run the kernels in the interpreter.
"""

from typing import Unpack

import torch

from worker.kernels.arguments import FP8_DTYPES, Option, Options, check_arguments
from worker.kernels.launch import Call, current_target
from worker.kernels.paged_decode import Partial, decode, most_splits
from worker.kernels.paged_prefill import prefill
from worker.kernels.paged_shared import attend_shared

MAX_HEAD_DIM = 256


def supports(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, options: frozenset[Option]) -> str | None:
    """None, or why the kernels do not take such a call: all dtypes and options, block sizes and groups will do."""
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} elements; they take up to {MAX_HEAD_DIM}"
    if kv_dtype in FP8_DTYPES and head_dim % 2:
        return f"heads of {head_dim} elements of {kv_dtype}; they read two at a time"
    return None


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
    """`worker.kernels.Attend`: nothing is read back to the host, so a batch of decodes can be a CUDA graph.

    q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M]; lengths [B]; query_starts [B + 1] -> [T, Hq, D].
    """
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
    if (reason := supports(q.dtype, k_pool.dtype, q.shape[2], frozenset())) is not None:
        raise ValueError(f"the Triton kernels got {reason}")
    if k_pool.dtype in FP8_DTYPES:
        _check_pairs(k_pool=k_pool, v_pool=v_pool)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    call = Call(
        q=q,
        k_pool=k_pool,
        v_pool=v_pool,
        tables=tables,
        lengths=lengths,
        query_starts=query_starts,
        scale=scale,
        options=options,
        target=current_target(),
    )
    _decode(call, out)
    if q.shape[0] > tables.shape[0]:  # every sequence has a query, so one of them has several
        prefill(call, out)
    return out


def _check_pairs(**pools: torch.Tensor) -> None:
    """Refuse pools of float8 that are not made of pairs: two numbers are one word of what is loaded."""
    for name, pool in pools.items():
        for axis, stride in enumerate(pool.stride()[:3]):
            if stride % 2:
                raise ValueError(
                    f"{name} has stride {stride} on axis {axis}, wanted an even one: float8 is read in pairs"
                )
        if pool.storage_offset() % 2:
            raise ValueError(
                f"{name} begins at element {pool.storage_offset()}, wanted an even one: float8 is read in pairs"
            )


def _decode(call: Call, out: torch.Tensor) -> None:
    """The sequences of one new token; where the plan of the step says so, what they share is attended once."""
    shared, splits = call.options.get("shared"), most_splits(call.capacity)
    if shared is None or call.options.get("window") is not None:  # a window sees other parts of the shared blocks
        decode(call, out, Partial.empty(call, splits), None)
        return
    partial = Partial.empty(call, splits + most_splits(shared.most_positions))
    attend_shared(call, partial, shared)
    decode(call, out, partial, shared.positions)
