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
    check_gated,
    check_norm,
    check_packed,
    check_places,
    check_rope,
    unpacked,
)

SOURCE = native_build.SOURCES / "small_ops.cpp"

_NORM = struct.Struct("@4P4qP5if")
_ROPE = struct.Struct("@8Pf7P16q8i")
_ROPE_OF_A_LAYER = struct.Struct("@8Pf")
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
            _check_support("x", x, x.dtype)
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
        norms: HeadNorms | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `SmallOps`."""
        check_rope(q, k, v, cos, sin, positions, k_pool, v_pool, slots, norms, k_scale, v_scale)
        _check_support("q", q, k_pool.dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        frame = self._rope_frame(
            q, k, v, out, cos, sin, positions, k_pool, v_pool, slots, norms=norms, k_scale=k_scale, v_scale=v_scale
        )
        if self._rope_write(frame):
            raise _unsound(cos, positions, k_pool, slots)
        return out

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
        kv_heads, dim = planes.shape[2], planes.shape[4]
        packed = torch.empty((len(slots), (heads + 2 * kv_heads) * dim), dtype=dtype)
        q, k, v = unpacked(packed, heads, kv_heads)
        check_rope(q, k, v, cos, sin, positions, planes[0], planes[1], slots, None, None, None)
        _check_support("q", q, planes.dtype)
        frame = self._rope_frame(q, k, v, q, cos, sin, positions, planes[0], planes[1], slots)
        held = (cos, sin, positions, planes, slots)
        return NativeRopeStep(self._rope_write, frame, packed, q.shape, held)

    def _rope_frame(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
        *,
        norms: HeadNorms | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> bytes:
        """The C++ file's `Rope`. Whoever calls with it keeps the tensors."""
        num_blocks, kv_heads, block_size, dim = k_pool.shape
        return _ROPE.pack(
            *(tensor.data_ptr() for tensor in (q, k, v, out, k_pool, v_pool)),
            *_norms_of(norms),
            *(tensor.data_ptr() for tensor in (cos, sin, positions, slots)),
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
            cos.shape[0],
            num_blocks * block_size,
            *q.shape[:2],
            kv_heads,
            dim,
            block_size,
            q.dtype is torch.bfloat16,
            POOL_TYPES[k_pool.dtype],
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `SmallOps`."""
        if not _plain_gate(gate_up):
            check_gated(gate_up)
            _check_support("gate_up", gate_up, gate_up.dtype)
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
    """`RopeStep`: the arguments lie ready; a layer puts its eight addresses into them."""

    def __init__(
        self,
        rope_write: NativeFunction,
        frame: bytes,
        packed: torch.Tensor,
        turned: torch.Size,
        held: tuple[torch.Tensor, ...],
    ) -> None:
        """Take a sound frame.

        Args:
            rope_write: the C++ function.
            frame: its arguments, but for the addresses.
            packed: like every layer's projection.
            turned: the shape of what is returned, [T, Hq, D].
            held: what the frame points to: cos, sin, positions, planes, slots.
        """
        self._rope_write = rope_write
        self._frame = bytearray(frame)
        self._turned, self._dtype, self._shape = turned, packed.dtype, packed.shape
        self._held = held
        _, heads, dim = turned
        planes = held[3]
        self._k = heads * dim * packed.itemsize
        self._v = self._k + planes.shape[2] * dim * packed.itemsize
        self._pools, self._plane = planes.data_ptr(), planes.stride(0) * planes.itemsize
        self._layers = len(planes) // 2

    def __call__(self, layer: int, packed: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        """See `RopeStep`."""
        out = torch.empty(self._turned, dtype=self._dtype)
        if self.into(out, layer, packed, norms)():
            raise self.unsound(1)
        return out

    def into(self, out: torch.Tensor, layer: int, packed: torch.Tensor, norms: HeadNorms | None = None) -> Call:
        """The call that writes the layer's keys and values, and its turned queries into `out` [T, Hq, D], contiguous.

        Raises:
            ValueError: `packed` is not what was prepared for.
        """
        check_packed(packed, self._shape, self._dtype)
        if not 0 <= layer < self._layers:
            raise IndexError(f"layer {layer}, the pool has {self._layers}")
        start, pool = packed.data_ptr(), self._pools + 2 * layer * self._plane
        _ROPE_OF_A_LAYER.pack_into(
            self._frame,
            0,
            start,
            start + self._k,
            start + self._v,
            out.data_ptr(),
            pool,
            pool + self._plane,
            *_norms_of(norms),
        )
        return Call(self._rope_write, bytes(self._frame))

    def unsound(self, _outcome: int) -> Exception:
        """What the native code has refused. Raises the ValueError that names it."""
        cos, _, positions, planes, slots = self._held
        return _unsound(cos, positions, planes[0], slots)


def _norms_of(norms: HeadNorms | None) -> tuple[int, int, float]:
    return (0, 0, 0.0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)


def _unsound(cos: torch.Tensor, positions: torch.Tensor, k_pool: torch.Tensor, slots: torch.Tensor) -> AssertionError:
    """Raise what is wrong with positions or slots that the native code has refused."""
    check_places(positions, slots, table_positions=cos.shape[0], num_slots=k_pool.shape[0] * k_pool.shape[2])
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


def _check_support(name: str, tensor: torch.Tensor, kv_dtype: torch.dtype) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, the native code wants the CPU")
    if (reason := supports(tensor.dtype, kv_dtype)) is not None:
        raise ValueError(f"the native code got {reason}")
