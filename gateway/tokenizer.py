"""Adapter: text <-> token ids, with a model folder's own tokenizer and chat template. No torch, no transformers.

Encoding gives what transformers gives: special tokens are added to raw text and not to a rendered chat. Decoding is
incremental: joined, the pieces equal the text of all tokens, special tokens left out, and no piece ends within a
character.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from gateway.chat_template import read_template
from gateway.core.request import ChatPrompt
from gateway.core.tool_calls import ToolForm
from gateway.core.turns import Answer
from gateway.detokenizers import (
    BYTE_NAME,
    SPACE_MARK,
    ByteDetokenizer,
    SettlingDetokenizer,
    WindowDetokenizer,
    byte_vocabulary,
)
from octavo.errors import InvalidRequest

"""How vocabularies that are not of bytes name their fallback for one."""


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
        self._template = read_template(folder)
        self.tool_form: ToolForm | None = None if self._template is None else self._template.tool_form
        """How the model writes its calls of tools, as far as its chat template tells."""
        if self.tool_form is not None:
            self._tokenizer = _with_visible(self._tokenizer, self.tool_form.marks)
        self._vocabulary = byte_vocabulary(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, kind in added.items() if kind.special)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest token id that it knows."""

    def encode(self, text: str, answers: Sequence[Answer] = (), *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text, of which some parts may be earlier answers: of those their own tokens, where that works.

        Special tokens of the tokenizer are wanted around raw text, and not around a rendered conversation.

        They are used where both ways decode to the very same text. A tokenizer that puts a space before whatever it is
        given may not stand between an answer and what follows it; then nothing counts as remembered.
        """
        if not answers:
            return self._encode(text, add_special_tokens=add_special_tokens)
        exact: list[int] = []
        at = 0
        for answer in answers:
            exact += self._encode(text[at : answer.start], add_special_tokens=add_special_tokens and at == 0)
            exact += answer.tokens
            at = answer.end
        exact += self._encode(text[at:], add_special_tokens=False)
        before = self._encode("", add_special_tokens=add_special_tokens)
        if self._spelt(exact) == self._spelt(before) + text.encode():
            return tuple(exact)
        plain = self._encode(text, add_special_tokens=add_special_tokens)
        same = self.decode(exact, special_tokens=True) == self.decode(plain, special_tokens=True)
        return tuple(exact) if same else plain  # the decoder may say less than the tokens spell, such as a first space

    def _spelt(self, tokens: Sequence[int]) -> bytes:
        """What tokens stand for, one by one, special ones for their names."""
        return b"".join(map(self.piece, tokens))

    def covered(self, prompt: Sequence[int], tokens: Sequence[int], text: str) -> tuple[int, int]:
        """How much of a text its tokens stand for exactly that were generated after `prompt`, as (tokens, characters).

        The longest beginning of `tokens` that ends with a character, before any special token (which has no part in the
        text) and within `text`: a stop string may have cut the text off inside a token. (0, 0) where there is no text.
        """
        detokenizer = self.detokenizer(prompt)
        at = covered = characters = 0
        for count, token in enumerate(tokens, start=1):
            if token in self._special or self._tokenizer.id_to_token(token) is None:
                break
            at += len(detokenizer.push((token,)))
            if at > len(text):
                break
            if detokenizer.settled and at:
                covered, characters = count, at
        return covered, characters

    def render(self, chat: ChatPrompt) -> str:
        """A conversation as text, up to where the assistant's next turn begins.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest(f"prompt.chat: model {self._model} has no chat template")
        return self._template.render(chat)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """As a batch of one: the library holds Python's lock for as long as it encodes a single text."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of all tokens, special ones left out unless asked for. Those that are not known have none."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special_tokens)

    def piece(self, token: int) -> bytes:
        """What a token stands for by itself: its bytes, a special token's name, nothing for one that is not known."""
        known = () if self._vocabulary is None else self._vocabulary.bytes_of
        if token < len(known) and known[token]:
            return known[token]
        name = self._tokenizer.id_to_token(token) or ""
        if byte := BYTE_NAME.fullmatch(name):
            return bytes.fromhex(byte[1])
        return name.replace(SPACE_MARK, " ").encode()

    def detokenizer(self, prompt: Sequence[int] = ()) -> SettlingDetokenizer:
        """A fresh incremental decoder, for one output that goes on from `prompt`."""
        if self._vocabulary is not None:
            return ByteDetokenizer(self._vocabulary, prompt)
        return WindowDetokenizer(self.decode, prompt)


def _with_visible(tokenizer: tokenizers.Tokenizer, marks: Sequence[str]) -> tokenizers.Tokenizer:
    """The tokenizer with these tokens as part of the text, where they are special: they say where a call begins."""
    settings: dict[str, Any] = json.loads(tokenizer.to_str())
    hidden = [token for token in settings["added_tokens"] if token["special"] and token["content"] in marks]
    for token in hidden:
        token["special"] = False
    return tokenizers.Tokenizer.from_str(json.dumps(settings)) if hidden else tokenizer
