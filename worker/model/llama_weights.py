"""What the fast road takes from a model of the Llama family that transformers has loaded, fused for few large products.

Members differ in little: biases on the projections (Qwen2), norms of each head (Qwen3), a head tied to the embedding,
sliding windows, projections that come fused already (Phi-3). Their rotary embedding is taken as it is, so the angles
are transformers' to the bit, whatever scaling they come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from worker.kernels.small_ops import HeadNorms
from worker.model.linear import Linear, MakeLinear, unrounded

FAMILY = frozenset({"llama", "mistral", "ministral", "qwen2", "qwen3", "phi3"})
"""Values of `model_type` whose layers are this one: norm, attention, norm, SiLU-gated MLP, two residual sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer; norms are [E]."""

    qkv: Linear
    """[T, E] -> [T, (Hq + 2 Hkv) * D]: queries, keys, values."""
    head_norms: HeadNorms | None
    window: int | None
    """Positions that a query sees, itself among them; None for all."""
    out: Linear
    """[T, Hq * D] -> [T, E]."""
    mlp_norm: torch.Tensor
    gate_up: Linear
    """[T, E] -> [T, 2 F]: all of the gate first."""
    down: Linear
    """[T, F] -> [T, E]."""
    next_norm: torch.Tensor
    """Of what comes after: the next layer's attention, or the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """A whole model."""

    embedding: torch.Tensor
    """[V, E]."""
    rotary: nn.Module
    """transformers' own: (anything of the wanted dtype and device, positions [1, T]) -> cos and sin, [1, T, D]."""
    first_norm: torch.Tensor
    """[E], of the first layer's attention."""
    layers: tuple[Layer, ...]
    head: Linear
    """[R, E] -> [R, V], in float32 where that costs nothing."""
    heads: int
    scale: float
    """Of attention scores."""
    eps: float
    """Of the norms."""


def misfit(config: PreTrainedConfig) -> str | None:
    """None, or why a model of this config is none that this road knows."""
    if config.model_type not in FAMILY:
        return f"{config.model_type} is not one of {', '.join(sorted(FAMILY))}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its MLP has {config.hidden_act}, not SiLU"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return None if share == 1.0 else f"it turns {share} of each head, not all"


def take(model: PreTrainedModel, make_linear: MakeLinear, windows: Sequence[int | None]) -> LlamaWeights:
    """Fuse the weights, layer by layer, and free each original once it is taken: `model` cannot run afterwards.

    Args:
        model: of the family, on its device, in its dtype.
        make_linear: holds the products' weights.
        windows: of each layer.
    """
    modules: Any = model.model
    layers = list(modules.layers)
    norms = [_weight(layer.input_layernorm) for layer in layers] + [_weight(modules.norm)]
    attention = layers[0].self_attn
    return LlamaWeights(
        embedding=_weight(modules.embed_tokens),
        rotary=modules.rotary_emb,
        first_norm=norms[0],
        layers=tuple(
            _take_layer(layer, make_linear, window=window, next_norm=norm)
            for layer, window, norm in zip(layers, windows, norms[1:], strict=True)
        ),
        head=unrounded(_fused(make_linear, model.lm_head)),
        heads=model.config.num_attention_heads,
        scale=attention.scaling,
        eps=modules.norm.variance_epsilon,
    )


def _take_layer(layer: Any, make_linear: MakeLinear, *, window: int | None, next_norm: torch.Tensor) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    taken = Layer(
        qkv=_fused(make_linear, *_parts(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")),
        head_norms=_head_norms(attention),
        window=window,
        out=_fused(make_linear, attention.o_proj),
        mlp_norm=_weight(layer.post_attention_layernorm),
        gate_up=_fused(make_linear, *_parts(mlp, "gate_up_proj", "gate_proj", "up_proj")),
        down=_fused(make_linear, mlp.down_proj),
        next_norm=next_norm,
    )
    layer.to("meta")
    return taken


def _parts(module: Any, fused: str, *names: str) -> list[nn.Linear]:
    return [getattr(module, name) for name in ([fused] if hasattr(module, fused) else names)]


def _fused(make_linear: MakeLinear, *parts: nn.Linear) -> Linear:
    """One product in place of several of the same input; all have a bias or none has."""
    if len(parts) == 1:
        return make_linear(_weight(parts[0]), None if parts[0].bias is None else parts[0].bias.detach())
    biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), f"{len(biases)} of {len(parts)} projections have a bias"
    weight = torch.cat([_weight(part) for part in parts])
    return make_linear(weight, torch.cat(biases) if biases else None)


def _head_norms(attention: Any) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    return HeadNorms(_weight(attention.q_norm), _weight(attention.k_norm), attention.q_norm.variance_epsilon)


def _weight(module: Any) -> torch.Tensor:
    return module.weight.detach()
