"""Load a model with transformers: safetensors only, no code of the model's own, weights mapped from the file.

A weight that keeps its dtype on a CPU is a page of the file, so two workers of one machine hold it once; the fast road
packs copies of its own.
"""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from octavo.models import ModelFolder, adapter_in, weight_files
from worker.kernels import Attend, choose, native_build, small_ops
from worker.kv_pool import PoolShape
from worker.model import linear, llama_weights, lora
from worker.model.batch import Forward
from worker.model.generic import ATTENTION, GenericModel, UnsupportedModel, longest_text, probe
from worker.model.llama import LlamaModel

log = logging.getLogger("octavo.worker")

Road = Literal["auto", "fast", "generic"]
"""How a model runs: as our own layers, or as transformers' unchanged; auto is the first where it knows the model."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}

_RECURRENT = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "lightning_attention", "hybrid"}
_RECURRENT_MODELS = {"rwkv", "xlstm"}
_ALIBI = {"bloom", "mpt"}
_MOVING_ROPE = {"dynamic", "longrope"}
"""What these wrote at one length would be read as if written at another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and the pool it needs."""

    forward: Forward
    shape: PoolShape
    dtype: torch.dtype
    device: torch.device


def device_of(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ValueError if CUDA is asked for and is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is asked for, and torch finds none")
    return torch.device(name)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16, but float32 on a CPU that would have to emulate it."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" and not _multiplies_bfloat16() else torch.bfloat16
    return DTYPES[name]


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, of AVX-512 or AMX."""
    return not native_build.cpu_features().isdisjoint({"avx512_bf16", "amx_bf16"})


def kv_dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """`auto` is the model's own `dtype`."""
    return dtype if name == "auto" else KV_DTYPES[name]


def load(  # noqa: PLR0913 - by keyword, each of its own kind
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: torch.device,
    block_size: int,
    attend: Attend | None = None,
    road: Road = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """The model of a folder, with our attention in it: `attend`, or by default the fastest there is here.

    Its adapter is merged into the weights, so that both roads run it at no cost.

    Its pool is of `kv_dtype`, by default of `dtype`. `deterministic` gives a sequence the same bits in any company, as
    the fast road alone can.

    Raises:
        UnsupportedModel: the model needs what our attention cannot do, or what the road that is asked for cannot; said
            before its weights are read where its config tells.
        ValueError: the folder cannot be read, or lacks a weight; its adapter is none that can be merged.
        FileNotFoundError: a weight file is missing.
    """
    weight_files(folder.path)
    adapter = None if folder.adapter is None else lora.read(folder.adapter.path)
    with _reading(folder):
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    if (reason := refusal(config)) is not None:
        raise UnsupportedModel(f"{folder.name} is not served: {reason}")
    fast = _takes_fast_road(folder, config, road)
    if deterministic and not fast:
        raise UnsupportedModel(
            f"{folder.name} cannot be deterministic: on the generic road products are transformers' own, "
            "which may round by the size of a batch"
        )
    text = config.get_text_config(decoder=True)
    shape = PoolShape(
        num_layers=text.num_hidden_layers,
        kv_heads=_kv_heads(text),
        block_size=block_size,
        head_dim=_head_dim(text),
        dtype=kv_dtype or dtype,
    )
    model = _load_weights(folder, dtype, device)
    if adapter is not None:
        adapter.merge_into(model)
        _require_unchanged(folder)
    windows = _windows(text)
    options = probe(model, shape, windows)
    attend = attend or choose(device=device, dtype=dtype, kv_dtype=kv_dtype, head_dim=shape.head_dim, options=options)
    forward: Forward
    if fast:
        make_linear = linear.choose(device=device, dtype=dtype, deterministic=deterministic)
        weights = llama_weights.take(model, make_linear, windows)
        _return_freed_memory()
        forward = LlamaModel(weights, attend, small_ops.choose(device=device, dtype=dtype, kv_dtype=kv_dtype))
    else:
        forward = GenericModel(model, attend)
    return LoadedModel(forward=forward, shape=shape, dtype=dtype, device=device)


def _require_unchanged(folder: ModelFolder) -> None:
    """What was merged is what the fleet is told: a version that came meanwhile would pass for the one before it."""
    if folder.adapter is not None and adapter_in(folder.adapter.path) != folder.adapter:
        raise ValueError(f"{folder.adapter.path}: other files came while the model was loaded; start again")


def _return_freed_memory() -> None:
    """Give the system what the original weights took: they were freed piece by piece, and glibc keeps such pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _takes_fast_road(folder: ModelFolder, config: PreTrainedConfig, road: Road) -> bool:
    """Log which road the model takes, and why. Raises UnsupportedModel if it cannot take the one asked for."""
    if road == "generic":
        reason = "asked for"
    elif (reason := llama_weights.misfit(config)) is None:
        log.info("model_road", extra={"road": "fast", "reason": f"{config.model_type} is of the Llama family"})
        return True
    elif road == "fast":
        raise UnsupportedModel(f"{folder.name} cannot take the fast road: {reason}")
    log.info("model_road", extra={"road": "generic", "reason": reason})
    return False


def refusal(config: PreTrainedConfig) -> str | None:
    """Why our attention cannot serve a model of this config; None where the config tells nothing against it."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder, and we serve decoders"
    text = config.get_text_config(decoder=True)
    return _refused_layers(text) or _refused_scores(text) or _refused_heads(text)


def _refused_layers(text: PreTrainedConfig) -> str | None:
    kinds = set(getattr(text, "layer_types", None) or ())
    if text.model_type in _RECURRENT_MODELS:
        return "it is recurrent: its state is not keys and values"
    if recurrent := sorted(kinds & _RECURRENT):
        return f"it has layers of {', '.join(recurrent)}, whose state is not keys and values"
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        return "it has cross attention"
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of {', '.join(unknown)}"
    return None


def _refused_scores(text: PreTrainedConfig) -> str | None:
    if getattr(text, "alibi", False) or text.model_type in _ALIBI:
        return "it knows positions by ALiBi"
    if moving := sorted(_rope_types(text) & _MOVING_ROPE):
        return f"its rotary positions ({', '.join(moving)}) change with the longest text of a batch"
    return None


def _rope_types(text: PreTrainedConfig) -> set[str]:
    """The kinds of rotary positions: one for all layers, or one for each kind of layer."""
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind}


