"""The fast road: a model of the Llama family as four products a layer, attention, and what stands between them.

Against the generic road it saves what transformers does beside computing: several times as many calls, and a pass
over memory in each. Its meaning is the same; in float32 its logits are the generic road's but for rounding.

A step has no branch on values and makes no copy to the host, so on a GPU it can be captured as a graph.
"""

import torch
from torch.nn.functional import embedding

from worker.kernels import Attend, AttendStep, prepare
from worker.kernels.small_ops import RopeStep, SmallOps
from worker.kv_pool import KVPool
from worker.model.batch import Batch
from worker.model.llama_chain import chained
from worker.model.llama_weights import LlamaWeights


class LlamaModel:
    """A model as `worker.model.batch.Forward`."""

    def __init__(self, weights: LlamaWeights, attend: Attend, ops: SmallOps) -> None:
        """Run `weights`; `attend` and `ops` take their dtype, on their device."""
        self.vocab_size = len(weights.embedding)
        self._weights = weights
        self._attend = attend
        self._ops = ops
        self._chained = chained(weights, attend, ops)
        self._windows = {layer.window for layer in weights.layers}
        self._float = torch.empty(0, device=weights.embedding.device)
        """Tells the rotary embedding its device, and float32."""

    def __call__(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Logits [R, V] of `batch.logit_rows`; the batch's keys and values are in the pool afterwards."""
        weights, ops, rows = self._weights, self._ops, batch.logit_rows
        residual = embedding(batch.ids[0], weights.embedding)
        rope = self._rope(batch, pool)
        attend = self._attention(batch, pool)
        if self._chained is not None and len(rows) == len(residual):  # a decode: all rows, in their order
            return self._chained(residual, rope, attend, pool.shape.head_dim)
        hidden = ops.rms_norm(residual, weights.first_norm, weights.eps)
        last = weights.layers[-1]
        for index, layer in enumerate(weights.layers):
            q = rope(index, layer.qkv(hidden), layer.head_norms)
            if layer is last and not len(rows):
                return residual.new_empty((0, self.vocab_size))
            attended = attend[layer.window](index, q).flatten(1)
            if layer is last:  # nothing but keys and values is wanted of the other rows
                attended, residual = attended[rows], residual[rows]
            hidden = ops.rms_norm(layer.out(attended), layer.mlp_norm, weights.eps, residual=residual)
            gated = ops.silu_mul(layer.gate_up(hidden))
            hidden = ops.rms_norm(layer.down(gated), layer.next_norm, weights.eps, residual=residual)
        return weights.head(hidden)

    def _rope(self, batch: Batch, pool: KVPool) -> RopeStep:
        weights = self._weights
        cos, sin = weights.rotary(self._float, batch.positions)
        tokens = torch.arange(batch.ids.shape[1], device=self._float.device)  # each has its own row of angles
        dtype = weights.embedding.dtype
        return self._ops.prepare_rope(
            pool.planes, cos[0], sin[0], tokens, batch.slots, heads=weights.heads, dtype=dtype
        )

    def _attention(self, batch: Batch, pool: KVPool) -> dict[int | None, AttendStep]:
        """A prepared step for each window that some layer has."""
        size = batch.ids.shape[1], self._weights.heads, pool.shape.head_dim
        q_like = self._weights.embedding.new_empty(size)
        plan = (batch.tables, batch.lengths, batch.query_starts)
        return {
            window: prepare(
                self._attend,
                pool.planes,
                *plan,
                self._weights.scale,
                q_like=q_like,
                window=window,
                shared=batch.shared,
            )
            for window in self._windows
        }
