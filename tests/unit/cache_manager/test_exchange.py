"""A whole exchange against the ledger: order, all or nothing, unmet, and what the worker is told."""

import pytest

from cache_manager.core.changes import Evicted, Published
from octavo.errors import InvalidRequest, UnknownSequence
from octavo.records.attend import BlockCopy, TableChange
from tests.support.books import append, compute, exchange, idle, open_ledger, state_of, tokens_of


def busy_ledger(**fields):
    """Sequence 1 has 6 tokens and room for 2 more, sequence 2 has 5 and room for 3. The worker knows all of it."""
    ledger = open_ledger(**fields)
    compute(ledger, 1, tokens_of(0, 6))
    compute(ledger, 2, tokens_of(100, 5))
    idle(ledger)
    ledger.take_changes()
    return ledger


def test_a_prompt_is_attached_and_reserved_in_one_exchange():
    ledger = open_ledger()
    grant = ledger.apply(exchange(step=7, attaches={1: tokens_of(0, 6)}, reserves=[(1, 6)]))
    assert (grant.epoch, grant.step) == (1, 7)
    assert grant.attached == ((1, 0),)
    assert grant.tables == (TableChange(1, 0, (0, 1)),)
    assert (grant.copies, grant.unmet, grant.free_blocks) == ((), (), 14)


def test_only_what_changed_travels():
    ledger = busy_ledger()
    grant = ledger.apply(exchange(commits={1: [6, 7]}, reserves=[(1, 1), (2, 1)]))
    assert grant.tables == (TableChange(1, 2, (4,)),)
    assert idle(ledger).tables == ()


