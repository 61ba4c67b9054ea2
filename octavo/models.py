"""Where models lie and what they are. No tensors here, so that a gateway can ask too.

A model is called by one of four names: `smollm2`, the embedded default; a folder in Hugging Face layout; a GGUF file,
or a folder that holds one; or a hub id, `org/name`. What must be downloaded or converted first lies in the models
folder, put there by `octavo model fetch`.
A folder holds `config.json`, `tokenizer.json` and weights in safetensors: pickled weights are never read.

A LoRA adapter is named behind its model, `smollm2+~/adapters/pirate`: a folder as peft saves it, with
`adapter_config.json` and `adapter_model.safetensors`. Clients ask for it by the folder's name, or by the one that
stands before all, `pirate=smollm2+~/adapters/v2`. Models without an adapter may be given a name as well.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard, cast

from octavo.hashing import digest_of

DEFAULT = "smollm2"
"""SmolLM2-135M-Instruct."""

FORMS = f"{DEFAULT}, a folder, a GGUF file, or a hub id; +FOLDER behind it adds a LoRA adapter, NAME= before it a name"
"""In a setting's description."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What peft calls the files of an adapter's folder."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMED = re.compile(r"([A-Za-z0-9][\w./-]*)=(.+)")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_PAGE_BYTES = 4096
_PAGES_PER_TENSOR = 4
_MAX_HEADER_BYTES = 100 << 20
_TOKEN_IDS = 1 << 32
"""Token ids travel as u32."""


class ModelName(NamedTuple):
    """What an operator writes, `[NAME=]BASE[+ADAPTER]`, in its parts."""

    name: str | None
    """What clients shall ask for; None: as the files are called."""
    base: str
    """The model by itself."""
    adapter: str | None
    """The folder of its adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that lies ready."""

    path: Path
    digest: bytes
    """32 bytes, of its config and of all its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model that lies ready, and what a gateway and a worker must know of it."""

    name: str
    """What clients ask for."""
    path: Path
    max_model_tokens: int
    """Longest sequence that the model takes."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; empty where the model names none."""
    tokenizer_digest: bytes
    """sha256 of tokenizer.json."""
    model_digest: bytes
    """32 bytes that differ between models, a finetune of the same shape included; those of the base with an adapter."""
    adapter: Adapter | None = None
    """To be merged into the weights."""


