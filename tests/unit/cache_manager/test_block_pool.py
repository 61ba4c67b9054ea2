import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_manager.core.block_pool import BlockPool
from octavo.errors import PoolExhausted
from tests.support.books import numbers


def published(pool: BlockPool, count: int) -> list:
    """Blocks that are published and held."""
    blocks = pool.allocate(count)
    pool.publish(blocks)
    return blocks


def test_fresh_blocks_come_in_order():
    pool = BlockPool(3)
    assert numbers(pool.allocate(2)) == [0, 1]
    assert pool.allocate(0) == []
    assert numbers(pool.allocate(1)) == [2]


def test_too_small_a_pool_says_both_numbers_and_gives_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(PoolExhausted, match="wanted 3 blocks, 2 available"):
        pool.allocate(3)
    assert numbers(pool.allocate(2)) == [1, 2]
    pool.check()


def test_a_block_is_free_when_its_last_reference_is_released():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert (block.references, pool.num_available) == (1, 1)
    pool.release([block])
    assert (block.references, pool.num_available) == (0, 2)


def test_unpublished_blocks_return_to_the_front():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.release([second, first])
    assert list(pool.free_list()) == [first, second, *pool.blocks[2:]]


def test_published_blocks_return_to_the_back():
    pool = BlockPool(4)
    first, second = published(pool, 2)
    pool.release([second, first])
    assert list(pool.free_list()) == [*pool.blocks[2:], second, first]


def test_each_block_of_a_mixed_release_finds_its_end_of_the_list():
    pool = BlockPool(6)
    kept, (lower, upper) = published(pool, 2), pool.allocate(2)
    pool.release([upper, kept[1], lower, kept[0]])
    assert list(pool.free_list()) == [lower, upper, *pool.blocks[4:], kept[1], kept[0]]
    assert (pool.num_free, pool.num_cached, pool.num_held) == (4, 2, 0)
    pool.check()


def test_a_published_block_can_be_shared_after_its_last_owner_left():
    pool = BlockPool(2)
    (block,) = published(pool, 1)
    pool.release([block])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 1, 0)
    pool.share([block])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 1)
    assert numbers(pool.free_list()) == [1]


def test_an_allocated_block_is_no_longer_published():
    pool = BlockPool(1)
    (block,) = published(pool, 1)
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert not block.is_published
    pool.check()


@pytest.mark.parametrize("misuse", ["release", "share", "publish"])
def test_a_free_block_can_only_be_allocated(misuse):
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block}"):
        getattr(pool, misuse)([block])
    pool.check()


def test_the_check_finds_a_count_that_is_wrong():
    pool = BlockPool(2)
    pool.allocate(1)
    assert list(pool.violations([2, 0])) == ["block 0 has 1 references, 2 tables name it"]


def test_the_check_finds_a_block_that_is_nowhere():
    pool = BlockPool(2)
    pool._blank.popitem()
    assert [*pool.violations([0, 0])] == ["1 blocks count as blank, 2 are"]


def some_of(blocks) -> st.SearchStrategy:
    """Some of these blocks, each once, in any order."""
    return (
        st.lists(st.sampled_from(sorted(blocks, key=lambda block: block.number)), unique=True)
        if blocks
        else st.just([])
    )


class PoolMachine(RuleBasedStateMachine):
    """Against a list in eviction order and a dict of counts."""

    @initialize(num_blocks=st.integers(1, 6))
    def open(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.order = [*self.pool.blocks]
        self.counts = {}
        self.published = set()

    @rule(data=st.data())
    def allocate(self, data):
        blocks = self.pool.allocate(data.draw(st.integers(0, len(self.order))))
        assert blocks == self.order[: len(blocks)]
        del self.order[: len(blocks)]
        self.published.difference_update(blocks)
        self.counts |= dict.fromkeys(blocks, 1)

    @rule(more=st.integers(1, 3))
    def allocate_too_many(self, more):
        with pytest.raises(PoolExhausted):
            self.pool.allocate(len(self.order) + more)

    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(some_of(self.counts.keys() | self.published))
        self.pool.share(blocks)
        for block in blocks:
            if block in self.order:
                self.order.remove(block)
            self.counts[block] = self.counts.get(block, 0) + 1

    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(some_of(self.counts))
        self.pool.release(blocks)
        for block in blocks:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                del self.counts[block]
                self.order.insert(len(self.order) if block in self.published else 0, block)

    @rule(data=st.data())
    def publish(self, data):
        blocks = data.draw(some_of(self.counts))
        self.pool.publish(blocks)
        self.published.update(blocks)

    @invariant()
    def books_balance(self):
        pool = self.pool
        pool.check()
        assert list(pool.free_list()) == self.order
        assert not list(pool.violations([self.counts.get(block, 0) for block in pool.blocks]))
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_blocks
        assert (pool.num_held, pool.num_cached) == (len(self.counts), len(self.published - self.counts.keys()))
        assert pool.num_available == len(self.order)


TestPoolMachine = PoolMachine.TestCase
