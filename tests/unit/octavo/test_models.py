import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from octavo import models
from tests.support import words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return words.save_model(tmp_path / "words")


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def write_weights(file: Path, **tensors: bytes) -> None:
    """A safetensors file of byte tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [end, end + len(content)]}
        end += len(content)
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensors.values()))


def digest(folder: Path) -> bytes:
    return models.find(str(folder), folder.parent).model_digest


def test_a_folder_is_described_by_its_files(folder: Path) -> None:
    found = models.find(str(folder), folder.parent)
    assert (found.name, found.path) == ("words", folder)
    assert (found.max_model_tokens, found.vocab_size) == (words.MAX_MODEL_TOKENS, words.VOCAB_SIZE)
    assert found.eos_token_ids == (words.EOS_TOKEN,)
    assert found.tokenizer_digest == sha256((folder / "tokenizer.json").read_bytes()).digest()
    assert len(found.model_digest) == 32


@pytest.mark.parametrize(
    ("said", "ends"), [({"eos_token_id": [7, 9]}, (7, 9)), ({"eos_token_id": 7}, (7,)), ({}, (words.EOS_TOKEN,))]
)
def test_generation_config_says_what_ends_a_text_and_config_if_it_is_silent(
    folder: Path, said: dict[str, Any], ends: tuple[int, ...]
) -> None:
    edit(folder / "generation_config.json", **said)
    assert models.find(str(folder), folder.parent).eos_token_ids == ends


def test_a_model_may_name_no_end(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    assert models.find(str(folder), folder.parent).eos_token_ids == ()


def test_the_language_part_of_a_nested_config_counts(folder: Path) -> None:
    nested = {"text_config": {"vocab_size": 77, "max_position_embeddings": 88, "eos_token_id": 5}}
    (folder / "config.json").write_text(json.dumps(nested | {"vocab_size": 1}))
    found = models.find(str(folder), folder.parent)
    assert (found.vocab_size, found.max_model_tokens, found.eos_token_ids) == (77, 88, (5,))


def test_the_digest_is_the_same_for_a_copy_and_another_for_any_change(folder: Path, tmp_path: Path) -> None:
    """S6: a finetune has the shape, the size and the header of its parent, and other weights."""
    weights = folder / "model.safetensors"
    write_weights(weights, big=bytes(1_000_000), small=bytes(100))
    seen = [digest(folder)]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert digest(copy) == seen[0]

    write_weights(weights, big=bytes(1_000_000), small=bytes(99) + b"\1")
    seen.append(digest(folder))
    write_weights(weights, big=b"\1" * 1_000_000, small=bytes(100))
    seen.append(digest(folder))
    write_weights(weights, big=bytes(1_000_000), tiny=bytes(100))
    seen.append(digest(folder))
    edit(folder / "config.json", rope_theta=2.0)
    seen.append(digest(folder))
    assert len(set(seen)) == len(seen)


def test_a_digest_reads_little_of_a_large_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(folder / "model.safetensors", big=bytes(5_000_000))
    sampled = sum(map(len, models._samples(folder / "model.safetensors")))  # pyright: ignore[reportPrivateUsage]
    assert sampled < 20_000


def test_the_index_names_the_files_of_a_sharded_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    write_weights(folder / "model-1.safetensors", a=bytes(8))
    edit(folder / "model.safetensors.index.json", weight_map={"b": "model-2.safetensors", "a": "model-1.safetensors"})
    assert [file.name for file in models.weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]
    whole = digest(folder)
    write_weights(folder / "model-1.safetensors", a=b"\1" * 8)
    assert digest(folder) != whole
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-1\.safetensors"):
        models.weight_files(folder)


@pytest.mark.parametrize("model", ["smollm2", "someone/something-1.5B"])
def test_a_model_that_is_not_there_says_which_command_fetches_it(model: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"is not in {tmp_path}: run `octavo model fetch {model}`"):
        models.find(model, tmp_path)


def test_fetched_models_are_found_by_their_names(tmp_path: Path) -> None:
    words.save_model(tmp_path / "smollm2")
    words.save_model(tmp_path / "someone--something")
    found = [models.find(name, tmp_path) for name in ("smollm2", "someone/something")]
    assert [model.name for model in found] == ["smollm2", "someone/something"]
    assert [model.path.name for model in found] == ["smollm2", "someone--something"]


@pytest.mark.parametrize(
    "model", ["", "nonsense", "a/b/c", "../up", "org/", "/nowhere/at/all", "~nobody/x", "http://x/y"]
)
def test_what_is_no_name_of_a_model_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is neither 'smollm2', nor a folder or GGUF file, nor a hub id"):
        models.find(model, tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"lacks config\.json"),
        ("tokenizer.json", r"lacks tokenizer\.json"),
        ("model.safetensors", r"holds no model\.safetensors; weights in other formats are not read"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused_with_its_name(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(FileNotFoundError, match=message):
        models.find(str(folder), folder.parent)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"[1]", "holds no JSON object"), (b"{}", "says no max_position_embeddings")],
)
def test_a_config_that_cannot_be_understood_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        models.find(str(folder), folder.parent)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_position_embeddings": -5}, "says max_position_embeddings -5, wanted at least 1"),
        ({"max_position_embeddings": True}, "says no max_position_embeddings"),
        ({"vocab_size": 0}, "says vocab_size 0, wanted at least 1"),
        ({"eos_token_id": "</s>"}, "says eos_token_id '</s>', wanted token ids"),
        ({"eos_token_id": [2, -1]}, r"says eos_token_id \[2, -1\], wanted token ids"),
        ({"eos_token_id": 1 << 32}, "says eos_token_id 4294967296, wanted token ids"),
    ],
)
def test_numbers_that_no_model_has_are_refused(folder: Path, fields: dict[str, object], message: str) -> None:
    """A stop token that does not fit its field would end a request at the worker instead."""
    edit(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=message):
        models.find(str(folder), folder.parent)


def test_weights_that_were_cut_short_are_refused_with_both_sizes(folder: Path) -> None:
    """An interrupted download; its header is whole."""
    weights = folder / "model.safetensors"
    write_weights(weights, a=bytes(1000), b=bytes(1000))
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"is cut short: it has {whole - 1} bytes, its header tells of {whole}"):
        models.find(str(folder), folder.parent)


@pytest.mark.parametrize("header", [b"[]", b"3", b'{"a": {}}', b'{"a": []}', b'{"a": {"data_offsets": [1]}}'])
def test_a_header_that_places_no_tensors_is_refused(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="its header names no places of tensors"):
        models.find(str(folder), folder.parent)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}])
def test_an_index_that_names_no_files_is_refused(folder: Path, index: dict[str, object]) -> None:
    edit(folder / "model.safetensors.index.json", **index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json holds no weight_map"):
        models.find(str(folder), folder.parent)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\2" + bytes(7) + b"{]"])
def test_weights_that_are_no_safetensors_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        models.find(str(folder), folder.parent)


def test_a_gguf_folder_is_converted_first_and_its_replacement_again(tmp_path: Path) -> None:
    source, converted = tmp_path / "quantised", tmp_path / "models"
    source.mkdir()
    (source / "q4.gguf").write_bytes(b"GGUF")
    place = models.location(str(source), converted)
    assert place.parent == converted
    assert place.name.startswith("quantised-")
    alone = models.location(str(source / "q4.gguf"), converted)
    assert alone.name == place.name.replace("quantised", "q4")
    (source / "q4.gguf").write_bytes(b"GGUF again")
    assert models.location(str(source), converted) != place
    (source / "q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="holds 2 GGUF files: name the one that is wanted"):
        models.location(str(source), converted)


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("smollm2", (None, "smollm2", None)),
        ("org/name", (None, "org/name", None)),
        ("pirate=org/name", ("pirate", "org/name", None)),
        ("smollm2+~/adapters/pirate", (None, "smollm2", "~/adapters/pirate")),
        ("crew/pirate-2.0=/models/llama+/adapters/a=b+c", ("crew/pirate-2.0", "/models/llama", "/adapters/a=b+c")),
        ("/runs/lr=3/model", (None, "/runs/lr=3/model", None)),
        ("smollm2+", (None, "smollm2", "")),
        ("=smollm2", (None, "=smollm2", None)),
    ],
)
def test_a_model_is_named_with_its_adapter_behind_it_and_its_name_before_it(
    written: str, parts: tuple[str | None, ...]
) -> None:
    assert models.parts_of(written) == parts


def test_a_path_that_is_there_is_a_model_by_itself_whatever_signs_are_in_it(tmp_path: Path) -> None:
    folder = str(words.save_model(tmp_path / "lr=3+1"))
    assert models.parts_of(folder) == (None, folder, None)
    assert models.parts_of(f"name={folder}") == ("name", folder, None)
    assert (models.find(folder, tmp_path).name, models.find(f"name={folder}", tmp_path).name) == ("lr=3+1", "name")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    adapter = tmp_path / "pirate"
    adapter.mkdir()
    edit(adapter / "adapter_config.json", peft_type="LORA")
    write_weights(adapter / "adapter_model.safetensors", a=bytes(1_000_000))
    return adapter


def test_an_adapter_has_a_digest_of_all_its_bytes_beside_that_of_its_model(folder: Path, adapter: Path) -> None:
    """S8: one number in the middle is another adapter; its name and place are nothing."""
    digests: list[bytes] = []

    def look(at: Path) -> None:
        found = models.find(f"{folder}+{at}", folder.parent)
        assert (found.name, found.path, found.model_digest) == (at.name, folder, digest(folder))
        assert found.adapter is not None
        assert found.adapter.path == at
        digests.append(found.adapter.digest)

    look(adapter)
    look(shutil.copytree(adapter, adapter.with_name("copy")))
    assert digests[0] == digests[1]
    write_weights(adapter / "adapter_model.safetensors", a=bytes(500_000) + b"\1" + bytes(499_999))
    look(adapter)
    edit(adapter / "adapter_config.json", lora_alpha=3)
    look(adapter)
    assert len(set(digests)) == 3
    assert models.find(f"a={folder}+{adapter}", folder.parent).name == "a"
    assert models.find(str(folder), folder.parent).adapter is None


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_lacks_a_file_is_refused_with_its_name(folder: Path, adapter: Path, missing: str) -> None:
    (adapter / missing).unlink()
    (adapter / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(FileNotFoundError, match=f"{adapter} lacks {missing}"):
        models.find(f"{folder}+{adapter}", folder.parent)


def test_an_adapter_without_its_model_and_a_model_without_its_adapter_are_refused(folder: Path, adapter: Path) -> None:
    with pytest.raises(ValueError, match=rf"{adapter} is an adapter: name it behind its model, as smollm2\+{adapter}"):
        models.find(str(adapter), folder.parent)
    with pytest.raises(ValueError, match=rf"'{folder}\+' names no adapter behind its \+"):
        models.find(f"{folder}+", folder.parent)


def test_an_adapter_that_is_no_folder_is_refused_by_its_path(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"adapter {tmp_path / 'nowhere'} is no folder"):
        models.find(f"{folder}+{tmp_path / 'nowhere'}", tmp_path)
