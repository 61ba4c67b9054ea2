"""The parts of one worker's books: the blocks, what is published in them, who has which, who computes what.

They are empty for a new pool and filled from an inventory for one that has lost its books (restoration.py). From then
on a ledger owns them.
"""

from dataclasses import dataclass

from cache_manager.core.block_pool import BlockPool
from cache_manager.core.block_table import BlockTables
from cache_manager.core.eviction import SEGMENTED, EvictionPolicy
from cache_manager.core.prefix_index import NextHash, PrefixIndex
from cache_manager.core.rehearsal import Rehearsal
from cache_manager.core.single_flight import SingleFlight
from cache_manager.core.vocabulary import MAX_VOCAB_SIZE, Vocabulary
from octavo.errors import InvalidRequest
from octavo.hashing import next_hash
from octavo.records.fleet import PoolSpec

MAX_BLOCKS = 1 << 22
"""Of one pool: 67 million positions in blocks of 16. To open the books of so many takes two seconds and 0.9 GB."""

MAX_BLOCK_SIZE = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Of one pool."""

    pool: BlockPool
    index: PrefixIndex
    tables: BlockTables
    flights: SingleFlight
    rehearsal: Rehearsal
    vocabulary: Vocabulary


def empty_books(spec: PoolSpec, next_hash: NextHash = next_hash, eviction: EvictionPolicy = SEGMENTED) -> Books:
    """Those of a pool in which nothing is.

    Raises:
        InvalidRequest: there can be no such pool.
    """
    _require_within("num_blocks", spec.num_blocks, MAX_BLOCKS)
    _require_within("block_size", spec.block_size, MAX_BLOCK_SIZE)
    _require_within("vocab_size", spec.vocab_size, MAX_VOCAB_SIZE)
    index = PrefixIndex(spec.block_size, next_hash)
    return Books(
        pool=BlockPool(spec.num_blocks, eviction.allowances),
        index=index,
        tables=BlockTables(),
        flights=SingleFlight(index),
        rehearsal=Rehearsal(spec.num_blocks, eviction.ratios),
        vocabulary=Vocabulary(spec.vocab_size),
    )


def _require_within(field: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InvalidRequest(f"{field}: {value}, from 1 to {most} is possible")