def find(model: str, models_dir: Path) -> ModelFolder:
    """The model's folder and its adapter's, read and described.

    Raises:
        ValueError: `model` is no name of a model, or a file in its folder cannot be understood.
        FileNotFoundError: the model, its adapter, or a file of them, is not there; the message says which command
            fetches a model.
    """
    name, base, folder = parts_of(model)
    path = location(base, models_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"model {base!r} is not in {path.parent}: run `octavo model fetch {base}`")
    if (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists():
        raise ValueError(f"{path} is an adapter: name it behind its model, as {DEFAULT}+{path}")
    if folder is None:
        return describe(name or _display_name(base), path)
    if not folder:
        raise ValueError(f"{model!r} names no adapter behind its +")
    adapter = adapter_in(_place(folder).resolve())
    return replace(describe(name or adapter.path.name, path), adapter=adapter)


def adapter_in(folder: Path) -> Adapter:
    """The adapter that lies in a folder now.

    Config and weights are small, so all of them are read: two versions differ in no other way.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"adapter {folder} is no folder")
    config, weights = _present(folder / ADAPTER_CONFIG), _present(folder / ADAPTER_WEIGHTS)
    with weights.open("rb") as content:
        return Adapter(path=folder, digest=digest_of(config.read_bytes(), file_digest(content, "sha256").digest()))


def parts_of(model: str) -> ModelName:
    """The parts of what an operator writes. A path that is there is no other name, whatever signs are in it."""
    named = None if _place(model).exists() else _NAMED.fullmatch(model)
    name, rest = named.groups() if named else (None, model)
    if _place(rest).exists():
        return ModelName(name, rest, None)
    base, plus, adapter = rest.partition("+")
    return ModelName(name, base, adapter if plus else None)


def describe(name: str, path: Path) -> ModelFolder:
    """What the files of a folder say of the model in it.

    Raises:
        ValueError: a file cannot be understood.
        FileNotFoundError: a file is missing.
    """
    text = _text_part(_read_json(path / "config.json"))
    return ModelFolder(
        name=name,
        path=path,
        max_model_tokens=_first_int(text, _LENGTH_KEYS, path),
        vocab_size=_first_int(text, ("vocab_size",), path),
        eos_token_ids=_eos_token_ids(path, text),
        tokenizer_digest=sha256(_present(path / "tokenizer.json").read_bytes()).digest(),
        model_digest=_model_digest(path),
    )


def location(model: str, models_dir: Path) -> Path:
    """Where the model lies, or will lie once it is fetched. Raises ValueError if `model` is no name of a model."""
    if model == DEFAULT:
        return models_dir / DEFAULT
    if gguf := gguf_of(model):
        return models_dir / f"{_display_name(model)}-{_file_tag(gguf)}"
    folder = _place(model)
    if model and folder.is_dir():
        return folder.resolve()
    if is_hub_id(model):
        return models_dir / model.replace("/", "--")
    raise ValueError(f"{model!r} is neither {DEFAULT!r}, nor a folder or GGUF file, nor a hub id such as org/name")


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form `org/name`."""
    return _HUB_ID.fullmatch(model) is not None


def gguf_of(model: str) -> Path | None:
    """The GGUF file that `model` names, or that lies in the folder that it names: such a model is converted before use.

    Raises:
        ValueError: the folder holds several of them, and no config.json.
    """
    place = _place(model).resolve()
    if not model or model == DEFAULT:
        return None
    if place.is_file():
        return place if place.suffix == ".gguf" else None
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{model} holds {len(files)} GGUF files: name the one that is wanted")
    return files[0] if files else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the weights, in order of name.

    Raises:
        FileNotFoundError: there are none, or one of them is missing.
        ValueError: the index of a sharded model names none.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards: object = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{index} holds no weight_map")
        return [_present(folder / shard) for shard in sorted(set(cast(dict[str, str], shards).values()))]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors; weights in other formats are not read")
    return [single]


def _place(name: str) -> Path:
    """Of a folder or a file. The ~ of somebody who has no home stays: there is no such place."""
    return Path(os.path.expanduser(name))  # that of pathlib raises a RuntimeError there


def _display_name(model: str) -> str:
    place = _place(model).resolve()
    if model != DEFAULT and place.is_dir():
        return place.name
    return place.stem if gguf_of(model) else model


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model: some multimodal configs nest it."""
    nested = config.get("text_config")
    return {**config, **cast(dict[str, Any], nested)} if isinstance(nested, dict) else config


def _first_int(config: dict[str, Any], keys: tuple[str, ...], path: Path) -> int:
    for key in keys:
        value: object = config.get(key)
        if _is_int(value):
            if value < 1:
                raise ValueError(f"{path / 'config.json'} says {key} {value}, wanted at least 1")
            return value
    raise ValueError(f"{path / 'config.json'} says no {keys[0]}")


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    named: object = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if named is None:
        named = config.get("eos_token_id")
    if named is None:
        return ()
    ids = cast(list[object], named) if isinstance(named, list) else [named]
    ends = tuple(token for token in ids if _is_int(token) and 0 <= token < _TOKEN_IDS)
    if len(ends) < len(ids):
        raise ValueError(f"{path} says eos_token_id {named!r}, wanted token ids")
    return ends


def _is_int(value: object) -> TypeGuard[int]:
    """Whether JSON had a whole number there; Python counts its `true` as one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _model_digest(folder: Path) -> bytes:
    """A digest of the config and of each weight file's size, header and a few pages of every tensor.

    Reading all weights would take a minute for a large model. A finetune moves whole tensors, so that four pages of
    each tell it from its parent; an edit of a single row may escape.
    """
    fields = [(folder / "config.json").read_bytes()]
    for file in weight_files(folder):
        fields += [file.name.encode(), file.stat().st_size.to_bytes(8, "little"), *_samples(file)]
    return digest_of(*fields)


def _samples(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, then pages of its tensors."""
    size = file.stat().st_size
    with file.open("rb") as content:
        header_bytes = int.from_bytes(content.read(8), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size):
            raise ValueError(f"{file} is not a safetensors file: it says its header has {header_bytes} bytes")
        header = content.read(header_bytes)
        yield header
        spans = _tensor_spans(file, header)
        whole = 8 + header_bytes + max((end for _, end in spans), default=0)
        if size < whole:
            raise ValueError(f"{file} is cut short: it has {size} bytes, its header tells of {whole}")
        for begin, end in spans:
            yield from _pages(content, 8 + header_bytes + begin, end - begin)


def _tensor_spans(file: Path, header: bytes) -> list[tuple[int, int]]:
    """Where each tensor begins and ends behind the header, by name."""
    try:
        tensors = cast(dict[str, dict[str, list[int]]], json.loads(header))
    except ValueError as error:
        raise ValueError(f"{file} is not a safetensors file: its header is not JSON") from error
    try:
        found = (tensors[name]["data_offsets"] for name in sorted(tensors.keys() - {"__metadata__"}))
        return [(begin, end) for begin, end in found]
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: its header names no places of tensors") from error


def _pages(content: BinaryIO, begin: int, length: int) -> Iterator[bytes]:
    """Pages evenly spread over [begin, begin + length), its first and its last among them."""
    if length <= _PAGE_BYTES * _PAGES_PER_TENSOR:
        content.seek(begin)
        yield content.read(length)
        return
    for page in range(_PAGES_PER_TENSOR):
        content.seek(begin + page * (length - _PAGE_BYTES) // (_PAGES_PER_TENSOR - 1))
        yield content.read(_PAGE_BYTES)


def _file_tag(file: Path) -> str:
    """Eight letters that change when the file is replaced."""
    status = os.stat(file)
    return digest_of(str(file.resolve()).encode(), str((status.st_size, status.st_mtime_ns)).encode()).hex()[:8]


def _present(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} lacks {file.name}")
    return file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_present(file).read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return cast(dict[str, Any], value)
