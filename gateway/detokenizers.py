"""Token ids in, text out as it grows: joined, the pieces are the text of all tokens, and none ends within a character.

Text goes on from the prompt: where a tokenizer drops the space before a text's first word, it keeps it behind a prompt.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
"""A token that stands for one byte, where others stand for characters."""

SPACE_MARK = "\u2581"
"""How SentencePiece writes a space."""

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
"""Of the prompt, which a decoder sees before the output: more than one character has."""
_MAX_HELD_TOKENS = 16
"""That wait for a character to become whole: more than it can have. Behind so many, there is none."""


class SettlingDetokenizer(Protocol):
    """A detokenizer that knows whether it holds anything back."""

    @property
    def settled(self) -> bool:
        """Whether the tokens so far end with a character."""
        ...

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens settle."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come, half a character as U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class ByteVocabulary:
    """A vocabulary whose tokens are byte strings."""

    bytes_of: Sequence[bytes]
    """Of every token; none of special ones."""
    drops_first_space: bool
    """Whether a text does not begin with the space that its first token has."""


class ByteDetokenizer:
    """Exact for any sequence of tokens, constant work per token."""

    def __init__(self, vocabulary: ByteVocabulary, prompt: Sequence[int]) -> None:
        """Go on from `prompt`."""
        self._bytes_of = vocabulary.bytes_of
        self._held = b""
        """The beginning of a character."""
        self._drops_space = vocabulary.drops_first_space and not any(self._of(token) for token in prompt)

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens settle. A token that the tokenizer does not know has none."""
        content = b"".join(map(self._of, tokens))
        if self._drops_space and content:
            content, self._drops_space = content.removeprefix(b" "), False
        return self._decoded(content, final=False)

    def _of(self, token: int) -> bytes:
        return self._bytes_of[token] if token < len(self._bytes_of) else b""

    def _decoded(self, content: bytes, *, final: bool) -> str:
        content = self._held + content
        text, size = codecs.utf_8_decode(content, "replace", final)
        self._held = content[size:]
        return text

    @property
    def settled(self) -> bool:
        """Whether the tokens so far end with a character."""
        return not self._held

    def flush(self) -> str:
        """A character that never became whole, as U+FFFD."""
        return self._decoded(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary: decode a window of tokens twice, with and without the new ones.

    The window begins with the tokens of the last settled piece, since a decoder may treat the first token of a text
    unlike the rest. Text that ends in U+FFFD may be half a character, so the window grows until it does not.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        """Go on from `prompt`; `decode` gives the text of tokens, special ones left out."""
        self._decode = decode
        self._settled: list[int] = list(prompt[-_CONTEXT_TOKENS:])
        self._new: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens settle, which each by itself decides."""
        return "".join(map(self._push_one, tokens))

    def _push_one(self, token: int) -> str:
        self._new.append(token)
        text = self._unsettled()
        if not text or (text.endswith(_REPLACEMENT) and len(self._new) < _MAX_HELD_TOKENS):
            return ""
        self._settled, self._new = self._new, []
        return text

    @property
    def settled(self) -> bool:
        """Whether the tokens so far end with a character."""
        return not self._new

    def flush(self) -> str:
        """What is left, half characters included."""
        text = self._unsettled()
        self._settled, self._new = self._new, []
        return text

    def _unsettled(self) -> str:
        before = self._decode(self._settled)
        return self._decode([*self._settled, *self._new])[len(before) :]


# ---- what tokens stand for -----------------------------------------------------------------------------------


def byte_vocabulary(tokenizer: tokenizers.Tokenizer) -> ByteVocabulary | None:
    """What every token stands for, or None where that depends on its neighbours or is not known."""
    settings: dict[str, Any] = json.loads(tokenizer.to_str())
    steps = _steps(settings["decoder"])
    match steps:
        case [{"type": "ByteLevel"}]:
            read, drops_first_space = _read_byte_level, False
        case [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if rest in ([], [_DROP_FIRST_SPACE]):
            read, drops_first_space = _read_marked, bool(rest)
        case _:
            return None
    special = {token["id"] for token in settings["added_tokens"] if token["special"]}
    vocabulary = tokenizer.get_vocab()
    bytes_of = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, at in vocabulary.items():
        if at not in special:
            bytes_of[at] = read(token)
    return ByteVocabulary(bytes_of, drops_first_space)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


_DROP_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _read_marked(token: str) -> bytes:
    """As SentencePiece writes tokens."""
    byte = BYTE_NAME.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode()


def _read_byte_level(token: str) -> bytes:
    """As byte-level BPE writes tokens; those that were added by hand are written as they are."""
    known = all(character in _BYTE_OF for character in token)
    return bytes(_BYTE_OF[character] for character in token) if known else token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character; this reads them back.

    The printable bytes stand for themselves, the others, in order, for the characters from U+0100 on.
    """
    alphabet = {character: ord(character) for character in ByteLevel.alphabet() if ord(character) < 256}
    others = sorted(set(range(256)) - set(alphabet.values()))
    return alphabet | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
