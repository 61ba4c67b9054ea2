"""The small operations of the Llama family: what stands between the matrix products of a layer.

Letters as in the package's first file; E and F are the widths of a hidden state and of an MLP. All arithmetic is
float32, and what is stored is rounded once, to the dtype that it is stored as. `TorchSmallOps` is the meaning, on any
device; the native code (native_small_ops) goes over each row once, and gives a row the same bits in any company.
"""

import logging
from typing import Protocol

import torch
from torch.nn.functional import silu

from worker.kernels import block_ops
from worker.kernels.small_ops_arguments import HeadNorms, check_gated, check_norm, check_places, check_rope

__all__ = ["HeadNorms", "RopeStep", "SmallOps", "TorchSmallOps", "choose"]

log = logging.getLogger("octavo.worker")


class RopeStep(Protocol):
    """The rotary embedding of a step, with the write of its keys and values: prepared once, called once a layer."""

    def __call__(self, layer: int, packed: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        """Turn a layer's queries and keys to their positions, and write keys and values into their slots.

        The second half of a head turns against the first, as in transformers' Llama; the pool gets what
        `block_ops.write` writes.

        Args:
            layer: below L.
            packed: [T, (Hq + 2 Hkv) * D], contiguous: all queries, then all keys, then all values of each token.
            norms: divide each query and key by the root of its mean square first, times these weights.

        Returns:
            The turned queries, [T, Hq, D].

        Raises:
            IndexError: the pool has no such layer.
            ValueError: `packed` or `norms` is not what was prepared for, or (on the CPU) a position or a slot does not
                exist.
        """
        ...


class SmallOps(Protocol):
    """Norms, rotary embedding with the write of keys and values, and the gate of an MLP.

    Activations are float32, bfloat16 or float16, with any strides but for the last axis, whose elements lie side by
    side: parts of a packed projection are read where they are. Every result is contiguous. ValueErrors name the
    argument and both numbers; a call that raises one has changed nothing.
    """

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Divide every row by the root of its mean square, and multiply by the weight.

        Args:
            x: [T, E], or [T, H, D] to norm each head by itself.
            weight: [E] or [D], in x's dtype.
            eps: added to the mean square.
            residual: like x; changed in place to its sum with x, and that sum is what is normed. Its memory is
                nobody else's argument.

        Returns:
            Like x.

        Raises:
            ValueError: a shape, dtype or device does not fit.
        """
        ...

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
    ) -> RopeStep:
        """Check once what all layers of a step share.

        Args:
            planes: [2 L, N, Hkv, S, D] of those dtypes, float8_e4m3fn or float8_e5m2, D even, any strides but the last:
                keys and values of every layer in turn.
            cos: float32 [P, D], a row a position, as transformers' rotary embedding gives them.
            sin: float32 [P, D], likewise.
            positions: int64 [T], below P.
            slots: int64 [T], block * S + offset of each token, all different.
            heads: Hq.
            dtype: of the projections.

        Raises:
            ValueError: a shape, dtype or device does not fit.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up, of one projection [T, 2 F], all of the gate first -> [T, F].

        Raises:
            ValueError: its axes, dtype or strides are others.
        """
        ...


class TorchSmallOps:
    """`SmallOps` in plain torch."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `SmallOps`."""
        check_norm(x, weight, residual)
        if residual is not None:
            x = residual.add_(x)
        return _normed(x.float(), weight, eps).to(x.dtype).contiguous()

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
    ) -> RopeStep:
        """See `SmallOps`."""
        prepared = check_rope(planes, cos, sin, positions, slots, heads=heads, dtype=dtype)
        check_places(positions, slots, table_positions=len(cos), num_slots=planes.shape[1] * planes.shape[3])
        own_cos, own_sin = (table[positions][:, None] for table in (cos, sin))

        def write(layer: int, packed: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
            prepared.check(layer, packed, norms)
            parts = packed.unflatten(1, (-1, prepared.dim))
            q, k, v = parts.split([heads, prepared.kv_heads, prepared.kv_heads], dim=1)
            q, k = q.float(), k.float()
            if norms is not None:
                q, k = _normed(q, norms.q, norms.eps), _normed(k, norms.k, norms.eps)
            block_ops.write(planes[2 * layer], planes[2 * layer + 1], _turned(k, own_cos, own_sin), v, slots)
            return _turned(q, own_cos, own_sin).to(dtype).contiguous()

        return write

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `SmallOps`."""
        check_gated(gate_up)
        gate, up = gate_up.float().chunk(2, dim=1)
        return (silu(gate) * up).to(gate_up.dtype)


def _normed(wide: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Every row of a float32 tensor [..., E], over the root of its mean square, times weight [E]."""
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def _turned(wide: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate float32 heads [T, H, D] by cos and sin [T, 1, D]."""
    first, second = wide.chunk(2, dim=-1)
    return wide * cos + torch.cat((-second, first), dim=-1) * sin


def choose(*, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> SmallOps:
    """Pick the native code where it takes such calls, torch elsewhere, and log which and why, once.

    Args:
        device: where activations and pool lie.
        dtype: of the activations.
        kv_dtype: of the pool; the activations' own by default.
    """
    from worker.kernels import native_small_ops
    from worker.kernels.native_build import NativeUnavailable, usable_levels

    if device.type != "cpu":
        return _announce(TorchSmallOps(), "torch", device, f"nothing else is written for {device.type}")
    try:
        ops = native_small_ops.load(dtype, kv_dtype or dtype)
    except NativeUnavailable as unavailable:
        return _announce(TorchSmallOps(), "torch", device, f"slower than native: {unavailable}")
    return _announce(ops, "native", device, f"compiled for {usable_levels()[0].name} instructions")


def _announce(ops: SmallOps, backend: str, device: torch.device, reason: str) -> SmallOps:
    log.info("small_ops_backend", extra={"backend": backend, "device": str(device), "reason": reason})
    return ops
