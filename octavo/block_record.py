"""What a worker keeps about each published block of its pool, so that lost books can be opened again from it.

    u32 block ‖ u32 block before it in its chain, or NO_BLOCK ‖ 32 bytes root of the chain ‖ its tokens as u32
    ‖ 8 bytes tenant on whose account it is, zeros for nobody ‖ u32 retain_seconds of the request that published it

Little-endian, of one size within a pool. The manager writes records into its grants and reads them from an inventory; a
worker keeps them by block, and finds by all but the first number and the last two facts which block a prompt would hit
next (`find_key`). A fact about a block that must survive its manager is added here.
"""

from collections.abc import Callable, Iterator
from struct import Struct

from octavo.errors import InvalidRequest
from octavo.hashing import HASH_BYTES, TENANT_TAG_BYTES, TOKEN_BYTES
from octavo.ids import BlockHash, BlockId, TenantTag

NO_BLOCK = BlockId(2**32 - 1)
"""Stands before the first block of a chain."""

BlockRecord = tuple[BlockId, BlockId, BlockHash, bytes, TenantTag, int]
"""(block, the one before it or NO_BLOCK, root of its chain, its tokens as they are hashed, tenant, retain_seconds)."""

_HEAD = Struct("<II")
_BLOCK = Struct("<I")
_CLAIM = Struct(f"<{TENANT_TAG_BYTES}sI")


def record_bytes(block_size: int) -> int:
    """The size of a record."""
    return _layout(block_size).size


def record_packer(block_size: int) -> Callable[[BlockId, BlockId, BlockHash, bytes, TenantTag, int], bytes]:
    """What makes a record of the parts of a BlockRecord."""
    return _layout(block_size).pack


def find_key(parent: BlockId, root: BlockHash, tokens: bytes) -> bytes:
    """By what a block is found: the part of its record that says where it stands and what it holds."""
    return _BLOCK.pack(parent) + root + tokens


def find_key_of(record: bytes) -> bytes:
    """The same, of a record that is there."""
    return record[_BLOCK.size : -_CLAIM.size]


def split_records(field: str, raw: bytes, block_size: int) -> Iterator[tuple[BlockId, bytes]]:
    """(block, its record) of each record of a flat field.

    Raises:
        InvalidRequest: the field does not end with a record.
    """
    size = _require_whole(field, raw, block_size).size
    for at in range(0, len(raw), size):
        yield BlockId(_BLOCK.unpack_from(raw, at)[0]), raw[at : at + size]


def read_records(field: str, raw: bytes, block_size: int) -> Iterator[BlockRecord]:
    """The records of a flat field. Raises InvalidRequest as `split_records`."""
    return _require_whole(field, raw, block_size).iter_unpack(raw)


def _layout(block_size: int) -> Struct:
    return Struct(f"{_HEAD.format}{HASH_BYTES}s{TOKEN_BYTES * block_size}s{TENANT_TAG_BYTES}sI")


def _require_whole(field: str, raw: bytes, block_size: int) -> Struct:
    layout = _layout(block_size)
    if len(raw) % layout.size:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of {layout.size}")
    return layout
