"""The small operations on a CPU: native/small_ops.cpp, compiled at first use and called through ctypes."""

import ctypes
import struct
from functools import cache

import torch

from worker.kernels import native_build
from worker.kernels.native import DTYPES, POOL_DTYPES, POOL_TYPES, address
from worker.kernels.native_build import Level, NativeUnavailable
from worker.kernels.small_ops_arguments import check_gated, check_norm, check_places, check_rope

SOURCE = native_build.SOURCES / "small_ops.cpp"

_NORM = struct.Struct("@4P4qP5if")
_ROPE = struct.Struct("@13P16q8i")
_GATED = struct.Struct("@3P2qP4i")
"""`Norm`, `Rope` and `Gated` of the C++ file."""


def supports(dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """None, or why the native code does not take activations and a pool of such dtypes. Any sizes will do."""
    for name, given, taken in (("activations", dtype, DTYPES), ("a pool", kv_dtype, POOL_DTYPES)):
        if given not in taken:
            return f"{name} of {given}; it takes {', '.join(map(str, taken))}"
    return None


def load(dtype: torch.dtype, kv_dtype: torch.dtype) -> "NativeSmallOps":
    """The native small operations, compiled now if they never were on this machine.

    Raises:
        NativeUnavailable: they do not take such calls, or cannot be built here.
    """
    if (reason := supports(dtype, kv_dtype)) is not None:
        raise NativeUnavailable(reason)
    return load_level(native_build.usable_levels()[0])


@cache
def load_level(level: Level) -> "NativeSmallOps":
    """Those with the instructions of a level that this CPU has; see `native_build.usable_levels`."""
    return NativeSmallOps(native_build.load(SOURCE, level))


class NativeSmallOps:
    """`SmallOps` of small_ops.py on float32 and bfloat16, and pools of those or of 8 bits, in a CPU's memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = library.octavo_rms_norm
        self._rope_write = library.octavo_rope_write
        self._silu_mul = library.octavo_silu_mul
        for function in (self._rms_norm, self._rope_write, self._silu_mul):
            function.argtypes = [ctypes.c_char_p]
        self._rms_norm.restype = self._silu_mul.restype = None
        self._rope_write.restype = ctypes.c_int
        self._parallel = native_build.openmp_parallel()

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `SmallOps`."""
        check_norm(x, weight, residual)
        _check_support("x", x, x.dtype)
        out = torch.empty(x.shape, dtype=x.dtype)
        heads = x.shape[1] if x.dim() == 3 else 1
        self._rms_norm(
            _NORM.pack(
                x.data_ptr(),
                address(residual),
                weight.data_ptr(),
                out.data_ptr(),
                *_row_strides(x),
                *((0, 0) if residual is None else _row_strides(residual)),
                self._parallel,
                x.shape[0],
                heads,
                x.shape[-1],
                x.dtype is torch.bfloat16,
                torch.get_num_threads(),
                eps,
            )
        )
        return out

    def rope_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `SmallOps`."""
        check_rope(q, k, v, cos, sin, positions, k_pool, v_pool, slots, k_scale, v_scale)
        _check_support("q", q, k_pool.dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        num_blocks, kv_heads, block_size, dim = k_pool.shape
        sizes = {"table_positions": cos.shape[0], "num_slots": num_blocks * block_size}
        tensors = (q, k, v, out, cos, sin, positions, slots, k_pool, v_pool)
        done = self._rope_write(
            _ROPE.pack(
                *(tensor.data_ptr() for tensor in tensors),
                address(k_scale),
                address(v_scale),
                self._parallel,
                *q.stride()[:2],
                *k.stride()[:2],
                *v.stride()[:2],
                *k_pool.stride()[:3],
                *v_pool.stride()[:3],
                cos.stride(0),
                sin.stride(0),
                *sizes.values(),
                *q.shape[:2],
                kv_heads,
                dim,
                block_size,
                q.dtype is torch.bfloat16,
                POOL_TYPES[k_pool.dtype],
                torch.get_num_threads(),
            )
        )
        if not done:
            check_places(positions, slots, **sizes)
            raise AssertionError("the native code refuses positions or slots that check_places accepts")
        return out

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """See `SmallOps`."""
        check_gated(gate, up)
        _check_support("gate", gate, gate.dtype)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._silu_mul(
            _GATED.pack(
                gate.data_ptr(),
                up.data_ptr(),
                out.data_ptr(),
                gate.stride(0),
                up.stride(0),
                self._parallel,
                *gate.shape,
                gate.dtype is torch.bfloat16,
                torch.get_num_threads(),
            )
        )
        return out


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    """From token to token and from head to head, of x [T, E] or [T, H, E]."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def _check_support(name: str, tensor: torch.Tensor, kv_dtype: torch.dtype) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, the native code wants the CPU")
    if (reason := supports(tensor.dtype, kv_dtype)) is not None:
        raise ValueError(f"the native code got {reason}")
