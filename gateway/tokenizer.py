"""Adapter: text <-> token ids, with a model folder's own tokenizer and chat template. No torch, no transformers.

Encoding gives what transformers gives: special tokens are added to raw text and not to a rendered chat. Decoding is
incremental: joined, the pieces equal the text of all tokens, special tokens left out, and no piece ends within a
character.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.pre_tokenizers import ByteLevel

from gateway.core.request import ChatMessage
from gateway.core.transcript import Detokenizer
from octavo.errors import InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template and the special tokens that it may name."""

    compiled: jinja2.Template
    names: dict[str, str]

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, up to where the assistant's next turn begins.

        Raises:
            InvalidRequest: the template refuses these messages, for example their order of roles.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self.compiled.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self.names
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(f"prompt.chat: the model's template refuses it: {error}") from error


class Tokenizer:
    """The tokenizer of one model. Encoding is plain computation and may take seconds for megabytes of text."""

    def __init__(self, folder: Path, model: str) -> None:
        """Read `tokenizer.json`, and the chat template where there is one.

        Raises:
            FileNotFoundError: the folder has no `tokenizer.json`.
            ValueError: a file of the tokenizer does not parse.
        """
        self._model = model
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: a gateway needs the fast form of a tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for a file that it cannot use
            raise ValueError(f"{file}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = _read_template(folder)
        self._bytes_of = _byte_table(self._tokenizer)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of raw text, with the special tokens that the tokenizer puts around it."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's next turn begins.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest(f"prompt.chat: model {self._model} has no chat template")
        return self._encode(self._template.render(messages), add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """As a batch of one: the library holds Python's lock for as long as it encodes a single text."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, special ones left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder, for one output."""
        if self._bytes_of is not None:
            return _ByteDetokenizer(self._bytes_of)
        return _WindowDetokenizer(self)


class _ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: exact for any sequence of tokens, constant work per token."""

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens settle. A token that the tokenizer does not know has none."""
        known = len(self._bytes_of)
        return self._decoder.decode(b"".join(self._bytes_of[token] for token in tokens if token < known))

    def flush(self) -> str:
        """A character that never became whole, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For every other vocabulary: decode a window of tokens twice, with and without the new ones.

    The window begins with the tokens of the last settled piece, since a decoder may treat the first token of a text
    unlike the rest. Text that ends in U+FFFD may be half a character, so the window grows until it does not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []
        self._new: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens settle."""
        self._new += tokens
        text = self._unsettled()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._settled, self._new = self._new, []
        return text

    def flush(self) -> str:
        """What is left, half characters included."""
        text = self._unsettled()
        self._settled, self._new = self._new, []
        return text

    def _unsettled(self) -> str:
        before = self._tokenizer.decode(self._settled)
        return self._tokenizer.decode([*self._settled, *self._new])[len(before) :]


def _byte_table(tokenizer: tokenizers.Tokenizer) -> list[bytes] | None:
    """The bytes of every token, none for special ones, or None where tokens do not stand for bytes alone."""
    settings: dict[str, Any] = json.loads(tokenizer.to_str())
    decoder: dict[str, Any] | None = settings["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    special = {token["id"] for token in settings["added_tokens"] if token["special"]}
    byte_of = _byte_alphabet()
    vocabulary = tokenizer.get_vocab()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, at in vocabulary.items():
        if at not in special:
            known = all(character in byte_of for character in token)
            table[at] = bytes(byte_of[character] for character in token) if known else token.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character; this reads them back.

    The printable bytes stand for themselves, the others, in order, for the characters from U+0100 on.
    """
    alphabet = {character: ord(character) for character in ByteLevel.alphabet() if ord(character) < 256}
    others = sorted(set(range(256)) - set(alphabet.values()))
    return alphabet | {chr(256 + at): byte for at, byte in enumerate(others)}


# ---- chat templates ------------------------------------------------------------------------------------------


def _read_template(folder: Path) -> Template | None:
    own_file = folder / "chat_template.jinja"
    try:
        config = _read_config(folder / "tokenizer_config.json")
        source = own_file.read_text(encoding="utf-8") if own_file.is_file() else _template_in(config)
        if source is None:
            return None
        compiled = _environment().from_string(source)
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder}: the chat template is not UTF-8: {error}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"{folder}: the chat template does not compile: {error}") from error
    return Template(compiled, {name: text for name in _SPECIAL_TOKENS if (text := _text_of(config.get(name)))})


def _read_config(file: Path) -> dict[str, Any]:
    """The tokenizer's configuration, empty where there is none."""
    if not file.is_file():
        return {}
    try:
        config: object = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", config)


def _template_in(config: dict[str, Any]) -> str | None:
    """The template that a tokenizer's configuration holds: one, or several of which one is the default."""
    found: object = config.get("chat_template")
    if isinstance(found, list):
        named = [cast("dict[str, object]", entry) for entry in cast("list[object]", found) if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise ValueError(f"chat_template in tokenizer_config.json: {type(found).__name__}, wanted text")
    return found


def _text_of(token: object) -> str | None:
    """A special token is written as its text or as an object around it."""
    text = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the settings, filter and functions that transformers gives them."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own words for training; for serving it is only a bracket."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        """Keep what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as it is, where jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    """The server's local time: some templates tell the model which day it is."""
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
