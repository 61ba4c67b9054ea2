"""What the arguments of the small operations must be to one another; messages name the tensor and both numbers."""

from typing import NamedTuple

import torch

from worker.kernels.arguments import POOL_DTYPES, QUERY_DTYPES, check_dtype, check_last_axis, check_rank
from worker.kernels.block_ops import check_scales, check_slots, check_write


class HeadNorms(NamedTuple):
    """Norms of every query and key, head by head, before they are turned: Qwen3's."""

    q: torch.Tensor
    """[D], in the activations' dtype."""
    k: torch.Tensor
    """[D], likewise."""
    eps: float


def unpacked(packed: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """Queries [T, Hq, D], keys and values [T, Hkv, D] of one projection [T, (Hq + 2 Hkv) * D], as views."""
    parts = packed.unflatten(1, (heads + 2 * kv_heads, -1))
    return parts.split([heads, kv_heads, kv_heads], dim=1)


def check_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Check x [T, E] or [T, H, E], weight [E], and a residual like x.

    Raises:
        ValueError: one does not fit.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x has {x.dim()} axes, wanted 2 or 3")
    check_dtype("x", x, QUERY_DTYPES)
    check_last_axis("x", x)
    _check_like("weight", weight, x.shape[-1:], "x", x)
    if residual is not None:
        _check_like("residual", residual, x.shape, "x", x)


def check_gated(gate_up: torch.Tensor) -> None:
    """Check gate_up, [T, 2 F].

    Raises:
        ValueError: it does not fit.
    """
    check_rank("gate_up", gate_up, 2)
    check_dtype("gate_up", gate_up, QUERY_DTYPES)
    check_last_axis("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]} elements, which do not make two halves")


def check_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    norms: HeadNorms | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check a `rope_write`: ranks, shapes, dtypes, devices and strides, no value.

    Raises:
        ValueError: one does not fit.
    """
    for name, tensor, axes in (("q", q, 3), ("k_pool", k_pool, 4), ("v_pool", v_pool, 4), ("slots", slots, 1)):
        check_rank(name, tensor, axes)
    check_dtype("q", q, QUERY_DTYPES)
    check_dtype("k_pool", k_pool, POOL_DTYPES)
    tokens, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    if dim % 2:
        raise ValueError(f"q has heads of {dim} elements, which do not make two halves")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, no multiple of k_pool's {kv_heads}")
    _check_like("k", k, (tokens, kv_heads, dim), "q", q)
    _check_like("v", v, (tokens, kv_heads, dim), "q", q)
    if norms is not None:
        _check_like("norms.q", norms.q, (dim,), "q", q)
        _check_like("norms.k", norms.k, (dim,), "q", q)
    _check_angles(cos, sin, positions, tokens, dim)
    if slots.shape[0] != tokens:
        raise ValueError(f"slots has {slots.shape[0]} entries, wanted {tokens}, the rows of q")
    check_write(k_pool, v_pool, k, v, slots)
    check_scales(k_pool, k_scale=k_scale, v_scale=v_scale)
    for name, tensor in (("cos", cos), ("positions", positions), ("k_pool", k_pool)):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    rows = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "slots": slots, "k_scale": k_scale, "v_scale": v_scale}
    for name, tensor in rows.items():
        if tensor is not None:
            check_last_axis(name, tensor)


def check_packed(packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check a projection of queries, keys and values, [T, (Hq + 2 Hkv) * D].

    Raises:
        ValueError: it is another than what was prepared for.
    """
    if packed.dtype is not dtype or packed.shape != shape or not packed.is_contiguous():
        raise ValueError(
            f"packed is {list(packed.shape)} of {packed.dtype} with strides {list(packed.stride())}, "
            f"wanted {list(shape)} of {dtype}, contiguous"
        )


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, tokens: int, dim: int) -> None:
    """Check cos and sin [P, D], and positions [T]."""
    check_rank("cos", cos, 2)
    check_dtype("cos", cos, (torch.float32,))
    check_last_axis("cos", cos)
    if cos.shape[1] != dim:
        raise ValueError(f"cos has rows of {cos.shape[1]}, wanted {dim}, the elements of a head")
    _check_like("sin", sin, cos.shape, "cos", cos)
    check_rank("positions", positions, 1)
    check_dtype("positions", positions, (torch.int64,))
    check_last_axis("positions", positions)
    if positions.shape[0] != tokens:
        raise ValueError(f"positions has {positions.shape[0]} entries, wanted {tokens}, the rows of q")


def check_places(positions: torch.Tensor, slots: torch.Tensor, *, table_positions: int, num_slots: int) -> None:
    """Check what positions and slots point to; on a GPU, where reading them would stall the step, nothing.

    Raises:
        ValueError: one points outside.
    """
    if positions.device.type == "cpu" and positions.numel():
        lowest, highest = (x.item() for x in positions.aminmax())
        if lowest < 0 or highest >= table_positions:
            raise ValueError(f"positions go from {lowest} to {highest}, cos and sin have {table_positions}")
    check_slots(slots, num_slots=num_slots)


def _check_like(name: str, tensor: torch.Tensor, shape: tuple[int, ...], other_name: str, other: torch.Tensor) -> None:
    """`tensor` has that shape, and the dtype and device of `other`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, wanted {list(shape)}")
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, {other_name} {other.dtype} on {other.device}")
    check_last_axis(name, tensor)
