"""Builders and readers for the books of the cache manager."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import _lru_cache_wrapper
from typing import Any

from cache_manager.core.block import Block, Siblings
from cache_manager.core.ledger import Ledger
from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from octavo.ids import BlockId, Epoch, SequenceId
from octavo.records.attend import Attach, Commit, Exchange, Fork, Grant, Reservation, Truncation
from octavo.records.fleet import PoolSpec
from octavo.records.scope import Scope

EPOCH = Epoch(1)


def pool_spec(**fields: Any) -> PoolSpec:
    """A small pool: 16 blocks of 4, a vocabulary of 1,000."""
    defaults = {
        "model": "tiny",
        "model_digest": b"m" * 32,
        "tokenizer_digest": b"t" * 32,
        "dtype": "float32",
        "kv_dtype": "float32",
        "block_size": 4,
        "num_blocks": 16,
        "max_model_tokens": 4096,
        "vocab_size": 1000,
    }
    return PoolSpec(**(defaults | fields))


def open_ledger(*, min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS, **fields: Any) -> Ledger:
    """The books of an empty pool; `fields` as for `pool_spec`."""
    return Ledger(pool_spec(**fields), EPOCH, min_copy_tokens=min_copy_tokens)


def tokens_of(start: int, count: int) -> list[int]:
    """`count` tokens, from `start` on."""
    return list(range(start, start + count))


def compute(ledger: Ledger, sequence: int, tokens: Sequence[int], salt: bytes = b"", public_tokens: int = 0) -> int:
    """Attach a prompt and commit all of it, as a worker does. Returns the tokens reused."""
    reused = ledger.attach(SequenceId(sequence), tokens, Scope(salt=salt, public_tokens=public_tokens))
    assert isinstance(reused, int), f"sequence {sequence} has to wait: {reused}"
    append(ledger, sequence, tokens[reused:])
    return reused


def append(ledger: Ledger, sequence: int, tokens: Sequence[int]) -> None:
    """Reserve and commit."""
    ledger.reserve(SequenceId(sequence), len(tokens))
    ledger.commit(SequenceId(sequence), tokens)


def exchange(
    *,
    step: int = 1,
    truncations: Mapping[int, int] | None = None,
    commits: Mapping[int, Sequence[int]] | None = None,
    forks: Sequence[tuple[int, Sequence[int], int]] = (),
    finished: Sequence[int] = (),
    attaches: Mapping[int, Sequence[int]] | None = None,
    reserves: Sequence[tuple[int, int]] = (),
) -> Exchange:
    """An exchange from plain numbers."""
    return Exchange(
        epoch=EPOCH,
        step=step,
        truncations=tuple(Truncation(SequenceId(s), length) for s, length in (truncations or {}).items()),
        commits=tuple(Commit(SequenceId(s), tuple(tokens)) for s, tokens in (commits or {}).items()),
        forks=tuple(Fork(SequenceId(p), tuple(map(SequenceId, children)), n) for p, children, n in forks),
        finished=tuple(map(SequenceId, finished)),
        attaches=tuple(Attach(SequenceId(s), tuple(tokens)) for s, tokens in (attaches or {}).items()),
        reserves=tuple(Reservation(SequenceId(s), n) for s, n in reserves),
    )


def idle(ledger: Ledger) -> Grant:
    """The grant of an empty exchange: what the worker was not told yet."""
    return ledger.apply(exchange())


def state_of(thing: Any) -> Any:
    """Everything an object knows, as plain values, so that before and after can be compared."""
    if isinstance(thing, _lru_cache_wrapper):
        return None  # remembers, but does not matter
    if isinstance(thing, dict):
        return [(state_of(key), state_of(value)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, array)):
        return [state_of(item) for item in thing]
    if isinstance(thing, Block):
        return {name: _by_number(getattr(thing, name)) for name in _names(thing)}
    if callable(thing) or isinstance(thing, (int, float, str, bytes, type(None))):
        return thing
    return {name: state_of(getattr(thing, name)) for name in _names(thing)}


def _names(thing: Any) -> Sequence[str]:
    return getattr(thing, "__mypyc_attrs__", None) or getattr(thing, "__slots__", None) or [*vars(thing)]


def _by_number(part: Any) -> Any:
    """A part of a block: other blocks, which lead back to it, by their numbers."""
    if isinstance(part, Siblings):
        return numbers(part.blocks)
    return part.number if isinstance(part, Block) else part


def numbers(blocks: Iterable[Block]) -> list[BlockId]:
    """By which these blocks go."""
    return [block.number for block in blocks]
