"""Lists of numbers as little-endian u32 or float32 one after another, which parse a hundred times sooner than messages.

Reading checks shape only: whole numbers, runs that end where they say. What fails raises `InvalidRequest` with the
field's name and both numbers.
"""

import sys
from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any, TypeVar, cast

from octavo.errors import InvalidRequest
from octavo.ids import BlockId, SequenceId

_Record = TypeVar("_Record")
FromPair = Callable[[tuple[int, int]], _Record]
"""Makes a record of two numbers."""

NEW_TUPLE = cast(Callable[..., Any], tuple.__new__)  # pyright: ignore[reportUnknownMemberType]  # of tuples of anything
"""A named tuple's class, its fields as a tuple -> the record. `_make` does the same in Python, for twice the time."""

MAX_PARTS = 1 << 14
"""Of one kind in an exchange, or sequences in a part of an inventory: many times those of the largest batch. To read a
million would hold up every other worker for seconds. Also of parts in an inventory, which then has 16 GB."""

_PAIR_BYTES = 8
_BIG_ENDIAN = sys.byteorder == "big"


def pack(values: Iterable[int]) -> bytes:
    """The values as little-endian u32. Raises OverflowError outside [0, 2^32)."""
    words = array("I", values)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def unpack(field: str, raw: bytes) -> "array[int]":
    """The u32 values of a flat field."""
    if len(raw) % 4:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of 4")
    words = array("I", raw)
    if _BIG_ENDIAN:
        words.byteswap()
    return words


def pack_floats(values: Iterable[float]) -> bytes:
    """The values as little-endian f32."""
    words = array("f", values)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def unpack_floats(field: str, raw: bytes) -> "array[float]":
    """The f32 values of a flat field."""
    if len(raw) % 4:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of 4")
    words = array("f", raw)
    if _BIG_ENDIAN:
        words.byteswap()
    return words


def pack_all(records: Collection[Iterable[int]]) -> bytes:
    """The numbers of records that have nothing else."""
    return pack(chain.from_iterable(records)) if records else b""


def unpack_pairs(field: str, raw: bytes, make: FromPair[_Record], most: int = sys.maxsize) -> tuple[_Record, ...]:
    """A record of every pair of values."""
    if not raw:
        return ()
    if len(raw) % _PAIR_BYTES:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of {_PAIR_BYTES}")
    require_few(field, len(raw) // _PAIR_BYTES, most)
    words = unpack(field, raw)
    return tuple([make((words[at], words[at + 1])) for at in range(0, len(words), 2)])


def runs_of(field: str, words: "array[int]", head: int, most: int = sys.maxsize) -> list[tuple[int, int, int]]:
    """(at, start, end) of each run: `head` values from `at` on, a count, and that many values, [start, end)."""
    runs: list[tuple[int, int, int]] = []
    size, at = len(words), 0
    while at < size:
        start = at + head + 1
        end = start + words[start - 1] if start <= size else start
        if end > size:
            raise InvalidRequest(f"{field}: a run ends at value {end}, there are {size}")
        runs.append((at, start, end))
        require_few(field, len(runs), most)
        at = end
    return runs


def unpack_sequences(field: str, raw: bytes, most: int = sys.maxsize) -> tuple[SequenceId, ...]:
    """Each value is one. To call `SequenceId` for each would cost as much as making its record."""
    if not raw:
        return ()
    words = unpack(field, raw)
    require_few(field, len(words), most)
    return cast(tuple[SequenceId, ...], tuple(words))


def require_few(field: str, count: int, most: int = MAX_PARTS) -> None:
    if count > most:
        raise InvalidRequest(f"{field}: {count} of them, wanted at most {most}")


def unpack_blocks(field: str, raw: bytes) -> tuple[BlockId, ...]:
    """Each value is one."""
    return cast(tuple[BlockId, ...], tuple(unpack(field, raw)))


def absent_or_whole(field: str, value: bytes, size: int) -> bytes:
    if len(value) not in (0, size):
        raise InvalidRequest(f"{field}: {len(value)} bytes, wanted 0 or {size}")
    return value
