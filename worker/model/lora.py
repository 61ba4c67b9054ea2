"""A LoRA adapter, merged into the weights of a model when it is loaded: W + s B A, with s = alpha / r.

The files are those that peft saves. A model with an adapter in it is a model like any other: it is packed, captured and
run by the same code, at the same speed. Sums are taken in float32 and rounded once.

LoRA: Hu et al., 2021 (arXiv 2106.09685); s = alpha / sqrt(r): Kalajdzievski, 2023 (rsLoRA, arXiv 2312.03732). What the
fields of the config mean is peft's to say; those that we do not know how to merge are refused, never ignored.
"""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS

log = logging.getLogger("octavo.worker")

_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # how a weight lies is seen by its module, as peft itself corrects it
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that tell how the adapter was trained, or what its matrices tell as well: these change no sum."""

_UNSET = (None, False, "", [], {})


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    return pattern


def _ending(key: str) -> str:
    """A pattern for the names of modules that end with `key`, from a dot on."""
    return rf"(.*\.)?({key})$"


def _compiled_ending(key: str) -> str:
    _compiled(_ending(key))
    return key


def _of_float32(value: float) -> float:
    largest = torch.finfo(torch.float32).max
    if abs(value) > largest:
        raise ValueError(f"float32 ends at {largest:.4g}")
    return value


_Pattern = Annotated[str, AfterValidator(_compiled)]
_Ending = Annotated[str, AfterValidator(_compiled), AfterValidator(_compiled_ending)]
_Rank = Annotated[int, Field(ge=1)]
_T = TypeVar("_T")
_Alpha = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_of_float32)]


class _Config(BaseModel):
    """What of `adapter_config.json` changes the sum; the rest is `model_extra`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool = False
    rank_pattern: dict[_Ending, _Rank] | None = None
    alpha_pattern: dict[_Ending, _Alpha] | None = None
    target_modules: list[str] | _Pattern
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] | None = None
    """The other ways to begin change the base model as well."""

    def rank(self, module: str) -> int:
        """Of the matrices of a module."""
        return _first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter is for a module: a list holds ends of names, a string is a pattern for all of it."""
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or bool(re.fullmatch(self.target_modules, module))
        return any(f".{module}".endswith(f".{end}") for end in self.target_modules)


def _first_match(patterns: Mapping[str, _T] | None, module: str, otherwise: _T) -> _T:
    """What the first pattern says that a module's name ends with, from a dot on."""
    found = (value for key, value in (patterns or {}).items() if re.match(_ending(key), module))
    return next(found, otherwise)


class _Matrices(NamedTuple):
    """Of one module with inputs [T, K] and outputs [T, N]."""

    a: torch.Tensor
    """[r, K]."""
    b: torch.Tensor
    """[N, r]."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter that agrees with itself."""

    _folder: Path
    _config: _Config
    _matrices: dict[str, _Matrices]
    """By the name of the module."""

    def merge_into(self, model: PreTrainedModel) -> None:
        """Replace the weights of the modules that the adapter is for, one by one. One that was tied then stands alone.

        Raises:
            ValueError: the model has no such module, or one of another shape, and is as it was; or a sum is not finite,
                and the model cannot be used.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError(f"adapter {self._folder}: the weights of the model are quantised, so nothing can be added")
        modules = dict(model.named_modules())
        for name in self._matrices:
            self._require_fit(name, modules.get(name))
        for name in self._matrices:
            modules[name].weight = nn.Parameter(self._merged(name, modules[name]), requires_grad=False)
        log.info("adapter_merged", extra={"adapter": str(self._folder), "modules": len(self._matrices)})

    def _require_fit(self, name: str, module: nn.Module | None) -> None:
        where = f"{self._folder / ADAPTER_WEIGHTS}: {name}"
        if not isinstance(module, nn.Linear | Conv1D):
            there = "no such module" if module is None else f"{type(module).__name__} there"
            raise ValueError(f"{where}: the model has {there}, wanted a linear module")
        a, b = self._matrices[name]
        mine, weight = [b.shape[0], a.shape[1]], list(_as_linear(module, module.weight).shape)
        if mine != weight:
            raise ValueError(f"{where}: lora_B times lora_A is {mine}, the weight of the model {weight}")

    def _merged(self, name: str, module: Any) -> torch.Tensor:
        """The weight with what the adapter adds, as it lies in the module."""
        weight = module.weight.detach()
        a, b = (matrix.to(weight.device, torch.float32) for matrix in self._matrices[name])
        merged = torch.addmm(_as_linear(module, weight.float()), b, a, alpha=self._config.scale(name))
        rounded = _as_linear(module, merged).to(weight.dtype).contiguous()
        if not rounded.isfinite().all():
            raise ValueError(f"{self._folder / ADAPTER_WEIGHTS}: {name}: the sums are not finite in {weight.dtype}")
        return rounded


def _as_linear(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """A weight of a module as [N, K], or back: GPT-2 and its kin keep it the other way round."""
    return weight.T if isinstance(module, Conv1D) else weight


def read(folder: Path) -> Lora:
    """The adapter of a folder.

    Raises:
        ValueError: it is none that can be merged; names the file and the field.
        FileNotFoundError: a file is missing.
    """
    config, file = _read_config(folder / ADAPTER_CONFIG), folder / ADAPTER_WEIGHTS
    matrices = _read_matrices(file)
    for module, (a, b) in matrices.items():
        if not config.targets(module):
            raise ValueError(f"{file}: {module}: not one of target_modules, {config.target_modules}")
        ranks = a.shape[0], b.shape[1]
        if ranks != (config.rank(module),) * 2:
            raise ValueError(
                f"{file}: {module}: lora_A has rank {ranks[0]} and lora_B {ranks[1]}, "
                f"{ADAPTER_CONFIG} says r {config.rank(module)}"
            )
    return Lora(folder, config, matrices)


def _read_config(file: Path) -> _Config:
    try:
        config = _Config.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        field = f"{problem['loc'][0]}: " if problem["loc"] else ""
        given = "" if problem["type"] in ("missing", "json_invalid") else f"{problem['input']!r}: "
        raise ValueError(f"{file}: {field}{given}{problem['msg'].removeprefix('Value error, ')}") from error
    for field, value in (config.model_extra or {}).items():
        if field not in _HARMLESS and value not in _UNSET:
            raise ValueError(f"{file}: {field}: {value!r}, and an adapter with that cannot be merged")
    return config


def _read_matrices(file: Path) -> dict[str, _Matrices]:
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    sides: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        found = _MATRIX.fullmatch(name)
        if found is None:
            raise ValueError(f"{file}: {name}: wanted base_model.model.*.lora_A.weight and lora_B.weight alone")
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(f"{file}: {name}: {tensor.dtype} {list(tensor.shape)}, wanted a matrix of floats")
        sides[found["module"]][found["side"]] = tensor
    if not sides:
        raise ValueError(f"{file}: 0 tensors, wanted at least 2")
    for module, pair in sides.items():
        if len(pair) != 2:
            raise ValueError(f"{file}: {module}: has lora_{min(pair)} alone, wanted lora_A and lora_B")
    return {module: _Matrices(pair["A"], pair["B"]) for module, pair in sides.items()}
