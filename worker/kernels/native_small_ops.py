"""The small operations on a CPU: native/small_ops.cpp, compiled at first use and called through ctypes."""

import ctypes
import struct
from functools import cache

import torch

from worker.kernels import native_build
from worker.kernels.native import DTYPES, POOL_DTYPES, POOL_TYPES, address
from worker.kernels.native_build import Level, NativeUnavailable
from worker.kernels.native_chain import Call, NativeFunction
from worker.kernels.small_ops_arguments import (
    HeadNorms,
    PreparedRope,
    check_gated,
    check_norm,
    check_places,
    check_rope,
)

SOURCE = native_build.SOURCES / "small_ops.cpp"

_NORM = struct.Struct("@4P4qP5if")
_ROPE = struct.Struct("@6Pf5P7q8i")
_ROPE_OF_A_LAYER = struct.Struct("@6Pf")
_GATED = struct.Struct("@3P2qP4i")
"""`Norm`, `Rope`, what comes first in it, and `Gated` of the C++ file."""


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
        self._rms_norm = NativeFunction(library, "octavo_rms_norm")
        self._rope_write = NativeFunction(library, "octavo_rope_write")
        self._silu_mul = NativeFunction(library, "octavo_silu_mul")
        self._parallel = native_build.openmp_parallel()

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `SmallOps`."""
        if _plain_norm(x, weight, residual):
            heads, strides = 1, None
        else:
            check_norm(x, weight, residual)
            _check_support("x", x, x.dtype, x.dtype)
            heads = x.shape[1] if x.dim() == 3 else 1
            strides = (*_row_strides(x), *((0, 0) if residual is None else _row_strides(residual)))
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(x, weight, eps, residual, out, heads, strides)()
        return out

    def rms_norm_into(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> Call:
        """The call that makes `rms_norm` of x [T, E] in `out`, which may be x; all are alike and contiguous."""
        assert _plain_norm(x, weight, residual), (x.shape, weight.shape)
        return self._norm(x, weight, eps, residual, out, 1, None)

    def _norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        heads: int,
        strides: tuple[int, ...] | None,
    ) -> Call:
        """Of sound arguments; no strides are those of contiguous rows."""
        width = x.shape[-1]
        return Call(
            self._rms_norm,
            _NORM.pack(
                x.data_ptr(),
                address(residual),
                weight.data_ptr(),
                out.data_ptr(),
                *(strides or (width, 0, width, 0)),
                self._parallel,
                len(x),
                heads,
                width,
                x.dtype is torch.bfloat16,
                torch.get_num_threads(),
                eps,
            ),
        )

    def prepare_rope(
        self,
        planes: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *,
        heads: int,
        dtype: torch.dtype,
    ) -> "NativeRopeStep":
        """See `SmallOps`."""
        prepared = check_rope(planes, cos, sin, positions, slots, heads=heads, dtype=dtype)
        _check_support("planes", planes, dtype, planes.dtype)
        return NativeRopeStep(self._rope_write, self._parallel, prepared, planes, cos, sin, positions, slots)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `SmallOps`."""
        if not _plain_gate(gate_up):
            check_gated(gate_up)
            _check_support("gate_up", gate_up, gate_up.dtype, gate_up.dtype)
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype)
        self.silu_mul_into(out, gate_up)()
        return out

    def silu_mul_into(self, out: torch.Tensor, gate_up: torch.Tensor) -> Call:
        """The call that makes `silu_mul` of a sound `gate_up` in `out` [T, F], contiguous."""
        start, stride = gate_up.data_ptr(), gate_up.stride(0)
        tokens, width = out.shape
        return Call(
            self._silu_mul,
            _GATED.pack(
                start,
                start + width * gate_up.itemsize,
                out.data_ptr(),
                stride,
                stride,
                self._parallel,
                tokens,
                width,
                gate_up.dtype is torch.bfloat16,
                torch.get_num_threads(),
            ),
        )


class NativeRopeStep:
    """`RopeStep`: the arguments lie ready; a layer puts its six addresses into them."""

    def __init__(
        self,
        rope_write: NativeFunction,
        parallel: int,
        prepared: PreparedRope,
        planes: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Take what was found to be sound; `rope_write` is the C++ function, `parallel` starts its threads."""
        self._rope_write = rope_write
        self._prepared = prepared
        self._planes, self._cos, self._sin, self._positions, self._slots = planes, cos, sin, positions, slots
        self._pools, self._plane = planes.data_ptr(), planes.stride(0) * planes.itemsize
        _, num_blocks, _, block_size, _ = planes.shape
        self._num_slots = num_blocks * block_size
        self._frame = bytearray(
            _ROPE.pack(
                *_ROPE_OF_A_LAYER.unpack(bytes(_ROPE_OF_A_LAYER.size)),
                *(tensor.data_ptr() for tensor in (cos, sin, positions, slots)),
                parallel,
                *planes.stride()[1:4],
                cos.stride(0),
                sin.stride(0),
                len(cos),
                self._num_slots,
                *prepared.turned[:2],
                prepared.kv_heads,
                prepared.dim,
                block_size,
                prepared.dtype is torch.bfloat16,
                POOL_TYPES[planes.dtype],
                torch.get_num_threads(),
            )
        )

    def __call__(self, layer: int, packed: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        """See `RopeStep`."""
        out = torch.empty(self._prepared.turned, dtype=self._prepared.dtype)
        if outcome := self.into(out, layer, packed, norms)():
            raise self.unsound(outcome)
        return out

    def into(self, out: torch.Tensor, layer: int, packed: torch.Tensor, norms: HeadNorms | None = None) -> Call:
        """The call that writes the layer's keys and values, and its turned queries into `out` [T, Hq, D], contiguous.

        Raises as `RopeStep`, but for positions and slots.
        """
        self._prepared.check(layer, packed, norms)
        pool = self._pools + 2 * layer * self._plane
        of_norms = (0, 0, 0.0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
        addresses = (packed.data_ptr(), out.data_ptr(), pool, pool + self._plane)
        _ROPE_OF_A_LAYER.pack_into(self._frame, 0, *addresses, *of_norms)
        return Call(self._rope_write, bytes(self._frame))

    def unsound(self, _outcome: int) -> Exception:
        """What the native code has refused. Raises the ValueError that names it."""
        check_places(self._positions, self._slots, table_positions=len(self._cos), num_slots=self._num_slots)
        return AssertionError("the native code refuses positions or slots that check_places accepts")


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether a call is of the kind that a model makes, which needs no closer look: rows side by side, all alike."""
    return (
        x.dtype in DTYPES
        and x.is_cpu
        and weight.is_cpu
        and x.dim() == 2
        and weight.dtype is x.dtype
        and weight.shape == x.shape[1:]
        and x.is_contiguous()
        and weight.is_contiguous()
        and (
            residual is None
            or (
                residual.is_cpu and residual.dtype is x.dtype and residual.shape == x.shape and residual.is_contiguous()
            )
        )
    )


def _plain_gate(gate_up: torch.Tensor) -> bool:
    """Likewise."""
    return (
        gate_up.dtype in DTYPES
        and gate_up.is_cpu
        and gate_up.dim() == 2
        and gate_up.is_contiguous()
        and not gate_up.shape[1] % 2
    )


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    """From token to token and from head to head, of x [T, E] or [T, H, E]."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def _check_support(name: str, tensor: torch.Tensor, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, the native code wants the CPU")
    if (reason := supports(dtype, kv_dtype)) is not None:
        raise ValueError(f"the native code got {reason}")