def test_a_hit_tells_the_blocks_it_found():
    ledger = busy_ledger()
    grant = ledger.apply(exchange(attaches={3: tokens_of(0, 6)}, reserves=[(3, 6)]))
    assert grant.attached == ((3, 4),)
    assert grant.tables == (TableChange(3, 0, (*ledger.blocks(1)[:1], 4)),)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_the_first_reserve_ends_at_the_last_token(length):
    """Boundary lengths kS-1, kS, kS+1: the worker does not know the hit when it asks."""
    ledger = busy_ledger()
    ledger.apply(exchange(attaches={3: tokens_of(0, length)}, reserves=[(3, 4000)]))
    assert len(ledger.blocks(3)) == -(-length // 4)
    ledger.check()


def test_a_merge_tells_the_new_entry():
    ledger = open_ledger()
    prompt = tokens_of(0, 4)
    ledger.apply(exchange(attaches={1: prompt, 2: prompt}, reserves=[(1, 4), (2, 4)]))
    grant = ledger.apply(exchange(commits={1: prompt, 2: prompt}))
    assert grant.tables == (TableChange(2, 0, ledger.blocks(1)),)


def test_a_copy_is_told_with_the_entry_it_fills():
    ledger = busy_ledger()
    shared = ledger.blocks(2)[1]
    grant = ledger.apply(exchange(forks=[(2, [3], 1)]))
    private = ledger.blocks(3)[1]
    assert grant.copies == (BlockCopy(shared, private),)
    assert grant.tables == (TableChange(3, 0, (ledger.blocks(2)[0], private)),)


class TestOrder:
    def test_a_last_block_is_published_before_its_sequence_is_freed(self):
        ledger = busy_ledger()
        ledger.apply(exchange(commits={1: [6, 7]}, finished=[1]))
        assert ledger.audit().cached_blocks == 2

    def test_a_fork_takes_over_from_a_parent_that_ends(self):
        ledger = busy_ledger()
        grant = ledger.apply(
            exchange(commits={1: [6]}, forks=[(1, [3, 4], 0)], finished=[1], reserves=[(3, 1), (4, 1)])
        )
        assert 1 not in ledger
        assert ledger.length(3) == ledger.length(4) == 7
        assert len(grant.copies) == 1
        ledger.check()

    def test_freed_blocks_are_granted_at_once(self):
        ledger = busy_ledger(num_blocks=4)
        grant = ledger.apply(exchange(finished=[2], reserves=[(1, 10)]))
        assert grant.unmet == ()

    def test_a_sequence_can_be_freed_and_attached_again(self):
        ledger = busy_ledger()
        grant = ledger.apply(exchange(finished=[1], attaches={1: tokens_of(0, 6)}, reserves=[(1, 6)]))
        assert grant.attached == ((1, 4),)

    def test_hits_are_taken_before_anything_is_allocated(self):
        ledger = busy_ledger(num_blocks=4)
        ledger.apply(exchange(finished=[1, 2]))
        grant = ledger.apply(exchange(attaches={3: tokens_of(0, 6), 4: tokens_of(100, 6)}, reserves=[(3, 6), (4, 6)]))
        assert grant.attached == ((3, 4), (4, 4))
        assert grant.unmet == ()

    def test_truncation_comes_first(self):
        ledger = busy_ledger()
        grant = ledger.apply(exchange(truncations={1: 3}, reserves=[(1, 1)]))
        assert ledger.length(1) == 3
        assert len(grant.copies) == 1


class TestUnmet:
    def test_reserves_are_met_oldest_first(self):
        ledger = busy_ledger(num_blocks=5)
        grant = ledger.apply(exchange(reserves=[(1, 6), (2, 4)]))
        assert grant.unmet == (2,)
        assert grant.free_blocks == 0
        assert ledger.length(2) == 5

    def test_a_smaller_reserve_is_met_after_one_that_does_not_fit(self):
        ledger = busy_ledger(num_blocks=5)
        grant = ledger.apply(exchange(reserves=[(1, 99), (2, 4)]))
        assert grant.unmet == (1,)

    def test_an_unmet_reserve_keeps_nothing(self):
        ledger = busy_ledger(num_blocks=5)
        before = state_of(ledger)
        assert ledger.apply(exchange(reserves=[(1, 99)])).unmet == (1,)
        assert state_of(ledger) == before

    def test_a_new_sequence_that_is_unmet_holds_its_hit(self):
        ledger = busy_ledger(num_blocks=4)
        grant = ledger.apply(exchange(attaches={3: tokens_of(0, 9)}, reserves=[(3, 9)]))
        assert (grant.attached, grant.unmet) == (((3, 4),), (3,))
        ledger.apply(exchange(finished=[3]))
        ledger.check()

    def test_a_fork_that_is_too_wide_leaves_no_child(self):
        """S28: five children that need a block each, three blocks; references as before."""
        ledger = busy_ledger(num_blocks=7)
        before = state_of(ledger)
        grant = ledger.apply(exchange(forks=[(1, [3, 4, 5, 6, 7], 1)], reserves=[(3, 1), (7, 1)]))
        assert grant.unmet == (3, 4, 5, 6, 7)
        assert not [child for child in range(3, 8) if child in ledger]
        assert state_of(ledger) == before

    def test_a_preempted_sequence_comes_back_to_its_own_blocks(self):
        """S18, in the books: the newest gives way, and finds again what nobody needed meanwhile."""
        ledger = busy_ledger(num_blocks=5)
        assert ledger.apply(exchange(reserves=[(1, 6), (2, 4)])).unmet == (2,)
        assert ledger.apply(exchange(finished=[2], reserves=[(1, 6)])).unmet == ()
        ledger.apply(exchange(finished=[1]))
        grant = ledger.apply(exchange(attaches={2: tokens_of(100, 5)}, reserves=[(2, 5)]))
        assert grant.attached == ((2, 4),)
        ledger.check()


WRONG = [
    (exchange(finished=[9]), UnknownSequence, "sequence 9"),
    (exchange(finished=[1, 1]), UnknownSequence, "sequence 1 is freed already"),
    (exchange(truncations={9: 0}), UnknownSequence, "sequence 9"),
    (exchange(truncations={1: 7}), InvalidRequest, "wanted 7, it has 6"),
    (exchange(commits={9: [1]}), UnknownSequence, "sequence 9"),
    (exchange(commits={1: [1, 2, 3]}), InvalidRequest, "end at 9, writable up to 8"),
    (exchange(commits={1: [1000]}), InvalidRequest, "token id 1000, vocab_size is 1000"),
    (exchange(truncations={1: 5}, commits={1: [1]}), InvalidRequest, "end at 6, writable up to 5"),
    (exchange(forks=[(9, [3], 0)]), UnknownSequence, "sequence 9"),
    (exchange(forks=[(1, [2], 0)], finished=[2]), InvalidRequest, "sequence 2 is in the books already"),
    (exchange(forks=[(1, [3], 0), (2, [3], 0)]), InvalidRequest, "sequence 3 is in the books already"),
    (exchange(forks=[(1, [3], 0), (3, [4], 0)]), UnknownSequence, "sequence 3"),
    (exchange(forks=[(1, [3], 0)], finished=[3]), UnknownSequence, "sequence 3"),
    (exchange(forks=[(1, [3], 0)], attaches={3: [1]}), InvalidRequest, "sequence 3 is in the books already"),
    (exchange(forks=[(1, [], 0)]), InvalidRequest, "children of sequence 1"),
    (exchange(forks=[(1, [3], -1)]), InvalidRequest, "wanted -1"),
    (exchange(attaches={1: [1]}), InvalidRequest, "sequence 1 is in the books already"),
    (exchange(attaches={3: []}), InvalidRequest, "0 of them"),
    (exchange(attaches={3: [1] * 65}), InvalidRequest, "65 of them, from 1 to 64"),
    (exchange(attaches={3: [1000]}), InvalidRequest, "token id 1000"),
    (exchange(reserves=[(9, 1)]), UnknownSequence, "sequence 9"),
    (exchange(reserves=[(1, -1)]), InvalidRequest, "wanted -1"),
    (exchange(finished=[1], reserves=[(1, 1)]), UnknownSequence, "sequence 1 is freed already"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_an_exchange_with_a_wrong_part_is_refused_whole(wrong, error, message):
    """All parts around the wrong one are right, and none of them happens."""
    ledger = busy_ledger()
    before = state_of(ledger)
    right = exchange(
        truncations={2: 4},
        commits={} if wrong.commits or wrong.truncations else {1: [6]},
        attaches={50: tokens_of(0, 9)},
        reserves=[(2, 1), (50, 9)],
    )
    mixed = type(wrong)(
        epoch=wrong.epoch,
        step=wrong.step,
        truncations=right.truncations + wrong.truncations,
        commits=right.commits + wrong.commits,
        forks=wrong.forks,
        finished=wrong.finished,
        attaches=right.attaches + wrong.attaches,
        reserves=right.reserves + wrong.reserves,
    )
    if 2 in wrong.finished:
        mixed = wrong
    with pytest.raises(error, match=message):
        ledger.apply(mixed)
    assert state_of(ledger) == before
    assert ledger.take_changes() == ()


def test_the_right_parts_alone_are_taken():
    """What the test above mixes wrong parts into is right in itself."""
    ledger = busy_ledger()
    grant = ledger.apply(
        exchange(truncations={2: 4}, commits={1: [6]}, attaches={50: tokens_of(0, 9)}, reserves=[(2, 1), (50, 9)])
    )
    assert grant.attached == ((50, 4),)
    assert grant.unmet == ()


def test_an_exchange_of_another_epoch_is_a_mistake_of_the_caller():
    ledger = open_ledger()
    foreign = exchange()
    ledger.epoch += 1
    with pytest.raises(AssertionError, match="exchange of epoch 1, books of 2"):
        ledger.apply(foreign)


def test_changes_of_the_index_come_in_order():
    ledger = open_ledger(num_blocks=1)
    compute(ledger, 1, tokens_of(0, 4))
    ledger.apply(exchange(finished=[1], attaches={2: tokens_of(100, 4)}, reserves=[(2, 4)]))
    append(ledger, 2, tokens_of(100, 4))
    assert [type(change) for change in ledger.take_changes()] == [Published, Evicted, Published]
