import random

from cache_manager.core.rehearsal import Rehearsal
from octavo.hashing import digest_of
from octavo.ids import BlockHash, BlockId

NUM_BLOCKS = 1024


class Prompts:
    """Uses of blocks of one block each, all published, in a rehearsal of ratios 1 and 8."""

    def __init__(self):
        self.rehearsal = Rehearsal(NUM_BLOCKS, (1, 8))
        self.blocks = 0
        self.known = {}

    def use(self, name):
        if name not in self.known:
            self.known[name] = block = BlockId(self.blocks)
            self.blocks += 1
            self.rehearsal.publish([block], [BlockHash(digest_of(b"test", str(name).encode()))])
        return self.rehearsal.use([self.known[name]])


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
    rehearsal.publish([BlockId(1)], [BlockHash(bytes(32))])
    assert rehearsal.use([BlockId(1)]) == 1


def test_an_evicted_block_is_no_longer_in_the_sample():
    prompts = Prompts()
    for _ in range(50):
        for name in range(20):
            prompts.use(name)
    found = [cache.found for cache in prompts.rehearsal._caches]
    prompts.rehearsal.forget(prompts.known.values())
    for name in range(20):
        prompts.use(name)
    assert [cache.found for cache in prompts.rehearsal._caches] == found
