"""Which models are served: what cannot be right is refused. (That the others are right: test_equal_texts.py.)"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from octavo import models
from tests.support import tiny_model
from tests.support.families import config
from tests.support.hand_runner import HandRunner, Stream
from tests.support.oracle import solo_greedy
from worker.kernels import native_build, torch_cpu
from worker.model.generic import UnsupportedModel
from worker.model.loader import LoadedModel, Road, dtype_of, load, refusal

SMALL: dict[str, Any] = {"vocab_size": tiny_model.VOCAB_SIZE}
DEPTH: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


def test_a_window_as_long_as_the_longest_text_is_none(tmp_path: Path) -> None:
    served = config("Mistral", sliding_window=tiny_model.MAX_TOKENS)
    folder = tiny_model.save(served, tmp_path / "model", seed=1)
    stream = Stream(list(range(20, 57)), 16, chunk=16)
    drawn = HandRunner(folder, torch_cpu.attend, num_blocks=20).run(stream)
    assert drawn == [solo_greedy(folder, stream.prompt, stream.count)]


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config("Llama4Text"), "layers of chunked_attention"),
        (config("Qwen3Next"), "layers of linear_attention, whose state is not keys and values"),
        (config("Mamba"), "whose state is not keys and values"),
        (config("FalconH1"), "layers of hybrid, whose state is not keys and values"),
        (config("Llama", num_key_value_heads=3), "its 4 query heads are no multiple of its 3 key/value heads"),
        (config("DeepseekV3", q_lora_rank=None), "latents in place of keys and values"),
        (config("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "(dynamic)"),
        (transformers.BloomConfig(), "it knows positions by ALiBi"),
        (transformers.FalconConfig(alibi=True), "it knows positions by ALiBi"),
        (transformers.RwkvConfig(), "it is recurrent: its state is not keys and values"),
        (transformers.Gemma4TextConfig(), "names no one shape for the heads of all layers: 'head_dim' is a per-layer"),
        (transformers.T5Config(), "it is an encoder and a decoder, and we serve decoders"),
        (transformers.GPT2Config(add_cross_attention=True), "it has cross attention"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_config_that_our_attention_cannot_serve_is_refused_with_its_reason(
    refused: PreTrainedConfig, reason: str
) -> None:
    assert reason in (refusal(refused) or "")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (
            config("Qwen2Moe", use_sliding_window=True, sliding_window=24, max_window_layers=1),
            "layer 0 of Qwen2MoeForCausalLM sees 24 positions by its config, and asked our attention for all",
        ),
        (config("StableLm"), "does not run on our attention: RuntimeError: "),  # heads of 16 and 32
        (
            transformers.StableLmConfig(**SMALL, **DEPTH, num_key_value_heads=2, intermediate_size=64),
            "wants attention without the keywords that the model was called with",
        ),
        (config("DiffLlama"), "wanted each of 2 once, in order"),
        (
            transformers.FalconConfig(**SMALL, **DEPTH),
            "is not served: it has attention code of its own",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_a_config_does_not_tell_is_found_at_load(refused: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    folder = tiny_model.save(refused, tmp_path / "model", seed=0)
    with pytest.raises(UnsupportedModel, match=reason):
        load_tiny(folder)


def test_a_layer_that_does_not_attend_is_found_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model.save_tiny_llama(tmp_path / "model")
    elsewhere = LlamaDecoderLayer.forward

    def skip_second(self: LlamaDecoderLayer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.self_attn.layer_idx == 1:
            return hidden_states
        return elsewhere(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", skip_second)
    with pytest.raises(UnsupportedModel, match=r"sent layers \[0\] .* wanted each of 2 once"):
        load_tiny(folder)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = tiny_model.save_tiny_llama(tmp_path / "model")
    described = models.find(str(folder), tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        load(described, dtype=torch.float32, device=torch.device("cpu"), block_size=16)


def test_weights_in_their_own_dtype_are_pages_of_the_file(tmp_path: Path) -> None:
    """Two workers of a machine hold them once."""
    folder = tiny_model.save_tiny_llama(tmp_path / "model")
    load_tiny(folder, road="generic")  # imports and caches
    kept = load_tiny(folder, road="generic")
    maps = Path("/proc/self/smaps").read_text()
    assert kept.forward.vocab_size == tiny_model.VOCAB_SIZE
    assert str(folder / "model.safetensors") in maps


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers draws them at random and goes on, and every text would be nonsense."""
    folder = tiny_model.save_tiny_llama(tmp_path / "model")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"num_hidden_layers": 3}))

    with pytest.raises(ValueError, match=r"lacks \d+ weights of the model, among them model\.layers\.2\."):
        load_tiny(folder)


@pytest.mark.parametrize("fields", [{"vocab_size": 100}, {"num_attention_heads": 7}, {"hidden_act": "nope"}])
def test_a_folder_whose_files_do_not_fit_together_is_refused_by_its_path(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    folder = tiny_model.save_tiny_llama(tmp_path / "model")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | fields))

    with pytest.raises(ValueError, match=f"{folder} cannot be loaded: "):
        load_tiny(folder)


@pytest.mark.parametrize(
    ("device", "features", "dtype"),
    [
        ("cpu", {"avx2", "avx512f"}, torch.float32),
        ("cpu", {"avx512f", "avx512_bf16"}, torch.bfloat16),
        ("cpu", {"amx_bf16"}, torch.bfloat16),
        ("cuda", {"avx2"}, torch.bfloat16),
    ],
)
def test_the_default_dtype_is_bfloat16_where_it_is_not_emulated(
    device: str, features: set[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "cpu_features", lambda: frozenset(features))

    assert dtype_of("auto", torch.device(device)) == dtype
    assert dtype_of("float16", torch.device(device)) == torch.float16


def load_tiny(folder: Path, road: Road = "auto") -> LoadedModel:
    described = models.find(str(folder), folder.parent)
    cpu = torch.device("cpu")
    return load(described, dtype=torch.float32, device=cpu, block_size=16, attend=torch_cpu.attend, road=road)


def test_a_model_of_the_generic_road_is_not_served_as_deterministic(tmp_path: Path) -> None:
    """Said before its weights are read; a model of the fast road that is asked to take the generic one likewise."""
    for family, road in (("Gemma2", "auto"), ("Llama", "generic")):
        folder = models.describe("tiny", tiny_model.save(config(family), tmp_path / family, seed=1))
        with pytest.raises(UnsupportedModel, match="tiny cannot be deterministic: on the generic road products are"):
            load(folder, dtype=torch.float32, device=torch.device("cpu"), block_size=16, road=road, deterministic=True)
