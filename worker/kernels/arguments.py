"""What the arguments of an attention call must be to one another; messages name the tensor and both numbers.

`check_arguments` is the first line of every implementation. It costs a few microseconds, since on a GPU no value is
read: what `tables`, `lengths` and `query_starts` point to is checked on the CPU, and by `check_batch` once a step.
"""

from itertools import pairwise
from typing import Literal, NamedTuple, TypedDict, Unpack

import torch

from worker.kernels.shared_prefix import SharedPrefixes

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
POOL_DTYPES = (*QUERY_DTYPES, *FP8_DTYPES)


class Options(TypedDict, total=False):
    """What a call may ask for beside plain causal attention; None is as good as absent."""

    window: int | None
    """Positions that a query sees: itself and those just before it; all of its history by default."""
    soft_cap: float | None
    """c in c * tanh(score / c), applied to the scaled scores."""
    sinks: torch.Tensor | None
    """float32 [Hq]: one more score for every query of a head, whose value is zero."""
    k_scale: torch.Tensor | None
    """float32 [Hkv]: a key is what the pool holds times its head's scale."""
    v_scale: torch.Tensor | None
    """float32 [Hkv]: likewise."""
    shared: SharedPrefixes | None
    """Which decodes begin with the same blocks: a hint, that changes results by no more than rounding."""


Option = Literal["window", "soft_cap", "sinks", "scales"]
"""What an implementation may lack; `scales` stands for `k_scale` and `v_scale`."""


def options_of(options: Options) -> frozenset[Option]:
    """The options that a call asks for."""
    names: dict[str, Option] = {"window": "window", "soft_cap": "soft_cap", "sinks": "sinks"}
    names |= {"k_scale": "scales", "v_scale": "scales"}
    return frozenset(option for name, option in names.items() if options.get(name) is not None)


def check_arguments(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    **options: Unpack[Options],
) -> None:
    """`check_tensors`, and on the CPU, where reading values costs no stall, `check_batch`.

    Raises:
        ValueError: an argument does not fit the others.
    """
    check_tensors(q, k_pool, v_pool, tables, lengths, query_starts, **options)
    if q.device.type == "cpu":
        num_blocks, _, block_size, _ = k_pool.shape
        check_batch(tables, lengths, query_starts, tokens=q.shape[0], num_blocks=num_blocks, block_size=block_size)


def check_tensors(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    shared: SharedPrefixes | None = None,
) -> None:
    """Check ranks, shapes, dtypes, devices and strides: cheap enough for every call, since no value is read.

    Raises:
        ValueError: two of them do not fit each other, or an option is out of its range.
    """
    _check_pools(q, k_pool, v_pool)
    _check_plan(tables, lengths, query_starts)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, wanted at least 1: a query sees itself")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, wanted more than 0")
    if shared is not None and len(shared.positions) != len(lengths):
        raise ValueError(f"shared was planned for {len(shared.positions)} sequences, lengths has {len(lengths)}")
    kv_heads = k_pool.shape[1]
    _check_per_head("sinks", sinks, q.shape[1])
    _check_per_head("k_scale", k_scale, kv_heads)
    _check_per_head("v_scale", v_scale, kv_heads)
    others = {"k_pool": k_pool, "tables": tables, "lengths": lengths, "query_starts": query_starts}
    for name, tensor in (others | {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}).items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")


class Prepared(NamedTuple):
    """What the calls of a prepared step must be like."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    layers: int

    @classmethod
    def of(cls, q_like: torch.Tensor, planes: torch.Tensor) -> "Prepared":
        """For queries like those, and planes [2 L, N, Hkv, S, D]."""
        return cls(q_like.shape, q_like.stride(), q_like.dtype, len(planes) // 2)

    def check(self, layer: int, q: torch.Tensor) -> None:
        """Check a call.

        Raises:
            IndexError: the pool has no such layer.
            ValueError: q is unlike what was prepared for.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer}, the pool has {self.layers}")
        if q.dtype is not self.dtype or q.shape != self.shape or q.stride() != self.strides:
            raise ValueError(
                f"q is {list(q.shape)} of {q.dtype} with strides {list(q.stride())}, "
                f"wanted {list(self.shape)} of {self.dtype} with strides {list(self.strides)}"
            )


