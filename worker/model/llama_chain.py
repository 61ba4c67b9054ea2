"""The layers of a decode step as one chain of native calls, where all of the fast road is native.

A step is laid out as the layers run it: in place where a result is no longer wanted once the next is there. What the
calls compute is what the road computes call by call, to the bit.
"""

import logging
from collections.abc import Mapping
from typing import cast

import torch

from worker.kernels import Attend, AttendStep, native_chain
from worker.kernels.native import NativeAttendStep, NativeAttention
from worker.kernels.native_build import NativeUnavailable
from worker.kernels.native_chain import Chain
from worker.kernels.native_products import NativeProduct
from worker.kernels.native_small_ops import NativeRopeStep, NativeSmallOps
from worker.kernels.small_ops import RopeStep, SmallOps
from worker.model.llama_weights import LlamaWeights

log = logging.getLogger("octavo.worker")


def chained(weights: LlamaWeights, attend: Attend, ops: SmallOps) -> "ChainedLayers | None":
    """The layers as a chain; None, and the reason logged, where a part of the road is not native code."""
    reason = _obstacle(weights, attend, ops)
    backend, reason = ("chain", "all of a layer is native code") if reason is None else ("calls", reason)
    log.info("layer_backend", extra={"backend": backend, "reason": reason})
    return ChainedLayers(weights, cast(NativeSmallOps, ops)) if backend == "chain" else None


def _obstacle(weights: LlamaWeights, attend: Attend, ops: SmallOps) -> str | None:
    products = [weights.head]
    for layer in weights.layers:
        products += (layer.qkv, layer.out, layer.gate_up, layer.down)
    if not all(isinstance(product, NativeProduct) and product.takes_rows_as_they_lie for product in products):
        return "products are not, or fill up their rows"
    if not isinstance(attend, NativeAttention) or not isinstance(ops, NativeSmallOps):
        return "attention or a small operation is not"
    try:
        native_chain.load()
    except NativeUnavailable as unavailable:
        return str(unavailable)
    return None


class ChainedLayers:
    """From the embedded tokens to the logits of all of them."""

    def __init__(self, weights: LlamaWeights, ops: NativeSmallOps) -> None:
        self._weights = weights
        self._ops = ops

    def __call__(
        self, residual: torch.Tensor, rope: RopeStep, attend: Mapping[int | None, AttendStep], head_dim: int
    ) -> torch.Tensor:
        """Logits [T, V] of `residual` [T, E], which is used up; `rope` and `attend` are prepared for the step."""
        weights, ops = self._weights, self._ops
        first, new = weights.layers[0], residual.new_empty
        tokens, width = residual.shape
        assert isinstance(rope, NativeRopeStep)
        hidden, packed = new((tokens, width)), new((tokens, _columns(first.qkv)))
        q = new((tokens, weights.heads, head_dim))
        attended = torch.empty_like(q)
        gate_up = new((tokens, _columns(first.gate_up)))
        gated = new((tokens, gate_up.shape[1] // 2))
        logits = new((tokens, _columns(weights.head)), dtype=_native(weights.head).dtype)
        chain = Chain()

        def multiply(product: object, x: torch.Tensor, out: torch.Tensor) -> None:
            chain.add(_native(product).into(x, out))

        chain.add(ops.rms_norm_into(hidden, residual, weights.first_norm, weights.eps, None))
        for index, layer in enumerate(weights.layers):
            attend_step = attend[layer.window]
            assert isinstance(attend_step, NativeAttendStep)
            multiply(layer.qkv, hidden, packed)
            chain.add(rope.into(q, index, packed, layer.head_norms), rope.unsound)
            chain.add(
                attend_step.into(attended, index, q),
                lambda outcome, step=attend_step, index=index: step.failure(index, q, outcome),
            )
            multiply(layer.out, attended.flatten(1), hidden)
            chain.add(ops.rms_norm_into(hidden, hidden, layer.mlp_norm, weights.eps, residual))
            multiply(layer.gate_up, hidden, gate_up)
            chain.add(ops.silu_mul_into(gated, gate_up))
            multiply(layer.down, gated, hidden)
            chain.add(ops.rms_norm_into(hidden, hidden, layer.next_norm, weights.eps, residual))
        multiply(weights.head, hidden, logits)
        chain.run()
        return logits


def _columns(product: object) -> int:
    return _native(product).columns


def _native(product: object) -> NativeProduct:
    assert isinstance(product, NativeProduct)
    return product
