import random

import pytest

from cache_manager.core.rehearsal import Rehearsal
from octavo.hashing import digest_of
from octavo.ids import BlockHash

NUM_BLOCKS = 1024


class Prompts:
    """Uses of chains of one block each, by name, in a rehearsal of ratios 1 and 8."""

    def __init__(self):
        self.rehearsal = Rehearsal(NUM_BLOCKS, (1, 8))

    def use(self, name):
        return self.rehearsal.use([BlockHash(digest_of(b"test", str(name).encode()))])


def test_what_comes_once_between_what_comes_again_makes_hits_count():
    prompts, chance, ratio = Prompts(), random.Random(1), 1
    for round_number in range(6 * NUM_BLOCKS):
        prompts.use(("often", chance.randrange(NUM_BLOCKS // 2)))
        ratio = prompts.use(("once", 2 * round_number))
        ratio = prompts.use(("once", 2 * round_number + 1))
    assert ratio == 8


def test_what_is_used_twice_and_never_again_leaves_plain_lru():
    prompts, ratio = Prompts(), 1
    for start in range(8 * NUM_BLOCKS):
        prompts.use(start)
        ratio = prompts.use(max(0, start - NUM_BLOCKS // 2))
    assert ratio == 1


def test_one_ratio_is_not_rehearsed():
    rehearsal = Rehearsal(NUM_BLOCKS, (1,))
    assert rehearsal.use([BlockHash(bytes(32))]) == 1
    assert not rehearsal._caches[0].found


@pytest.mark.parametrize(
    ("num_blocks", "sparse", "blocks"), [(1, 1, 1), (100, 1, 100), (1024, 4, 256), (1 << 20, 256, 4096)]
)
def test_a_large_pool_is_rehearsed_with_a_part_of_its_blocks(num_blocks, sparse, blocks):
    """As large a part of the blocks as the small caches are of the pool."""
    rehearsal = Rehearsal(num_blocks, (1, 2))
    sample = [digest_of(b"test", str(n).encode()) for n in range(4096)]
    sampled = sum(block_hash < rehearsal._sampled_below for block_hash in sample)
    assert sampled == pytest.approx(4096 / sparse, rel=0.5)
    assert rehearsal._caches[0]._num_blocks == blocks
