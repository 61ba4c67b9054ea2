"""What a worker keeps about each published block of its pool, so that lost books can be opened again from it.

    u32 block ‖ u32 block before it in its chain, or NO_BLOCK ‖ 32 bytes root of the chain ‖ its tokens as u32

Little-endian, of one size within a pool. The manager writes records into its grants and reads them from an inventory; a
worker keeps them by block and looks at nothing but the first number. A fact about a block that must survive its manager
is added here.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from octavo.errors import InvalidRequest
from octavo.hashing import HASH_BYTES, TOKEN_BYTES
from octavo.ids import BlockHash, BlockId

NO_BLOCK = BlockId(2**32 - 1)
"""Stands before the first block of a chain."""

_HEAD = Struct("<II")
_BLOCK = Struct("<I")
_PREFIX_BYTES = _HEAD.size + HASH_BYTES
_pack_head = _HEAD.pack


class BlockRecord(NamedTuple):
    """One record, read."""

    block: BlockId
    parent: BlockId | None
    """The block before it in its chain; None for the first."""
    root: BlockHash
    """Of its chain."""
    tokens: bytes
    """As they are hashed."""


def record_bytes(block_size: int) -> int:
    """The size of a record."""
    return _PREFIX_BYTES + TOKEN_BYTES * block_size


def record_parts(block: BlockId, parent: BlockId, root: BlockHash, tokens: bytes) -> tuple[bytes, ...]:
    """What makes a record when it is joined. `parent` is NO_BLOCK for the first block of a chain."""
    return _pack_head(block, parent), root, tokens


def split_records(field: str, raw: bytes, block_size: int) -> Iterator[tuple[BlockId, bytes]]:
    """(block, its record) of each record of a flat field.

    Raises:
        InvalidRequest: the field does not end with a record.
    """
    size = record_bytes(block_size)
    if len(raw) % size:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of {size}")
    for at in range(0, len(raw), size):
        yield BlockId(_BLOCK.unpack_from(raw, at)[0]), raw[at : at + size]


def read_records(field: str, raw: bytes, block_size: int) -> Iterator[BlockRecord]:
    """The records of a flat field. Raises InvalidRequest as `split_records`."""
    for block, record in split_records(field, raw, block_size):
        _, parent = _HEAD.unpack_from(record)
        root, tokens = record[_HEAD.size : _PREFIX_BYTES], record[_PREFIX_BYTES:]
        yield BlockRecord(block, None if parent == NO_BLOCK else BlockId(parent), BlockHash(root), tokens)
