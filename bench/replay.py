"""The traces of bench/traces as prompts: lists of numbers, one a block, equal as far as the prompts are.

As prompts alone, in order, or with the time of their arrival and their lengths in tokens.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_manager.core.books import empty_books
from cache_manager.core.eviction import SEGMENTED, EvictionPolicy
from cache_manager.core.ledger import Ledger
from octavo.hashing import HASH_BYTES
from octavo.ids import Epoch
from octavo.records.fleet import PoolSpec

FOLDER = Path(__file__).parent / "traces"

Prompt = Sequence[int]
"""A number for each full block. Within a trace, numbers that are equal behind equal numbers are equal blocks."""

CHARACTERS = 64
"""Of a block of a trace that holds text: 16 tokens, at about 4 characters a token."""


def mooncake() -> list[Prompt]:
    """Chat, in blocks of 512 tokens; the last, partial block of a prompt is left out."""
    return [_ids(row)[: row["input_length"] // 512] for row in _shipped("mooncake-conversation-a")]


def ragpulse() -> list[Prompt]:
    """Questions behind retrieved passages, in blocks of 16 tokens."""
    return [_ids(row)[: row["input_length"] // 16] for row in _shipped("ragpulse-a")]


def claude_code() -> list[Prompt]:
    """Coding agents, in blocks of 512 tokens: every eighth of 64."""
    return [_ids(row)[7::8] for row in _shipped("claude-code-a")]


def agent_text() -> list[Prompt]:
    """Coding agents' whole texts, in blocks of 64 characters."""
    texts: dict[int, str] = {}
    numbers: dict[str, int] = {}
    prompts: list[Prompt] = []
    for row in _shipped("agent-text-a"):
        session: int = row["session_id"]
        text = texts[session] = texts.get(session, "")[: row["keep"]] + row["add"]
        pieces = [text[at : at + CHARACTERS] for at in range(0, len(text) - CHARACTERS + 1, CHARACTERS)]
        prompts.append([numbers.setdefault(piece, len(numbers)) for piece in pieces])
    return prompts


TRACES = {"mooncake": mooncake, "ragpulse": ragpulse, "claude_code": claude_code, "agent_text": agent_text}

_FILES = {
    "mooncake": ("mooncake-conversation-a", 512),
    "ragpulse": ("ragpulse-a", 16),
    "claude_code": ("claude-code-a", 512),
    "agent_text": ("agent-text-a", 16),
}
"""The file of each trace, and the tokens of a block of its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    at: float
    """Seconds from the first one's arrival."""
    prompt: Prompt
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timed:
    """Requests by their arrival."""

    name: str
    block_tokens: int
    arrivals: Sequence[Arrival]


def timed(name: str) -> Timed:
    """One of TRACES."""
    file, block_tokens = _FILES[name]
    return Timed(name, block_tokens, _arrivals(_shipped(file), TRACES[name]()))


def timed_file(path: Path, block_tokens: int) -> Timed:
    """A trace in another file, gzipped or not, with the columns that bench/traces/README.md tells of."""
    rows = list(_rows(path))
    prompts = [_ids(row)[: row["input_length"] // block_tokens] for row in rows]
    return Timed(path.name.split(".")[0], block_tokens, _arrivals(rows, prompts))


def _arrivals(rows: Iterable[dict[str, Any]], prompts: Sequence[Prompt]) -> list[Arrival]:
    return [
        Arrival(
            at=row["timestamp"] / 1000,
            prompt=prompt,
            prompt_tokens=row["input_length"],
            output_tokens=row["output_length"],
        )
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def _ids(row: dict[str, Any]) -> list[int]:
    return row.get("hash_ids") or [at for first, count in row["hash_id_ranges"] for at in range(first, first + count)]


def _shipped(name: str) -> Iterator[dict[str, Any]]:
    return _rows(FOLDER / f"{name}.jsonl.gz")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def open_books(num_blocks: int, policy: EvictionPolicy = SEGMENTED) -> Ledger:
    """Books in which a token stands for a block of a trace."""
    spec = PoolSpec(
        model="bench",
        model_digest=bytes(HASH_BYTES),
        tokenizer_digest=bytes(HASH_BYTES),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=1,
        num_blocks=num_blocks,
        max_model_tokens=num_blocks,
        vocab_size=1 << 31,
    )
    return Ledger(spec, Epoch(1), books=empty_books(spec, eviction=policy))
