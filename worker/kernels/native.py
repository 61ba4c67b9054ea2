"""The CPU backend: native/paged_attention.cpp, compiled at first use and called through ctypes.

It reads K and V where they lie and asks for the next block while it computes, which makes it faster than torch on
contiguous tensors.
"""

import ctypes
import struct
from functools import cache
from typing import Unpack

import torch

from worker.kernels import native_build
from worker.kernels.arguments import Option, Options, check_arguments, check_tensors
from worker.kernels.native_build import Level, NativeUnavailable

SOURCE = native_build.SOURCES / "paged_attention.cpp"
DTYPES = (torch.float32, torch.bfloat16)
POOL_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
"""In the order of call.h's `Type`."""
MAX_HEAD_DIM = 256

POOL_TYPES = {dtype: number for number, dtype in enumerate(POOL_DTYPES)}
_UNSOUND_BATCH, _OUT_OF_MEMORY = 1, 2


_ARGUMENTS = struct.Struct("@7P9q12i2f4P")
"""`OctavoAttention` of the C++ file: addresses, strides, sizes, factors, addresses. A ctypes.Structure would take ten
times as long to fill, as long as a small call computes."""


def supports(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, options: frozenset[Option] = frozenset()
) -> str | None:
    """None, or why the native code does not take such a call. Any block size, any group and all options will do."""
    for name, given, taken in (("queries", dtype, DTYPES), ("a pool", kv_dtype, POOL_DTYPES)):
        if given not in taken:
            return f"{name} of {given}; it takes {', '.join(map(str, taken))}"
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"heads of {head_dim} elements; it takes multiples of 16 up to {MAX_HEAD_DIM}"
    return None


def load(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, options: frozenset[Option] = frozenset()
) -> "NativeAttention":
    """The native attention, compiled now if it never was on this machine.

    Raises:
        NativeUnavailable: it does not take such calls, or cannot be built here.
    """
    if (reason := supports(dtype, kv_dtype, head_dim, options)) is not None:
        raise NativeUnavailable(reason)
    return load_level(native_build.usable_levels()[0])


@cache
def load_level(level: Level) -> "NativeAttention":
    """The native attention with the instructions of a level that this CPU has; see `native_build.usable_levels`."""
    return NativeAttention(native_build.load(SOURCE, level))


class NativeAttention:
    """`worker.kernels.Attend` on float32 and bfloat16 queries, and pools of those or of 8 bits, in a CPU's memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.octavo_paged_attention
        self._attend.argtypes = [ctypes.c_char_p]
        self._attend.restype = ctypes.c_int
        self._parallel = native_build.openmp_parallel()

    def __call__(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """Attend: q [T, Hq, D]; k_pool, v_pool [N, Hkv, S, D]; tables [B, M] -> [T, Hq, D]. See `Attend`."""
        check_tensors(q, k_pool, v_pool, tables, lengths, query_starts, **options)
        tokens, heads, dim = q.shape
        num_blocks, kv_heads, block_size, _ = k_pool.shape
        _check_support(q, k_pool.dtype, dim)
        out = torch.empty((tokens, heads, dim), dtype=q.dtype)
        arguments = _ARGUMENTS.pack(
            q.data_ptr(),
            k_pool.data_ptr(),
            v_pool.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            query_starts.data_ptr(),
            out.data_ptr(),
            *q.stride()[:2],
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            tables.stride(0),
            tokens,
            *tables.shape,
            heads,
            kv_heads,
            dim,
            block_size,
            num_blocks,
            q.dtype is torch.bfloat16,
            POOL_TYPES[k_pool.dtype],
            options.get("window") or 0,
            torch.get_num_threads(),
            scale,
            options.get("soft_cap") or 0.0,
            address(options.get("sinks")),
            address(options.get("k_scale")),
            address(options.get("v_scale")),
            self._parallel,
        )
        outcome = self._attend(arguments)
        if outcome == _OUT_OF_MEMORY:
            raise MemoryError("no memory for the partial results of an attention call")
        if outcome == _UNSOUND_BATCH:
            check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
            raise AssertionError("the native code refuses a batch that check_batch accepts")
        return out


def address(tensor: torch.Tensor | None) -> int:
    """Where its first element lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def _check_support(q: torch.Tensor, kv_dtype: torch.dtype, head_dim: int) -> None:
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device}, the native code wants the CPU")
    if (reason := supports(q.dtype, kv_dtype, head_dim)) is not None:
        raise ValueError(f"the native code got {reason}")
