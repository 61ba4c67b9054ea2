"""The block-hash chain: what a block is called wherever prefix indexes are spoken of, such as in Redis.

    hash of block i = sha256(hash of block i-1 ‖ its tokens as little-endian u32)
    hash of block -1 = root = sha256(every field that changes activations, each behind its length)

Two blocks with the same tokens and different histories, models, tenants or number formats never share a hash, and
two processes compute the same hash by construction: no pickle, no seed, no dictionary order. The chain of block
contents is that of vLLM's automatic prefix caching; the chapter keeps the whole prefix as its key.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from octavo.ids import BlockHash

HASH_BYTES = 32

TENANT_TAG_BYTES = 8

TOKEN_BYTES = 4
"""A token as it is hashed and compared: little-endian u32."""

_BIG_ENDIAN = sys.byteorder == "big"
_VERSION = b"octavo block chain 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRoot:
    """Everything besides the tokens that changes a block's keys and values, or who may see them."""

    model_digest: bytes
    tokenizer_digest: bytes
    dtype: str
    """Of weights and activations."""
    kv_dtype: str
    """Of the pool."""
    block_size: int
    adapter_digest: bytes = b""
    media: tuple[tuple[int, bytes], ...] = ()
    """(position, digest of the content) of every image or sound in the prompt, in order."""
    salt: bytes = b""
    """Keeps a tenant's blocks apart."""
    cache_epoch: int = 0
    """Raised to forget everything at once."""

    def hash(self) -> BlockHash:
        """The hash that stands before a sequence's first block."""
        fields = [
            self.model_digest,
            self.tokenizer_digest,
            self.dtype.encode(),
            self.kv_dtype.encode(),
            self.block_size.to_bytes(4, "little"),
            self.adapter_digest,
            digest_of(*(part for at, content in self.media for part in (at.to_bytes(8, "little"), content))),
            self.salt,
            self.cache_epoch.to_bytes(8, "little"),
        ]
        return BlockHash(digest_of(_VERSION, *fields))


_NO_TOKEN = b"\xff" * TOKEN_BYTES


class Seam(NamedTuple):
    """Where a chain that everybody shares becomes a tenant's own: the salt stands before the tokens of that block."""

    block: int
    """Its index; -1: nowhere."""
    salt: bytes

    def joined(self, block: int, tokens: bytes) -> bytes:
        """What a block holds as far as its hash is concerned: its tokens; at the seam, the salt before them.

        Behind what is no token, so that a private block begins like no other block, whatever its salt.
        """
        return _NO_TOKEN + self.salt + tokens if block == self.block else tokens


NO_SEAM = Seam(-1, b"")


def digest_of(*fields: bytes) -> bytes:
    """sha256 of the fields, each behind its length (u64), so that no two lists of fields run together."""
    state = sha256()
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The tokens as little-endian u32. Raises OverflowError for an id outside [0, 2^32)."""
    if isinstance(tokens, array) and tokens.typecode == "I" and not _BIG_ENDIAN:
        return tokens.tobytes()  # as they come off the wire
    words = array("I", tokens)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def tokens_of_bytes(raw: bytes) -> "array[int]":
    """The tokens that `token_bytes` made these of."""
    words = array("I", raw)
    if _BIG_ENDIAN:
        words.byteswap()
    return words


def next_hash(parent: bytes, block_tokens: bytes) -> BlockHash:
    """Hash of the block that holds `block_tokens` (as `token_bytes` gives them) and follows `parent`."""
    # A call of BlockHash is not free.
    return sha256(parent + block_tokens).digest()  # type: ignore[return-value]


def block_hashes(root: BlockHash, tokens: Sequence[int], block_size: int, seam: Seam = NO_SEAM) -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`, in order."""
    raw = token_bytes(tokens)
    width = TOKEN_BYTES * block_size
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(raw) - width + 1, width):
        parent = next_hash(parent, seam.joined(len(hashes), raw[start : start + width]))
        hashes.append(parent)
    return hashes


def hit_candidates(prompt_tokens: int, block_size: int) -> int:
    """Leading full blocks of a prompt that a hit may cover: at least one token is always left to compute.

    The last position of the prompt must run, since its logits give the first output token.
    """
    return max(0, prompt_tokens - 1) // block_size
