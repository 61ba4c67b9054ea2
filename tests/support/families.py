"""One tiny model of every family that is served, each with what makes it differ from a plain Llama in force.

Windows are far shorter than the texts of the tests, heads are as long as the family's own where that matters, and
routers choose among more experts than they take.
"""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.support.tiny_model import SHAPE, VOCAB_SIZE

WINDOW = 24
"""Positions: neither a whole number of blocks nor fewer than one."""

_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPER: dict[str, Any] = {"num_hidden_layers": 4}
_OWN_NAMES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 2}
_WIDE: dict[str, Any] = {"initializer_range": 0.3}


def config(family: str, **fields: Any) -> PreTrainedConfig:
    """A family's config with the tiny shape."""
    return getattr(transformers, f"{family}Config")(**(SHAPE | fields))


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": config("Llama", tie_word_embeddings=True),
    "mistral": config("Mistral", sliding_window=WINDOW),
    "qwen2": config("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": config("Qwen3", tie_word_embeddings=False, use_sliding_window=False),
    "phi3": config("Phi3", sliding_window=WINDOW),
    "gemma": config("Gemma"),
    "gemma2": config(
        "Gemma2", sliding_window=WINDOW, head_dim=256, query_pre_attn_scalar=256, tie_word_embeddings=False
    ),
    "gemma3": config(
        "Gemma3Text",
        sliding_window=WINDOW,
        num_hidden_layers=6,  # the last attends to all
        head_dim=256,
        query_pre_attn_scalar=256,
        tie_word_embeddings=False,
    ),
    "gpt-oss": config("GptOss", sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "mixtral": config("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": config("Qwen2Moe", **_MOE, shared_expert_intermediate_size=32, use_sliding_window=False),
    "qwen3-moe": config("Qwen3Moe", **_MOE, use_sliding_window=False),
    "olmoe": config("Olmoe", num_experts=4, num_experts_per_tok=2, hidden_size=128),
    "gpt-neox": config("GPTNeoX", num_attention_heads=2, rotary_pct=0.25, use_parallel_residual=True),
    "gpt-j": transformers.GPTJConfig(**_OWN_NAMES, **_WIDE, rotary_dim=16),
    "phi": config("Phi", partial_rotary_factor=0.5),
    "cohere2": config("Cohere2", **_DEEPER, sliding_window=WINDOW),
    "granite": config("Granite", attention_multiplier=0.3),  # a scale of its own
    "olmo2": config("Olmo2"),
    "starcoder2": config("Starcoder2", sliding_window=WINDOW),
    "gpt2": transformers.GPT2Config(**_OWN_NAMES, **_WIDE),
    "gpt-bigcode": transformers.GPTBigCodeConfig(**_OWN_NAMES, **_WIDE),  # one key/value head for all
    "opt": transformers.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        init_std=0.3,
    ),
}
