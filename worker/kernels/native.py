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
from worker.kernels.arguments import Option, Options, Prepared, check_arguments, check_tensors
from worker.kernels.native_build import Level, NativeUnavailable
from worker.kernels.native_chain import Call, NativeFunction

SOURCE = native_build.SOURCES / "paged_attention.cpp"
DTYPES = (torch.float32, torch.bfloat16)
POOL_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
"""In the order of call.h's `Type`."""
MAX_HEAD_DIM = 256

POOL_TYPES = {dtype: number for number, dtype in enumerate(POOL_DTYPES)}
_OUT_OF_MEMORY = 2
"""What the C++ function returns for want of memory; 0 is success, 1 an unsound batch."""


_ARGUMENTS = struct.Struct("@7P9q12i2f4P")
_ARGUMENTS_OF_A_LAYER = struct.Struct("@4P")
"""`OctavoAttention` of the C++ file (addresses, strides, sizes, factors, addresses), and what comes first in it. A
ctypes.Structure would take ten times as long to fill, as long as a small call computes."""


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
        self._attend = NativeFunction(library, "octavo_paged_attention")
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
        out = self._out_of_checked(q, k_pool, v_pool, tables, lengths, query_starts, options)
        outcome = self._attend(self._frame(q, k_pool, v_pool, out, tables, lengths, query_starts, scale, options))
        if outcome:
            raise _failure(outcome, q, k_pool, v_pool, tables, lengths, query_starts, options)
        return out

    def prepare(
        self,
        planes: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        *,
        q_like: torch.Tensor,
        **options: Unpack[Options],
    ) -> "NativeAttendStep":
        """See `worker.kernels.prepare`."""
        plan = (tables, lengths, query_starts)
        out = self._out_of_checked(q_like, planes[0], planes[1], *plan, options)
        frame = self._frame(q_like, planes[0], planes[1], out, *plan, scale, options)
        return NativeAttendStep(self._attend, frame, q_like, planes, plan, options)

    def _out_of_checked(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        """Where the result goes, once all arguments are found to fit."""
        check_tensors(q, k_pool, v_pool, tables, lengths, query_starts, **options)
        _check_support(q, k_pool.dtype, q.shape[2])
        return torch.empty(q.shape, dtype=q.dtype)

    def _frame(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        out: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        options: Options,
    ) -> bytes:
        """The C++ file's `OctavoAttention`. Whoever calls with it keeps the tensors."""
        tokens, heads, dim = q.shape
        num_blocks, kv_heads, block_size, _ = k_pool.shape
        return _ARGUMENTS.pack(
            q.data_ptr(),
            k_pool.data_ptr(),
            v_pool.data_ptr(),
            out.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            query_starts.data_ptr(),
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


class NativeAttendStep:
    """`worker.kernels.AttendStep`: the arguments lie ready; a layer puts its four addresses into them."""

    def __init__(
        self,
        attend: NativeFunction,
        frame: bytes,
        q_like: torch.Tensor,
        planes: torch.Tensor,
        plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Options,
    ) -> None:
        """Take a checked frame.

        Args:
            attend: the C++ function.
            frame: its arguments, but for the addresses.
            q_like: every layer's queries have its shape, strides and dtype.
            planes: [2 L, N, Hkv, S, D].
            plan: tables, lengths and query_starts, which the frame points to.
            options: likewise.
        """
        self._attend = attend
        self._frame = bytearray(frame)
        self._like = Prepared.of(q_like, planes)
        self._planes, self._plan, self._options = planes, plan, options
        self._pools, self._plane = planes.data_ptr(), planes.stride(0) * planes.itemsize

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """See `worker.kernels.AttendStep`."""
        out = torch.empty(self._like.shape, dtype=self._like.dtype)
        if outcome := self.into(out, layer, q)():
            raise self.failure(layer, q, outcome)
        return out

    def into(self, out: torch.Tensor, layer: int, q: torch.Tensor) -> Call:
        """The call that attends into `out` [T, Hq, D], contiguous. Raises as `worker.kernels.AttendStep`."""
        self._like.check(layer, q)
        pool = self._pools + 2 * layer * self._plane
        _ARGUMENTS_OF_A_LAYER.pack_into(self._frame, 0, q.data_ptr(), pool, pool + self._plane, out.data_ptr())
        return Call(self._attend, bytes(self._frame))

    def failure(self, layer: int, q: torch.Tensor, outcome: int) -> Exception:
        """What an outcome of the call but 0 means. Raises the ValueError that names what is unsound in the batch."""
        pools = self._planes[2 * layer], self._planes[2 * layer + 1]
        return _failure(outcome, q, *pools, *self._plan, self._options)


def _failure(
    outcome: int,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    options: Options,
) -> Exception:
    """What an outcome of the C++ function means. Raises the ValueError that names what is unsound in a batch."""
    if outcome == _OUT_OF_MEMORY:
        return MemoryError("no memory for the partial results of an attention call")
    check_arguments(q, k_pool, v_pool, tables, lengths, query_starts, **options)
    return AssertionError("the native code refuses a batch that check_batch accepts")


def address(tensor: torch.Tensor | None) -> int:
    """Where its first element lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def _check_support(q: torch.Tensor, kv_dtype: torch.dtype, head_dim: int) -> None:
    if q.device.type != "cpu":
        raise ValueError(f"q is on {q.device}, the native code wants the CPU")
    if (reason := supports(q.dtype, kv_dtype, head_dim)) is not None:
        raise ValueError(f"the native code got {reason}")
