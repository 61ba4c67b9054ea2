"""The CPU backend: native/paged_attention.cpp, compiled at first use and called through ctypes.

It reads K and V where they lie and prefetches the next block, which makes it faster than torch on contiguous tensors.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Unpack

import torch

from worker.kernels import native_build
from worker.kernels.arguments import Option, Options, check_arguments, check_tensors, options_of
from worker.kernels.native_build import NativeUnavailable

SOURCE = Path(__file__).parent / "native" / "paged_attention.cpp"
DTYPES = (torch.float32, torch.bfloat16)
OPTIONS: frozenset[Option] = frozenset()
"""What it does beside plain causal attention."""
MAX_HEAD_DIM = 256

_UNSOUND_BATCH, _OUT_OF_MEMORY = 1, 2


class _Arguments(ctypes.Structure):
    """`OctavoAttention` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_pool", "v_pool", "tables", "lengths", "query_starts", "out")),
        ("q_strides", ctypes.c_int64 * 2),
        ("k_strides", ctypes.c_int64 * 3),
        ("v_strides", ctypes.c_int64 * 3),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("tokens", "sequences", "table_width", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "num_blocks", "q_is_bfloat16", "kv_is_bfloat16")),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("parallel", ctypes.c_void_p),
    )


def supports(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, options: frozenset[Option] = frozenset()
) -> str | None:
    """None, or why the native code does not take such a call. Any block size and any group will do."""
    for name, given in (("queries", dtype), ("a pool", kv_dtype)):
        if given not in DTYPES:
            return f"{name} of {given}; it takes {DTYPES[0]} and {DTYPES[1]}"
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"heads of {head_dim} elements; it takes multiples of 16 up to {MAX_HEAD_DIM}"
    if lacking := sorted(options - OPTIONS):
        return f"{', '.join(lacking)}; it does without"
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
    return _load()


@cache
def _load() -> "NativeAttention":
    return NativeAttention(native_build.load(SOURCE))


class NativeAttention:
    """`worker.kernels.Attend` on float32 and bfloat16 CPU tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.octavo_paged_attention
        self._attend.argtypes = [ctypes.POINTER(_Arguments)]
        self._attend.restype = ctypes.c_int
        self._parallel = _torch_threads()

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
        _check_support(q, k_pool, options_of(options))
        out = torch.empty(q.shape, dtype=q.dtype)
        arguments = _Arguments(
            q=q.data_ptr(),
            k_pool=k_pool.data_ptr(),
            v_pool=v_pool.data_ptr(),
            tables=tables.data_ptr(),
            lengths=lengths.data_ptr(),
            query_starts=query_starts.data_ptr(),
            out=out.data_ptr(),
            q_strides=q.stride()[:-1],
            k_strides=k_pool.stride()[:-1],
            v_strides=v_pool.stride()[:-1],
            table_stride=tables.stride(0),
            tokens=q.shape[0],
            sequences=tables.shape[0],
            table_width=tables.shape[1],
            heads=q.shape[1],
            kv_heads=k_pool.shape[1],
            dim=q.shape[2],
            block_size=k_pool.shape[2],
            num_blocks=k_pool.shape[0],
            q_is_bfloat16=q.dtype is torch.bfloat16,
            kv_is_bfloat16=k_pool.dtype is torch.bfloat16,
            threads=torch.get_num_threads(),
            scale=scale,
            parallel=self._parallel,
        )
        outcome = self._attend(ctypes.byref(arguments))
        if outcome == _OUT_OF_MEMORY:
            raise MemoryError("no memory for the partial results of an attention call")
        if outcome == _UNSOUND_BATCH:
            check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
            raise AssertionError("the native code refuses a batch that check_batch accepts")
        return out


def _check_support(q: torch.Tensor, k_pool: torch.Tensor, options: frozenset[Option]) -> None:
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device}, the native code wants the CPU")
    if (reason := supports(q.dtype, k_pool.dtype, q.shape[2], options)) is not None:
        raise ValueError(f"the native code got {reason}")


def _torch_threads() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch runs on: its threads do our work too, so no pool fights another.

    None where torch runs on something else; the native code then stays on the calling thread.
    """
    start = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return start and ctypes.cast(start, ctypes.c_void_p).value
