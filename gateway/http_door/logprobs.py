"""Logprobs as OpenAI's API writes them: one way in completions, another in chats; and vLLM's for prompts."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from octavo.records.serve import TokenLogprobs

Piece = Callable[[int], bytes]
"""What a token stands for by itself."""

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has not; OpenAI's own."""


class TextLogprobs:
    """Of one choice of a completion, whose tokens are told in order."""

    def __init__(self, piece: Piece) -> None:
        """Write tokens as `piece` has them."""
        self._piece = piece
        self._offset = 0

    def told(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next tokens; a prompt's first has none. With the likeliest, the chosen one is always listed."""
        texts = [_text(self._piece, token) for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else _finite(each.logprob) for each in logprobs],
            "top_logprobs": [
                None if each is None else self._top(token, each) for token, each in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: int, told: TokenLogprobs) -> dict[str, float]:
        """By text. Of two tokens that are written alike, the likelier one stands for both."""
        listed: dict[str, float] = {}
        for each, logprob in chain(told.top, [(token, told.logprob)]):
            listed.setdefault(_text(self._piece, each), _finite(logprob))
        return listed


def chat_logprobs(piece: Piece, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Of tokens of a chat's choice."""
    content = [
        _entry(piece, token, told.logprob) | {"top_logprobs": [_entry(piece, *each) for each in told.top]}
        for token, told in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    piece: Piece, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """Of a prompt, its first token without: by token id, the prompt's own and the likeliest."""
    behind = (
        {
            str(each): {"logprob": _finite(logprob), "decoded_token": _text(piece, each)}
            for each, logprob in chain([(token, told.logprob)], told.top)
        }
        for token, told in zip(tokens[1:], logprobs, strict=True)
    )
    return [None, *behind]


def _entry(piece: Piece, token: int, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece, token), "logprob": _finite(logprob), "bytes": list(piece(token))}


def _text(piece: Piece, token: int) -> str:
    """A part of a character is written as U+FFFD; its bytes tell more."""
    return piece(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
