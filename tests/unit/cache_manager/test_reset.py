"""S9, in the books: a reset takes effect at once, and whoever runs goes on."""

import pytest

from cache_manager.core.cache_epochs import MAX_CACHE_EPOCH, CacheEpochs, require_cache_epoch
from cache_manager.core.changes import Forgotten, Published
from cache_manager.core.single_flight import WaitFor
from octavo.errors import InvalidRequest
from octavo.ids import NEVER_RESET, CacheEpoch, SequenceId, WorkerId
from tests.support.books import append, compute, idle, open_ledger, tokens_of

A, B, C, D = map(SequenceId, range(1, 5))
V, W = WorkerId("v"), WorkerId("w")
FIRST, SECOND = CacheEpoch(1), CacheEpoch(2)


def counts(ledger):
    audit = ledger.audit()
    return audit.free_blocks, audit.cached_blocks, audit.held_blocks


def test_blocks_without_an_owner_are_free_at_once_and_held_ones_when_they_are_released():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 9))
    compute(ledger, B, tokens_of(100, 9))
    ledger.free(B)
    assert counts(ledger) == (11, 2, 3)
    assert ledger.reset(FIRST) == 4
    assert counts(ledger) == (13, 0, 3)
    ledger.free(A)
    assert counts(ledger) == (16, 0, 0)
    ledger.check()


def test_a_sequence_that_runs_goes_on_and_publishes_nothing_more():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 6))
    blocks = ledger.blocks(A)
    ledger.take_changes()
    ledger.reset(FIRST)
    append(ledger, A, tokens_of(6, 30))
    assert ledger.length(A) == 36
    assert ledger.blocks(A)[:2] == blocks
    assert ledger.take_changes() == (Forgotten(),)
    assert ledger.attach(B, tokens_of(0, 37)) == 0
    ledger.check()


@pytest.mark.parametrize("length", [0, 3, 4, 5])
def test_nothing_is_published_by_a_sequence_that_had_published_nothing_yet(length):
    """Boundary lengths: it may stand before its first block."""
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 8))
    append(ledger, A, tokens_of(0, length))
    ledger.reset(FIRST)
    append(ledger, A, tokens_of(length, 8 - length))
    assert ledger.published() == []
    ledger.check()


def test_forks_of_a_sequence_from_before_the_reset_publish_nothing_either():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 6))
    ledger.reset(FIRST)
    ledger.fork(A, [B])
    append(ledger, B, tokens_of(100, 6))
    assert ledger.published() == []
    ledger.free(A)
    ledger.free(B)
    assert counts(ledger) == (16, 0, 0)


def test_a_block_that_was_published_is_written_in_place_once_it_is_not_and_nobody_else_holds_it():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 4))
    ledger.truncate(A, 2)
    ledger.reset(FIRST)
    blocks = ledger.blocks(A)
    append(ledger, A, [7, 7])
    assert ledger.blocks(A) == blocks
    assert idle(ledger).copies == ()


def test_nobody_waits_for_a_sequence_from_before_the_reset():
    """Its blocks will not be published: whoever comes now computes them, and is waited for."""
    ledger = open_ledger()
    prompt = tokens_of(0, 9)
    ledger.attach(A, prompt)
    assert ledger.attach(B, prompt) == WaitFor(A)
    ledger.reset(FIRST)
    assert ledger.attach(B, prompt) == 0
    assert ledger.attach(C, prompt) == WaitFor(B)
    append(ledger, A, prompt)
    append(ledger, B, prompt)
    assert ledger.attach(C, prompt) == 8
    assert ledger.blocks(C) == ledger.blocks(B)[:2]
    ledger.check()


def test_copies_of_the_index_are_told_once_that_nothing_of_before_counts():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 4))
    ledger.reset(FIRST)
    compute(ledger, B, tokens_of(0, 4))
    assert ledger.take_changes() == (Forgotten(), Published(tuple(ledger.published())))


def test_every_grant_tells_the_cache_epoch():
    ledger = open_ledger()
    assert idle(ledger).cache_epoch == 0
    ledger.reset(SECOND)
    assert idle(ledger).cache_epoch == SECOND


def test_a_full_pool_takes_new_prompts_after_a_reset_as_soon_as_the_old_ones_leave():
    ledger = open_ledger(num_blocks=4)
    compute(ledger, A, tokens_of(0, 16))
    ledger.reset(FIRST)
    ledger.free(A)
    assert compute(ledger, B, tokens_of(0, 16)) == 0
    assert len(ledger.published()) == 4


# ---- the numbers ---------------------------------------------------------------------------------------------


def test_every_reset_has_a_larger_number_than_all_before_and_than_the_time():
    epochs = CacheEpochs()
    assert [epochs.raised(who, now) for who, now in ((V, 5.0), (None, 5.0), (W, 4.0), (V, 6.0))] == [
        5000,
        5001,
        5002,
        6000,
    ]


def test_a_worker_that_was_away_is_told_of_the_last_reset_that_meant_it():
    epochs = CacheEpochs()
    assert (epochs.least(V), epochs.least(W)) == (0, 0)
    epochs.raised(V, 1.0)
    assert (epochs.least(V), epochs.least(W)) == (1000, 0)
    epochs.raised(None, 2.0)
    assert (epochs.least(V), epochs.least(W)) == (2000, 2000)


def test_a_later_reset_at_another_manager_has_the_larger_number():
    one, other = CacheEpochs(), CacheEpochs()
    assert one.raised(V, 1.0) < other.raised(V, 2.0) < one.raised(V, 3.0)


def test_a_manager_that_has_forgotten_goes_on_from_what_workers_were_told():
    epochs = CacheEpochs()
    assert epochs.heard(CacheEpoch(9000)) == 9000
    assert epochs.heard(NEVER_RESET) == 9000, "a new worker has the hash chains of the others"
    assert epochs.raised(None, 1.0) == 9001


def test_a_number_that_leaves_no_room_for_another_is_refused():
    require_cache_epoch(CacheEpoch(MAX_CACHE_EPOCH))
    with pytest.raises(InvalidRequest, match=r"register\.cache_epoch: 9223372036854775809, at most 922337203685477"):
        require_cache_epoch(CacheEpoch(MAX_CACHE_EPOCH + 1))
