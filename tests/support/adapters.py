"""LoRA adapters in peft's format, with matrices drawn from a seed, and models with one beside their weights."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

_PREFIX = "base_model.model."


def save_adapter(
    folder: Path,
    base: Path,
    seed: int = 0,
    *,
    targets: Iterable[str] = (*ATTENTION, *MLP),
    size: float = 0.05,
    ranks: dict[str, int] | None = None,
    turned: bool = False,
    **config: Any,
) -> Path:
    """An adapter for those modules of the model in `base` whose names end so. Returns `folder`.

    Args:
        folder: where to save it.
        base: a model of one weight file.
        seed: what its matrices are drawn from.
        targets: ends of names.
        size: standard deviation of what is drawn.
        ranks: of modules that have another one than `r`, by their whole names.
        turned: weights of `base` are [inputs, outputs].
        config: fields of `adapter_config.json` beside those of a plain one of rank 4.
    """
    targets = list(targets)
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": targets} | config
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, shape in _linear_shapes(base, targets):
        outputs, inputs = reversed(shape) if turned else shape
        rank = (ranks or {}).get(module, facts["r"])
        for side, size_of_side in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"{_PREFIX}{module}.lora_{side}.weight"] = size * torch.randn(size_of_side, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def _linear_shapes(base: Path, targets: list[str]) -> Iterable[tuple[str, list[int]]]:
    with safe_open(base / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            module = name.removesuffix(".weight")
            if module != name and any(f".{module}".endswith(f".{target}") for target in targets):
                yield module, weights.get_slice(name).get_shape()


def products(folder: Path) -> dict[str, torch.Tensor]:
    """B A of every module, [outputs, inputs]."""
    return {module: b @ a for module, a, b in _pairs(folder)}


def run_beside(model: nn.Module, folder: Path) -> None:
    """Let an adapter of one rank and one alpha run beside the weights, which stay: W x + alpha / r B A x."""
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, a, b in _pairs(folder):
        model.get_submodule(name).register_forward_hook(_adding(a, config["lora_alpha"] / config["r"] * b))


def _adding(a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda module, inputs, output: output + inputs[0] @ a.T @ b.T


def _pairs(folder: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each module with its A and B."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in sorted(tensors):
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            yield module, tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")]
