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
from worker.kernels.small_ops_arguments import check_gated, check_norm, check_places, check_rope

log = logging.getLogger("octavo.worker")


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
        """Turn queries and keys to their positions, and write keys and values into their slots.

        The second half of a head turns against the first, as in transformers' Llama; the pool gets what
        `block_ops.write` writes.

        Args:
            q: [T, Hq, D], D even.
            k: [T, Hkv, D], in q's dtype.
            v: [T, Hkv, D], likewise.
            cos: float32 [P, D], a row a position, as transformers' rotary embedding gives them.
            sin: float32 [P, D], likewise.
            positions: int64 [T], below P.
            k_pool: [N, Hkv, S, D] of those dtypes, float8_e4m3fn or float8_e5m2, any strides but the last.
            v_pool: [N, Hkv, S, D], likewise.
            slots: int64 [T], block * S + offset of each token, all different.
            k_scale: float32 [Hkv]: a key is what the pool holds times its head's scale; 1 by default.
            v_scale: float32 [Hkv]: likewise.

        Returns:
            The turned queries, [T, Hq, D].

        Raises:
            ValueError: a shape, dtype or device does not fit, or (on the CPU) a position or a slot does not exist.
        """
        ...

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up: both [T, F], in one dtype -> [T, F].

        Raises:
            ValueError: they do not fit each other.
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
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        return scaled.to(x.dtype).contiguous()

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
        num_slots = k_pool.shape[0] * k_pool.shape[2]
        check_places(positions, slots, table_positions=cos.shape[0], num_slots=num_slots)
        cos, sin = (table[positions][:, None] for table in (cos, sin))
        block_ops.write(k_pool, v_pool, _turned(k, cos, sin), v, slots, k_scale=k_scale, v_scale=v_scale)
        return _turned(q, cos, sin).to(q.dtype).contiguous()

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """See `SmallOps`."""
        check_gated(gate, up)
        return (silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D] by cos and sin [T, 1, D], in float32."""
    wide = x.float()
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
