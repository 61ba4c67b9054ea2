"""What prompts may begin with that is nobody's secret: the operator's list, as every model of the gateway reads it.

    system = ["You are a helpful assistant."]      # messages that conversations begin with
    text = ["Translate into French:"]              # beginnings of raw prompts

Tenants do not see one another's blocks, so a system prompt that all of them use is computed once for each. What stands
in this list is computed once for all: the full blocks of a prompt that begin like a listed one are everybody's.
"""

import logging
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from gateway.core.request import ChatMessage, ChatPrompt, TextPrompt
from gateway.tokenizer import Tokenizer
from octavo.errors import InvalidRequest

log = logging.getLogger("octavo.gateway")

PublicPrefix = TextPrompt | ChatPrompt

_ANY_QUESTION = "?"
"""Many templates want something to follow a system message. A prompt's public part ends before it, or with it."""


def read_public_prefixes(file: Path) -> tuple[PublicPrefix, ...]:
    """The list of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such list; names the field at fault.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        if unknown := sorted(content.keys() - {"system", "text"}):
            raise ValueError(f"{unknown[0]}: not known, wanted system or text")
        chats = [
            ChatPrompt((ChatMessage("system", text), ChatMessage("user", _ANY_QUESTION)))
            for text in _strings("system", content.get("system", []))
        ]
        return (*chats, *map(TextPrompt, _strings("text", content.get("text", []))))
    except ValueError as error:  # TOML that does not parse, and bytes that are no text, included
        raise ValueError(f"{file}: {error}") from error


def as_read_by(tokenizer: Tokenizer, model: str, prefixes: Iterable[PublicPrefix]) -> tuple[tuple[int, ...], ...]:
    """Their tokens. What a model's template refuses is left out, and said in the log."""
    read: list[tuple[int, ...]] = []
    for prefix in prefixes:
        try:
            if isinstance(prefix, ChatPrompt):
                read.append(tokenizer.encode(tokenizer.render(prefix), add_special_tokens=False))
            else:
                read.append(tokenizer.encode(prefix.text, add_special_tokens=True))
        except InvalidRequest as refusal:
            log.warning("public_prefix_refused", extra={"model": model, "reason": str(refusal)})
    return tuple(read)


def _strings(field: str, value: object) -> Sequence[str]:
    if not isinstance(value, list):
        raise ValueError(f"{field}: {type(value).__name__}, wanted a list of strings")
    for at, item in enumerate(cast("list[object]", value)):
        if not isinstance(item, str) or not item:
            raise ValueError(f"{field}[{at}]: {'empty' if item == '' else type(item).__name__}, wanted a string")
    return cast("list[str]", value)
