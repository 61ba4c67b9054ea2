"""The traces of bench/traces as prompts: lists of numbers, one a block, equal as far as the prompts are."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "traces"

Prompt = Sequence[int]
"""A number for each full block. Within a trace, numbers that are equal behind equal numbers are equal blocks."""

CHARACTERS = 64
"""Of a block of a trace that holds text: 16 tokens, at about 4 characters a token."""


def mooncake() -> list[Prompt]:
    """Chat, in blocks of 512 tokens; the last, partial block of a prompt is left out."""
    return [_ids(row)[: row["input_length"] // 512] for row in _rows("mooncake-conversation-a")]


def ragpulse() -> list[Prompt]:
    """Questions behind retrieved passages, in blocks of 16 tokens."""
    return [_ids(row)[: row["input_length"] // 16] for row in _rows("ragpulse-a")]


def claude_code() -> list[Prompt]:
    """Coding agents, in blocks of 512 tokens: every eighth of 64."""
    return [_ids(row)[7::8] for row in _rows("claude-code-a")]


def agent_text() -> list[Prompt]:
    """Coding agents' whole texts, in blocks of 64 characters."""
    texts: dict[int, str] = {}
    numbers: dict[str, int] = {}
    prompts: list[Prompt] = []
    for row in _rows("agent-text-a"):
        session: int = row["session_id"]
        text = texts[session] = texts.get(session, "")[: row["keep"]] + row["add"]
        pieces = [text[at : at + CHARACTERS] for at in range(0, len(text) - CHARACTERS + 1, CHARACTERS)]
        prompts.append([numbers.setdefault(piece, len(numbers)) for piece in pieces])
    return prompts


TRACES = {"mooncake": mooncake, "ragpulse": ragpulse, "claude_code": claude_code, "agent_text": agent_text}


def _ids(row: dict[str, Any]) -> list[int]:
    return row.get("hash_ids") or [at for first, count in row["hash_id_ranges"] for at in range(first, first + count)]


def _rows(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)
