"""Any decoder of transformers on a paged pool, its code unchanged.

transformers lets a model's attention be replaced by name. Ours writes the step's keys and values into the pool and
attends through the block tables. As no mask is registered under that name, transformers builds none: what a mask would
have said (causal, a sliding window) is an option of the kernels, as are soft caps and sinks.

A probe of two tokens, when the model is set up, finds out what every layer wants. It makes sure that each layer came
by, since one that keeps its state elsewhere would be served wrong; that each told the window that its config speaks of,
since a model may tell that to the mask alone; and that nothing was wanted that the kernels do not know.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from worker.kernels import Attend, AttendStep, Option, Options, options_of, prepare, reference
from worker.kv_pool import KVPool, PoolShape
from worker.model.batch import Batch

ATTENTION = "octavo_paged"
"""What transformers calls our attention: load a model with `attn_implementation=ATTENTION`."""

_REFUSED = {
    "position_bias": "a bias on its attention scores",
    "alibi": "ALiBi",
    "indices": "attention to chosen positions",
    "block_indices": "attention to chosen positions",
}
"""Wishes that have a name. None is granted but the options of `worker.kernels` and the harmless ones."""

_HARMLESS = frozenset({"is_causal", "position_ids", "hidden_states", "use_cache", "output_attentions"})
"""Keywords that layers pass on, and that change nothing where attention is causal."""


class UnsupportedModel(ValueError):
    """The model needs what our attention cannot do; the message names both."""


class GenericModel:
    """A model of transformers as `worker.model.batch.Forward`."""

    def __init__(self, model: PreTrainedModel, attend: Attend) -> None:
        """Take a model that was loaded with our attention, is on its device, in its dtype, and was probed."""
        self.vocab_size = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
        self._model = model
        self._attend = attend

    def __call__(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Logits [R, V] of `batch.logit_rows`; the batch's keys and values are in the pool afterwards."""
        return _run(self._model, _Step(batch, pool, self._attend))


def probe(model: PreTrainedModel, shape: PoolShape, windows: Sequence[int | None]) -> frozenset[Option]:
    """Run two tokens on a pool of their own: the options that the model's attention asks for.

    Args:
        model: loaded with our attention.
        shape: one layer for every attention layer of the model.
        windows: by its config, the positions that a query of each layer sees; None for all.

    Raises:
        UnsupportedModel: the model wants what our attention cannot do.
    """
    step = _Step(_two_tokens(model.device), KVPool(shape, num_blocks=2, device=model.device), reference.attend)
    name = type(model).__name__
    try:
        with torch.inference_mode():
            _run(model, step)
    except UnsupportedModel as refusal:
        raise UnsupportedModel(f"{name} wants {refusal}, which our attention cannot do") from refusal
    except Exception as failure:  # code that we do not know may fail in any way; its traceback is chained
        what = f"{type(failure).__name__}: {failure}"
        raise UnsupportedModel(f"{name} does not run on our attention: {what}") from failure
    layers = [layer for layer, _ in step.asked]
    if layers != list(range(shape.num_layers)):
        raise UnsupportedModel(
            f"{name} sent layers {layers} through transformers' attention interface, "
            f"wanted each of {shape.num_layers} once, in order"
        )
    _check_windows(name, [options.get("window") for _, options in step.asked], windows)
    return frozenset[Option]().union(*(options_of(options) for _, options in step.asked))


def _two_tokens(device: torch.device) -> Batch:
    def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        ids=ints(0, 0)[None],
        positions=ints(0, 1)[None],
        slots=ints(0, 1),
        tables=ints(0, 1, dtype=torch.int32)[None],
        lengths=ints(2, dtype=torch.int32),
        query_starts=ints(0, 2, dtype=torch.int32),
        logit_rows=ints(1),
    )


def _check_windows(name: str, told: Sequence[int | None], windows: Sequence[int | None]) -> None:
    for layer, (asked, wanted) in enumerate(zip(told, windows, strict=True)):
        if asked != wanted:
            raise UnsupportedModel(
                f"layer {layer} of {name} sees {wanted or 'all'} positions by its config, "
                f"and asked our attention for {asked or 'all'}"
            )


def _run(model: PreTrainedModel, step: "_Step") -> torch.Tensor:
    batch = step.batch
    output = model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        use_cache=False,
        logits_to_keep=batch.logit_rows,
        octavo_step=step,
    )
    return output.logits[0]


class _Step:
    """What one forward pass hands to the attention of every layer."""

    __slots__ = ("_attend", "_pool", "_prepared", "asked", "batch")

    def __init__(self, batch: Batch, pool: KVPool, attend: Attend) -> None:
        self.batch = batch
        self._pool = pool
        self._attend = attend
        self._prepared: dict[object, AttendStep] = {}
        """By what layers have in common; sinks are a layer's own."""
        self.asked: list[tuple[int, Options]] = []
        """Layers that attended, in order, and with what."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, options: Options
    ) -> torch.Tensor:
        """Write one layer's k, v [T, Hkv, D] and attend with q [T, Hq, D] -> [T, Hq, D]."""
        batch = self.batch
        options["shared"] = batch.shared
        self.asked.append((layer, options))
        self._pool.write(layer, k, v, batch.slots)
        own = layer if "sinks" in options else None
        like = (q.shape, q.stride(), scale, options.get("window"), options.get("soft_cap"), own)
        if like not in self._prepared:
            plan = (batch.tables, batch.lengths, batch.query_starts)
            self._prepared[like] = prepare(self._attend, self._pool.planes, *plan, scale, q_like=q, **options)
        return self._prepared[like](layer, q)


def _paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    octavo_step: _Step | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **wishes: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, Hq, T, D]; key, value [1, Hkv, T, D] -> [1, T, Hq, D], and no weights."""
    if octavo_step is None:
        raise UnsupportedModel("attention without the keywords that the model was called with")
    if attention_mask is not None:
        raise UnsupportedModel("an attention mask of its own")
    if not getattr(module, "is_causal", True) or wishes.get("is_causal") is False:
        raise UnsupportedModel("attention to later positions")
    if value.shape != key.shape:
        raise UnsupportedModel(f"keys of {key.shape[-1]} elements and values of {value.shape[-1]}")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return octavo_step.attend(module.layer_idx, q, k, v, scale, _options(module, wishes))[None], None  # type: ignore[arg-type]


def _options(module: nn.Module, wishes: dict[str, Any]) -> Options:
    """What a layer wishes for, in the words of our kernels. Raises UnsupportedModel if they have none for it."""
    told = {name: value for name, value in wishes.items() if value is not None and value is not False}
    asked = {name: told[name] for name in told.keys() - _HARMLESS}
    options = Options()
    if (window := asked.pop("sliding_window", None)) is not None and window < longest_text(module.config):
        options["window"] = window
    if (soft_cap := asked.pop("softcap", None)) is not None:
        options["soft_cap"] = soft_cap
    if (sinks := asked.pop("s_aux", None)) is not None:
        options["sinks"] = sinks.detach().float()
    if asked:
        unknown = min(asked)
        raise UnsupportedModel(_REFUSED.get(unknown, f"what it calls {unknown}"))
    return options


def longest_text(config: Any) -> int:
    """Positions that a model can tell apart; a window as long as that is never in force."""
    return getattr(config, "max_position_embeddings", None) or 2**31


AttentionInterface.register(ATTENTION, _paged_attention)
