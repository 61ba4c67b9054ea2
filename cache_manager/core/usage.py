"""How full a worker's pool is, in blocks and in tokens."""

from collections.abc import Collection
from dataclasses import dataclass

from cache_manager.core.block import Block
from cache_manager.core.block_pool import BlockPool
from cache_manager.core.block_table import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Blocks by state, and what lies in those that are held."""

    block_size: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    sequences: int
    put_off_blocks: int
    """Of the cached blocks, those that make room only when nothing else can: for a floor, or retained."""
    proven_ratio: int
    """How many times younger a cached block counts that was found again."""
    held_tokens: int
    """Positions of held blocks in which a committed token lies, those of a shared block counted once."""


def usage_of(pool: BlockPool, tables: Collection[BlockTable], block_size: int) -> PoolUsage:
    """Looks only at blocks behind the full ones of each table: one or two for a sequence that decodes."""
    return PoolUsage(
        block_size=block_size,
        held_blocks=pool.num_held,
        cached_blocks=pool.num_cached,
        free_blocks=pool.num_free,
        sequences=len(tables),
        put_off_blocks=pool.order.num_put_off,
        proven_ratio=pool.order.ratio,
        held_tokens=pool.num_held * block_size - _empty_positions(tables, block_size),
    )


def _empty_positions(tables: Collection[BlockTable], block_size: int) -> int:
    """Of held blocks: the ends of tail blocks, and blocks that are reserved and not written."""
    filled: dict[Block, int] = {}
    for table in tables:
        first = table.full_blocks
        for index, block in enumerate(table.blocks[first:], start=first):
            if block in filled or block.is_published:  # a published one is full, whoever has gone back in it
                continue
            holders = tables if block.references > 1 else (table,)
            filled[block] = max(_inside(holder, index, block, block_size) for holder in holders)
    return sum(block_size - count for count in filled.values())


def _inside(table: BlockTable, index: int, block: Block, block_size: int) -> int:
    """Committed positions of the table in a block; one that is shared has the same index everywhere."""
    if index >= len(table.blocks) or table.blocks[index] is not block:
        return 0
    return min(max(table.length - index * block_size, 0), block_size)