def _check_pools(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    check_rank("q", q, 3)
    check_rank("k_pool", k_pool, 4)
    if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype or v_pool.device != k_pool.device:
        raise ValueError(f"v_pool is {_kind(v_pool)}, k_pool {_kind(k_pool)}")
    check_dtype("q", q, QUERY_DTYPES)
    check_dtype("k_pool", k_pool, POOL_DTYPES)
    if k_pool.shape[3] != q.shape[2]:
        raise ValueError(f"k_pool has heads of {k_pool.shape[3]} elements, q of {q.shape[2]}")
    if q.shape[1] % k_pool.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of k_pool's {k_pool.shape[1]}")
    for name, tensor in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        check_last_axis(name, tensor)


def _check_plan(tables: torch.Tensor, lengths: torch.Tensor, query_starts: torch.Tensor) -> None:
    check_rank("tables", tables, 2)
    sequences = tables.shape[0]
    for name, tensor, wanted in (("lengths", lengths, sequences), ("query_starts", query_starts, sequences + 1)):
        check_rank(name, tensor, 1)
        if tensor.shape[0] != wanted:
            raise ValueError(f"{name} has {tensor.shape[0]} entries, wanted {wanted} for {sequences} rows of tables")
    for name, tensor in (("tables", tables), ("lengths", lengths), ("query_starts", query_starts)):
        check_dtype(name, tensor, (torch.int32,))
        check_last_axis(name, tensor)


def _check_per_head(name: str, tensor: torch.Tensor | None, heads: int) -> None:
    if tensor is None:
        return
    check_rank(name, tensor, 1)
    if tensor.shape[0] != heads:
        raise ValueError(f"{name} has {tensor.shape[0]} entries, wanted one for each of {heads} heads")
    check_dtype(name, tensor, (torch.float32,))
    check_last_axis(name, tensor)


def check_rank(name: str, tensor: torch.Tensor, wanted: int) -> None:
    """Refuse another number of axes."""
    if tensor.dim() != wanted:
        raise ValueError(f"{name} has {tensor.dim()} axes, wanted {wanted}")


def check_dtype(name: str, tensor: torch.Tensor, wanted: tuple[torch.dtype, ...]) -> None:
    """Refuse a dtype that is none of those."""
    if tensor.dtype not in wanted:
        raise ValueError(f"{name} is {tensor.dtype}, wanted {' or '.join(map(str, wanted))}")


def check_last_axis(name: str, tensor: torch.Tensor) -> None:
    """Refuse a row whose elements do not lie side by side."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} on its last axis, wanted 1")


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def check_batch(
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    tokens: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Check what the values point to: every query has its row, every position its block, every block its pool.

    Args:
        tables: int32 [B, M], on the CPU, like the other two.
        lengths: int32 [B].
        query_starts: int32 [B + 1].
        tokens: T, the rows of q.
        num_blocks: N.
        block_size: S.

    Raises:
        ValueError: a value is out of its range.
    """
    starts = query_starts.tolist()
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"query_starts go from {starts[0]} to {starts[-1]}, wanted 0 to {tokens}, the rows of q")
    capacity = tables.shape[1] * block_size
    for b, (length, (start, end)) in enumerate(zip(lengths.tolist(), pairwise(starts), strict=True)):
        if end <= start:
            raise ValueError(f"query_starts[{b}] is {start} and the next {end}: every sequence has a query")
        if length < end - start:
            raise ValueError(f"lengths[{b}] is {length}, fewer than its {end - start} queries")
        if length > capacity:
            raise ValueError(f"lengths[{b}] is {length}, its row of tables holds {capacity} positions")
    _check_blocks(tables, lengths, num_blocks, block_size)


def _check_blocks(tables: torch.Tensor, lengths: torch.Tensor, num_blocks: int, block_size: int) -> None:
    used = torch.arange(tables.shape[1]) * block_size < lengths[:, None]
    outside = (used & ((tables < 0) | (tables >= num_blocks))).nonzero()
    if len(outside):
        b, i = outside[0].tolist()
        raise ValueError(f"tables[{b}, {i}] is block {tables[b, i].item()}, the pool has {num_blocks}")
