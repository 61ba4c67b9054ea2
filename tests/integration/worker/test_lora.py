"""Adapters that are merged when a model is loaded: sums are right on both roads, what is not known is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from octavo import models
from octavo.commands.model import fetch_model
from tests.support import tiny_model
from tests.support.adapters import products, run_beside, save_adapter
from tests.support.cluster import prose
from tests.support.hand_runner import HandRunner, Stream
from tests.support.oracle import solo_greedy
from worker.model import lora
from worker.model.loader import Road, load

CPU = torch.device("cpu")
IDS = torch.arange(20, 60)[None]
QUERY_0, UP_1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture(scope="module")
def for_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("for_smollm2"), fetch_model("smollm2"), size=0.03)


@pytest.mark.model
@pytest.mark.parametrize("road", ["fast", "generic"])
def test_smollm2_with_an_adapter_goes_on_as_in_transformers_with_the_adapter_beside_it(
    road: Road, for_smollm2: Path
) -> None:
    """S8: a prompt in two chunks, then decodes."""
    base, prompt = fetch_model("smollm2"), prose(0, 40)
    (drawn,) = HandRunner(base, adapter=for_smollm2, road=road, num_blocks=8).run(Stream(prompt, 8, chunk=32))
    assert drawn == solo_greedy(base, prompt, 8, adapter=for_smollm2) != solo_greedy(base, prompt, 8)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, {QUERY_0: 2.0, UP_1: 2.0}),
        ({"lora_alpha": 3, "use_rslora": True}, {QUERY_0: 1.5, UP_1: 1.5}),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 4, "q_proj": 16}}, {QUERY_0: 1.0, UP_1: 2.0}),
        ({"alpha_pattern": {r"layers\.\d+\.mlp\.up_proj": 2, "proj": 16}}, {QUERY_0: 2.0, UP_1: 0.5}),
        ({"rank_pattern": {"q_proj": 2}, "ranks": {QUERY_0: 2}}, {QUERY_0: 4.0, UP_1: 2.0}),
        ({"target_modules": r".*\.(q_proj|up_proj)", "lora_dropout": 0.1}, {QUERY_0: 2.0, UP_1: 2.0}),
        ({"target_modules": "all-linear", "fan_in_fan_out": True, "bias": "none"}, {QUERY_0: 2.0, UP_1: 2.0}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_becomes_the_sum_rounded_once(
    config: dict[str, Any], scales: dict[str, float], dtype: torch.dtype, tiny: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny, targets=["layers.0.self_attn.q_proj", "1.mlp.up_proj"], **config)
    before, model = plain(tiny, dtype).state_dict(), plain(tiny, dtype)
    lora.read(adapter).merge_into(model)
    added = products(adapter)
    assert added.keys() == scales.keys()
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        wanted = before[name].float() + scales[module] * added[module] if module in scales else before[name].float()
        torch.testing.assert_close(weight, wanted.to(dtype))


def test_weights_that_lie_the_other_way_round_get_the_product_turned(tmp_path: Path) -> None:
    """GPT-2's, which the generic road runs; one of them is square."""
    config = GPT2Config(vocab_size=tiny_model.VOCAB_SIZE, n_positions=512, n_embd=64, n_layer=2, n_head=2)
    base = tiny_model.save(config, tmp_path / "gpt2", seed=1)
    adapter = save_adapter(tmp_path / "adapter", base, targets=["c_attn", "attn.c_proj"], turned=True, size=0.3)
    beside, merged = plain(base), plain(base)
    run_beside(beside, adapter)
    lora.read(adapter).merge_into(merged)
    torch.testing.assert_close(logits(merged), logits(beside), rtol=1e-4, atol=1e-4)


def test_a_head_that_was_tied_gets_its_own_weight_and_the_embedding_stays(tiny: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    save_adapter(adapter, tiny, targets=["embed_tokens"], target_modules=["lm_head"])
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace("model.embed_tokens", "lm_head"): matrix for name, matrix in load_file(file).items()}, file)
    beside, merged = plain(tiny), plain(tiny)
    run_beside(beside, adapter)
    lora.read(adapter).merge_into(merged)
    torch.testing.assert_close(logits(merged), logits(beside), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3': Input should be 'LORA'"),
        ({"r": 0}, "r: 0: Input should be greater than or equal to 1"),
        ({"lora_alpha": "much"}, "lora_alpha: 'much': Input should be a valid number"),
        ({"lora_alpha": 1e39}, "lora_alpha: 1e+39: float32 ends at 3.403e+38"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: '(': no regular expression: missing )"),
        (
            {"alpha_pattern": {"(?i)Q": 2}},
            "alpha_pattern: '(?i)Q': no regular expression: global flags not",
        ),
        ({"target_modules": None}, "target_modules: None: Input should be"),
        ({"bias": "lora_only"}, "bias: 'lora_only': Input should be 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa': Input should be"),
        ({"use_dora": True}, "use_dora: True, and an adapter with that cannot be merged"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: ['lm_head'], and an adapter with that cannot be merged"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: [3], and"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: [[0, 2]], and"),
        ({"lora_bias": True}, "lora_bias: True, and"),
        ({"of_a_later_peft": 0.5}, "of_a_later_peft: 0.5, and"),
    ],
    ids=repr,
)
def test_a_config_that_cannot_be_merged_is_refused_by_its_field(
    fields: dict[str, Any], reason: str, tiny: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny, **fields | ({"r": 4} if "r" not in fields else {}))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole message is compared
        lora.read(adapter)
    assert str(refusal.value).startswith(f"{adapter / 'adapter_config.json'}: {reason}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "Invalid JSON: EOF"), (b"[1]", "[1]: Input should be an object"), (b'{"peft_type": "LORA"}', "r: Field")],
    ids=repr,
)
def test_a_config_that_is_none_is_refused_by_its_path(content: bytes, reason: str, tiny: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny)
    (adapter / "adapter_config.json").write_bytes(content)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the beginning is compared
        lora.read(adapter)
    assert str(refusal.value).startswith(f"{adapter / 'adapter_config.json'}: {reason}")


