"""Which ratio of the eviction order suits the requests of the moment: they are rehearsed in small caches, one a ratio.

The rehearsal takes a sample of the blocks, chosen by their hashes, and gives each small cache as large a share of the
pool's blocks as the sample is of all blocks. So a small cache finds about the same part of what it is asked for as the
pool would under its ratio, for a small part of the work. Recent requests count more than old ones.

What is in the small caches decides nothing but the ratio, hence nothing but which hits there are.
"""

from collections import OrderedDict
from collections.abc import Sequence

from octavo.ids import BlockHash

_LEAST_BLOCKS = 256
"""Of a small cache, if the pool has so many."""

_MOST_SPARSE = 256
"""The sample is one block in so many, or more."""

_ALL = b"\xff" * 33
"""More than any hash."""

_MEMORY = 2.0
"""Requested blocks, in small caches full, after which a hit counts half."""

_LEAD = 1.02
"""The next ratio has found so many times what the present one has: what is less may be chance."""


class Rehearsal:
    """The small caches of one pool."""

    def __init__(self, num_blocks: int, ratios: Sequence[int]) -> None:
        self._sparse = 1
        while self._sparse < _MOST_SPARSE and num_blocks // (2 * self._sparse) >= _LEAST_BLOCKS:
            self._sparse *= 2
        self._sampled_below = ((1 << 32) // self._sparse).to_bytes(5)[1:] if self._sparse > 1 else _ALL
        blocks = max(1, num_blocks // self._sparse)
        self._caches = [_SmallCache(blocks, ratio) for ratio in ratios]
        self._keeps = 0.5 ** (1 / (_MEMORY * blocks))
        self._best = self._caches[0]

    def use(self, hashes: list[BlockHash]) -> int:
        """A sequence ends, which has found or published these blocks of its chain, in order. Returns the best ratio."""
        if len(self._caches) > 1:
            below = self._sampled_below
            if sample := [block_hash for block_hash in hashes if block_hash < below]:
                self._rehearse(sample)
        return self._best.ratio

    def _rehearse(self, hashes: Sequence[BlockHash]) -> None:
        keeps = self._keeps ** len(hashes)
        for cache in self._caches:
            cache.found = cache.found * keeps + cache.use(hashes)
        best = max(self._caches, key=lambda cache: cache.found)
        if best.found > _LEAD * self._best.found:
            self._best = best


class _SmallCache:
    """The eviction order of a few blocks by their hashes."""

    def __init__(self, num_blocks: int, ratio: int) -> None:
        self.ratio = ratio
        self.found = 0.0
        """Blocks that were in it when they were asked for, the older the less."""
        self._num_blocks = num_blocks
        self._once: OrderedDict[BlockHash, int] = OrderedDict()
        self._proven: OrderedDict[BlockHash, int] = OrderedDict()
        self._clock = 0

    def use(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks of one chain are asked for, in order, and put in. Returns how many there were already."""
        once, proven = self._once, self._proven
        found = [once.pop(block_hash, None) or proven.pop(block_hash, None) for block_hash in hashes]
        self._make_room(len(hashes))
        self._clock += len(hashes)
        for block_hash, before in zip(reversed(hashes), reversed(found), strict=True):
            (once if before is None else proven)[block_hash] = self._clock
        return len(hashes) - found.count(None)

    def _make_room(self, count: int) -> None:
        once, proven = self._once, self._proven
        for _ in range(min(len(once) + len(proven), len(once) + len(proven) + count - self._num_blocks)):
            (once if self._once_is_next() else proven).popitem(last=False)

    def _once_is_next(self) -> bool:
        if not self._once or not self._proven:
            return bool(self._once)
        age, proven_age = (self._clock - next(iter(ring.values())) for ring in (self._once, self._proven))
        return proven_age <= self.ratio * age
