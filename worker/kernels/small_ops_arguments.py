"""What the arguments of the small operations must be to one another; messages name the tensor and both numbers."""

from typing import NamedTuple

import torch

from worker.kernels.arguments import POOL_DTYPES, QUERY_DTYPES, check_dtype, check_last_axis, check_rank
from worker.kernels.block_ops import check_slots


class HeadNorms(NamedTuple):
    """Norms of every query and key, head by head, before they are turned: Qwen3's."""

    q: torch.Tensor
    """[D], in the activations' dtype."""
    k: torch.Tensor
    """[D], likewise."""
    eps: float


class PreparedRope(NamedTuple):
    """What the calls of a prepared step must be like."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    layers: int

    @property
    def turned(self) -> tuple[int, int, int]:
        """The shape of turned queries, [T, Hq, D]."""
        return self.tokens, self.heads, self.dim

    def check(self, layer: int, packed: torch.Tensor, norms: HeadNorms | None) -> None:
        """Check a call.

        Raises:
            IndexError: the pool has no such layer.
            ValueError: `packed` or `norms` is another than what was prepared for.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer}, the pool has {self.layers}")
        shape = self.tokens, (self.heads + 2 * self.kv_heads) * self.dim
        alike = packed.dtype is self.dtype and packed.device == self.device
        if packed.shape != shape or not alike or not packed.is_contiguous():
            raise ValueError(
                f"packed is {list(packed.shape)} of {packed.dtype} on {packed.device} with strides "
                f"{list(packed.stride())}, wanted {list(shape)} of {self.dtype} on {self.device}, contiguous"
            )
        if norms is not None:
            _check_like("norms.q", norms.q, (self.dim,), "packed", packed)
            _check_like("norms.k", norms.k, (self.dim,), "packed", packed)


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
    planes: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads: int,
    dtype: torch.dtype,
) -> PreparedRope:
    """Check what a step is prepared of: ranks, shapes, dtypes, devices and strides, no value.

    Raises:
        ValueError: one does not fit.
    """
    check_rank("planes", planes, 5)
    check_dtype("planes", planes, POOL_DTYPES)
    count, _, kv_heads, _, dim = planes.shape
    if count % 2:
        raise ValueError(f"planes has {count} of them, which are not keys and values of layers")
    if dim % 2:
        raise ValueError(f"planes has heads of {dim} elements, which do not make two halves")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"heads is {heads}, no multiple of the planes' {kv_heads}")
    if dtype not in QUERY_DTYPES:
        raise ValueError(f"dtype is {dtype}, wanted {' or '.join(map(str, QUERY_DTYPES))}")
    _check_rows("slots", slots)
    _check_rows("positions", positions)
    if positions.shape != slots.shape:
        raise ValueError(f"positions has {len(positions)} entries, slots {len(slots)}")
    _check_angles(cos, sin, dim)
    for name, tensor in (("cos", cos), ("positions", positions), ("slots", slots)):
        if tensor.device != planes.device:
            raise ValueError(f"{name} is on {tensor.device}, planes on {planes.device}")
    check_last_axis("planes", planes)
    return PreparedRope(len(slots), heads, kv_heads, dim, dtype, planes.device, layers=count // 2)


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    """Check what has a number for each token, int64 [T]."""
    check_rank(name, tensor, 1)
    check_dtype(name, tensor, (torch.int64,))
    check_last_axis(name, tensor)


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, dim: int) -> None:
    """Check cos and sin, [P, D]."""
    check_rank("cos", cos, 2)
    check_dtype("cos", cos, (torch.float32,))
    check_last_axis("cos", cos)
    if cos.shape[1] != dim:
        raise ValueError(f"cos has rows of {cos.shape[1]}, wanted {dim}, the elements of a head")
    _check_like("sin", sin, cos.shape, "cos", cos)


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