def edited(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the matrices of a file. Those of the first query projection are called A and B."""
    names = {f"base_model.model.{QUERY_0}.lora_{side}.weight": side for side in "AB"}
    back = {side: name for name, side in names.items()}

    def edit(adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        tensors = {names.get(name, name): tensor for name, tensor in load_file(file).items()}
        change(tensors)
        save_file({back.get(name, name): tensor for name, tensor in tensors.items()}, file)

    return edit


def say(**fields: Any) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (say(r=8), f"{QUERY_0}: lora_A has rank 4 and lora_B 4, adapter_config.json says r 8"),
        (
            edited(lambda tensors: tensors.update(A=torch.ones(3, 64))),
            f"{QUERY_0}: lora_A has rank 3 and lora_B 4, adapter_config.json says r 4",
        ),
        (
            edited(lambda tensors: tensors.update(A=torch.ones(4, 65))),
            f"{QUERY_0}: lora_B times lora_A is [128, 65], the weight of the model [128, 64]",
        ),
        (edited(lambda tensors: tensors.pop("B")), f"{QUERY_0}: has lora_A alone, wanted lora_A and lora_B"),
        (
            edited(lambda tensors: tensors.update(A=torch.ones(4))),
            f"base_model.model.{QUERY_0}.lora_A.weight: torch.float32 [4], wanted a matrix of floats",
        ),
        (
            edited(lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(2, 2)})),
            "base_model.model.lm_head.weight: wanted base_model.model.*.lora_A.weight and lora_B.weight alone",
        ),
        (
            edited(
                lambda tensors: tensors.update(
                    {f"base_model.model.model.layers.7.q_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
                )
            ),
            "model.layers.7.q_proj: the model has no such module, wanted a linear module",
        ),
        (
            edited(
                lambda tensors: tensors.update(
                    {f"base_model.model.model.norm.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
                )
            ),
            "model.norm: not one of target_modules, ['q_proj', 'norm_']",
        ),
        (
            edited(lambda tensors: tensors.update(A=torch.full((4, 64), torch.nan))),
            f"{QUERY_0}: the sums are not finite in torch.float32",
        ),
        (edited(lambda tensors: tensors.clear()), "0 tensors, wanted at least 2"),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("road", ["fast", "generic"])
def test_matrices_that_do_not_fit_are_refused_with_the_module_and_both_numbers(
    damage: Callable[[Path], None], reason: str, road: Road, tiny: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny, targets=["q_proj", "norm_"])
    damage(adapter)
    described = models.find(f"{tiny}+{adapter}", tmp_path)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole message is compared
        load(described, dtype=torch.float32, device=CPU, block_size=16, road=road)
    assert str(refusal.value) == f"{adapter / 'adapter_model.safetensors'}: {reason}"


def test_an_adapter_for_a_module_that_is_not_linear_is_refused_with_its_kind(tiny: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny, targets=["embed_tokens"])
    with pytest.raises(ValueError, match="embed_tokens: the model has Embedding there, wanted a linear module"):
        lora.read(adapter).merge_into(plain(tiny))


def test_quantised_weights_are_not_added_to(tiny: Path, tmp_path: Path) -> None:
    adapter, model = save_adapter(tmp_path / "adapter", tiny), plain(tiny)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=f"adapter {adapter}: the weights of the model are quantised"):
        lora.read(adapter).merge_into(model)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100], ids=repr)
def test_a_file_that_is_no_safetensors_is_refused_by_its_path(content: bytes, tiny: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny)
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} is not a safetensors file: "):
        lora.read(adapter)


def test_a_version_that_comes_while_a_model_is_loaded_does_not_pass_for_the_one_before(
    tiny: Path, tmp_path: Path
) -> None:
    """S8: its blocks would go by the digest of other weights."""
    folder = models.find(f"{tiny}+{save_adapter(tmp_path / 'a', tiny, seed=1)}", tmp_path)
    save_adapter(tmp_path / "a", tiny, seed=2)
    with pytest.raises(ValueError, match=f"{tmp_path / 'a'}: other files came while the model was loaded"):
        load(folder, dtype=torch.float32, device=CPU, block_size=16)
