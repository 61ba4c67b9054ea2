"""Any decoder of transformers on a paged pool, its code unchanged.

transformers lets a model's attention be replaced by name. Ours writes the step's keys and values into the pool and
attends through the block tables. As no mask is registered under that name, transformers builds none.

What our attention cannot do (yet) is refused here, by the keyword that asks for it, and a probe of two tokens when
the model is set up makes sure that every layer came by: a layer that keeps its state elsewhere would be served wrong.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from worker.kernels import Attend
from worker.kv_pool import KVPool, PoolShape
from worker.model.batch import Batch

ATTENTION = "octavo_paged"
"""What transformers calls our attention: load a model with `attn_implementation=ATTENTION`."""

_REFUSED = {
    "softcap": "a soft cap on its attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias on its attention scores",
    "alibi": "ALiBi",
}


class UnsupportedModel(ValueError):
    """The model needs what our attention cannot do; the message names both."""


class GenericModel:
    """A model of transformers as `worker.model.batch.Forward`."""

    def __init__(self, model: PreTrainedModel, attend: Attend, shape: PoolShape) -> None:
        """Take a model that was loaded with our attention, and probe it.

        Args:
            model: on its device, in its dtype.
            attend: reads pools of this `shape`.
            shape: one layer for every attention layer of the model.

        Raises:
            UnsupportedModel: the probe met something that our attention cannot do.
        """
        self.vocab_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        self._model = model
        self._attend = attend
        self._probe(shape)

    def __call__(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Logits [R, V] of `batch.logit_rows`; the batch's keys and values are in the pool afterwards."""
        return self._run(batch, _Step(batch, pool, self._attend))

    def _run(self, batch: Batch, step: "_Step") -> torch.Tensor:
        output = self._model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            octavo_step=step,
        )
        return output.logits[0]

    @torch.inference_mode()
    def _probe(self, shape: PoolShape) -> None:
        """Run two tokens on a pool of their own, and see that every layer attended once."""
        device = self._model.device
        pool = KVPool(shape, num_blocks=2, device=device)

        def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        batch = Batch(
            ids=ints(0, 0)[None],
            positions=ints(0, 1)[None],
            slots=ints(0, 1),
            tables=ints(0, 1, dtype=torch.int32)[None],
            lengths=ints(2, dtype=torch.int32),
            query_starts=ints(0, 2, dtype=torch.int32),
            logit_rows=ints(1),
        )
        step = _Step(batch, pool, self._attend)
        name = type(self._model).__name__
        try:
            self._run(batch, step)
        except UnsupportedModel as refusal:
            raise UnsupportedModel(f"{name} wants {refusal}, which our attention cannot do yet") from refusal
        except Exception as failure:  # code that we do not know may fail in any way; its traceback is chained
            what = f"{type(failure).__name__}: {failure}"
            raise UnsupportedModel(f"{name} does not run on our attention: {what}") from failure
        if step.layers != list(range(shape.num_layers)):
            raise UnsupportedModel(
                f"{name} sent layers {step.layers} through transformers' attention interface, "
                f"wanted each of {shape.num_layers} once, in order"
            )


class _Step:
    """What one forward pass hands to the attention of every layer."""

    __slots__ = ("_attend", "_batch", "_pool", "layers")

    def __init__(self, batch: Batch, pool: KVPool, attend: Attend) -> None:
        self._batch = batch
        self._pool = pool
        self._attend = attend
        self.layers: list[int] = []
        """Layers that attended, in order."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Write one layer's k, v [T, Hkv, D] and attend with q [T, Hq, D] -> [T, Hq, D]."""
        self.layers.append(layer)
        batch = self._batch
        self._pool.write(layer, k, v, batch.slots)
        pools = self._pool.layer(layer)
        plan = (batch.tables, batch.lengths, batch.query_starts)
        return self._attend(q, *pools, *plan, scale, shared=batch.shared)


def _paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    octavo_step: _Step,
    scaling: float | None = None,
    dropout: float = 0.0,
    **wishes: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, Hq, T, D]; key, value [1, Hkv, T, D] -> [1, T, Hq, D], and no weights."""
    _refuse(module, key, value, attention_mask, wishes)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return octavo_step.attend(module.layer_idx, q, k, v, scale)[None], None  # type: ignore[arg-type]


def _refuse(
    module: nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    wishes: dict[str, Any],
) -> None:
    """Raise `UnsupportedModel`, saying what is wanted, where plain causal attention will not do."""
    for name, meaning in _REFUSED.items():
        if wishes.get(name) is not None:
            raise UnsupportedModel(meaning)
    window = wishes.get("sliding_window")
    if window is not None and window < cast(PreTrainedConfig, module.config).max_position_embeddings:
        raise UnsupportedModel(f"a sliding window of {window} positions")
    if attention_mask is not None:
        raise UnsupportedModel("an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("attention to later positions")
    if value.shape != key.shape:
        raise UnsupportedModel(f"keys of {key.shape[-1]} elements and values of {value.shape[-1]}")


AttentionInterface.register(ATTENTION, _paged_attention)
