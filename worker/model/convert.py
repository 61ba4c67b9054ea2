"""A GGUF file becomes a folder in Hugging Face layout, once: float32 safetensors, config and tokenizer.

Reading GGUF takes transformers ten seconds a start and leaves a gateway without a tokenizer that it can read; the
converted folder loads in less than one, and its pages are shared by all workers of a machine.
"""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


class _Names:
    """Stands for a model where transformers only asks for the names of its parameters.

    Given a model, it would walk all submodules and build the name table again for each (9 s for 30 layers).
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.config = config
        self.architecture = type(model).__name__
        self.tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        self._names = dict.fromkeys(model.state_dict())

    def state_dict(self) -> dict[str, None]:
        return self._names

    def named_children(self) -> tuple[()]:
        return ()


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into `folder`, which exists: weights as float32, a tied head once.

    Raises:
        ValueError: transformers cannot convert the architecture, or a weight is missing.
    """
    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off: the caller has its own
        config = AutoConfig.for_model(**_config_fields(gguf))
        names = _Names(config)
        weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=names)["tensors"]
    missing = names.state_dict().keys() - names.tied - weights.keys()
    if missing:
        raise ValueError(f"{gguf} lacks {len(missing)} weights of {names.architecture}, among them {min(missing)}")
    config.architectures = [names.architecture]
    config.dtype = torch.float32
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written for its owner only, yet workers may run as somebody else
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _write_tokenizer(gguf, folder)


def _config_fields(gguf: Path) -> dict[str, Any]:
    fields = load_gguf_checkpoint(str(gguf))["config"]
    fields.pop("_model_name_or_path", None)
    if "head_dim" not in fields and (length := _head_length(gguf)) is not None:
        fields["head_dim"] = length
    return fields


def _head_length(gguf: Path) -> int | None:
    """Elements of a head, where the file says so. transformers takes some families' default instead."""
    reader = GGUFReader(gguf)
    architecture = reader.get_field("general.architecture")
    length = architecture and reader.get_field(f"{architecture.contents()}.attention.key_length")
    return int(length.contents()) if length else None


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    architecture, vocabulary, facts = get_gguf_tokenizer(str(gguf))
    tokenizer, _ = convert_gguf_tokenizer(architecture, vocabulary)
    assert isinstance(tokenizer, Tokenizer), type(tokenizer)
    if vocabulary.get("pre_tokenizer_type") == "smollm":
        # transformers leaves out that this vocabulary was learned with every digit on its own, which also decides
        # how the spaces before a number are cut.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    facts["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