def _refused_heads(text: PreTrainedConfig) -> str | None:
    if getattr(text, "kv_lora_rank", None):
        return "it keeps latents in place of keys and values"
    try:
        heads, kv_heads, _ = text.num_attention_heads, _kv_heads(text), _head_dim(text)
    except Exception as unknown:  # some configs refuse to name what differs from layer to layer
        return f"its config names no one shape for the heads of all layers: {str(unknown).partition('. ')[0]}"
    if heads % kv_heads:
        return f"its {heads} query heads are no multiple of its {kv_heads} key/value heads"
    return None


def _windows(text: PreTrainedConfig) -> list[int | None]:
    """Of every layer, the positions that a query sees, itself among them; None where that is all there can be."""
    window: int | None = getattr(text, "sliding_window", None)
    in_force = window is not None and window < longest_text(text)
    kinds: list[str] | None = getattr(text, "layer_types", None)
    if kinds is None:
        slides = in_force and getattr(text, "use_sliding_window", True)
        return [window if slides else None] * text.num_hidden_layers
    return [window if in_force and kind == "sliding_attention" else None for kind in kinds]


def _kv_heads(text: PreTrainedConfig) -> int:
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _head_dim(text: PreTrainedConfig) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _load_weights(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    with _reading(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True, **options
        )
    model, told = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if missing := sorted(told["missing_keys"]):  # transformers has drawn them at random, and only warns
        raise ValueError(f"{folder.path} lacks {len(missing)} weights of the model, among them {missing[0]}")
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


@contextmanager
def _reading(folder: ModelFolder) -> Iterator[None]:
    """Damaged files fail their readers in any way; say which folder it is. The traceback is chained."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError | KeyError) and ATTENTION in str(error):  # no attention of that name
            raise UnsupportedModel(f"{folder.name} is not served: it has attention code of its own") from error
        why = (str(error).strip().splitlines() or ["no message"])[0]
        raise ValueError(f"{folder.path} cannot be loaded: {type(error).__name__}: {why}") from error
