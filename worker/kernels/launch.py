"""How kernels are launched: what a call looks like to them, and which tiles, warps and stages suit which target.

A target is where the code runs: an NVIDIA compute capability, an AMD architecture, or Triton's interpreter. The
choices below were made from the table that bench/ahead_of_time.py prints: as many warps as keep every value in
registers, as many stages as shared memory has room for.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from worker.kernels.arguments import Options

_DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where kernels run."""

    kind: Literal["interpreter", "cuda", "hip"]
    capability: int = 0
    """Of NVIDIA's: 80, 90, 100."""

    @property
    def stages(self) -> int:
        """Of a kernel that waits for memory."""
        return 2 if self.kind == "hip" else 3

    @property
    def converts_fp8(self) -> bool:
        """Whether there are instructions from both float8 dtypes to fp16."""
        return self.kind == "cuda" and self.capability >= 89


def current_target() -> Target:
    """The target of the current device."""
    if knobs.runtime.interpret:
        return Target("interpreter")
    found: Any = driver.active.get_current_target()
    return Target("cuda", int(found.arch)) if found.backend == "cuda" else Target("hip")


@dataclass(frozen=True, slots=True)
class Shape:
    """How one program is cut."""

    rows: int
    """M: rows of queries."""
    tile: int
    """Positions of a step."""
    warps: int
    stages: int
    """Steps whose loads are under way at once."""
    without_tensor_core: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attention call whose arguments were checked, as its kernels see it."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor
    scale: float
    options: Options
    target: Target

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.tables.shape[0]

    @property
    def capacity(self) -> int:
        """Positions that a row of `tables` has room for."""
        return self.tables.shape[1] * self.k_pool.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k_pool.shape[1]

    @property
    def pool(self) -> str:
        """How a pool is read: "plain", number by number, or "e4m3" or "e5m2", two at a time.

        With " bits" behind those where the target has no instruction that makes an fp16 of them.
        """
        name = _FP8.get(self.k_pool.dtype, "plain")
        return name if name == "plain" or self.target.converts_fp8 else f"{name} bits"

    @property
    def dot(self) -> tl.dtype:
        """What is multiplied. Each float8 is an fp16 exactly; the interpreter's bfloat16 arithmetic is wrong."""
        if self.target.kind == "interpreter" or self.q.dtype == torch.float32:
            return tl.float32
        return tl.float16 if self.k_pool.dtype in _FP8 else _DOTS[self.q.dtype]

    @property
    def thrice(self) -> bool:
        """Whether the tensor core takes three products of tf32 for one of fp32: NVIDIA's have no other."""
        return self.target.kind == "cuda" and self.dot == tl.float32

    @property
    def converts_and_splits(self) -> bool:
        """Whether each number is made of a float8, and then of two tf32: what takes most registers."""
        return self.thrice and self.pool != "plain"

    @property
    def words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools as they are loaded: [N, Hkv, S, D], or [N, Hkv, S, D / 2] pairs of float8."""
        if self.pool == "plain":
            return self.k_pool, self.v_pool
        return self.k_pool.view(torch.uint16), self.v_pool.view(torch.uint16)

    def tensors(self) -> dict[str, Any]:
        """What is read, and the numbers that go with it."""
        k_words, v_words = self.words
        return {
            "q_ptr": self.q,
            "k_ptr": k_words,
            "v_ptr": v_words,
            "tables_ptr": self.tables,
            "lengths_ptr": self.lengths,
            "starts_ptr": self.query_starts,
            "sinks_ptr": self.options.get("sinks"),
            "k_scale_ptr": self.options.get("k_scale"),
            "v_scale_ptr": self.options.get("v_scale"),
            "scale": self.scale,
            "window": self.options.get("window"),
            "soft_cap": self.options.get("soft_cap"),
            "q_token_stride": self.q.stride(0),
            "q_head_stride": self.q.stride(1),
            "table_stride": self.tables.stride(0),
        }

    def constants(self, shape: Shape) -> dict[str, Any]:
        """What a kernel is compiled for. A pool's strides are among it: known to be even, they allow 16-byte loads."""
        head_dim = self.q.shape[2]
        k_words, v_words = self.words
        return {
            **dict(zip(("K_BLOCK", "K_HEAD", "K_SLOT"), k_words.stride(), strict=False)),
            **dict(zip(("V_BLOCK", "V_HEAD", "V_SLOT"), v_words.stride(), strict=False)),
            "HQ": self.q.shape[1],
            "GROUP": self.group,
            "ROWS": shape.rows,
            "D": head_dim,
            "D_PADDED": padded(head_dim) if self.pool == "plain" else 2 * padded(head_dim // 2),
            "S": self.k_pool.shape[2],
            "TILE": shape.tile,
            "POOL": self.pool,
            "DOT": self.dot,
            "PRECISION": "tf32x3" if self.thrice and not shape.without_tensor_core else "ieee",
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }


def padded(size: int) -> int:
    """A size as tensor cores take it: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def decode_shape(call: Call) -> Shape:
    """For one query a sequence: the heads of a group, and as many positions a step as 16 KB of keys hold."""
    position_bytes = padded(call.q.shape[2]) * call.dot.primitive_bitwidth // 8
    warps = 8 if position_bytes >= 1024 or call.converts_and_splits else 4
    return Shape(padded(call.group), min(64, (16 << 10) // position_bytes), warps, call.target.stages)


def shared_shape(call: Call) -> Shape:
    """For what many queries read, a chunk's or a shared part: the more rows share a tile the better, while room is."""
    target, plain = call.target, call.pool == "plain"
    wide = padded(call.q.shape[2]) > 128
    if call.dot == tl.float32 and wide:  # the operands of three multiplications in place of one do not fit
        shape = Shape(16, 16, warps=8, stages=2, without_tensor_core=True)
    elif call.converts_and_splits:
        shape = Shape(16, 32, warps=8, stages=2)
    elif call.dot == tl.float32:
        shape = Shape(32, 32, warps=4, stages=2)
    elif target.kind == "hip":
        shape = Shape(64 if wide else 128, 32, warps=4, stages=2)
    elif wide:
        shape = Shape(64, 64 if target.capability >= (90 if plain else 100) else 32, warps=8, stages=2)
    elif target.capability >= 100 and padded(call.q.shape[2]) <= 64:  # short rows leave room for more of them
        shape = Shape(128, 128, warps=8, stages=2)
    elif target.capability >= 90:  # warp groups of four multiply 64 rows at once
        shape = Shape(128, 64, warps=8, stages=3)
    else:
        shape = Shape(64, 32, warps=4, stages=3)
    return replace(shape, rows=max(shape.rows, padded(call.group)))
