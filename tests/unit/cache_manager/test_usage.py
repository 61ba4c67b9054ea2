"""How full held blocks are: what is shared counts once, whoever holds how much of it."""

from octavo.ids import CacheEpoch, SequenceId
from tests.support.books import compute, open_ledger, tokens_of

A, B, C = map(SequenceId, (1, 2, 3))


def test_a_tail_that_is_shared_counts_once():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 6))
    ledger.fork(A, [B, C])
    assert (ledger.usage().held_blocks, ledger.usage().held_tokens) == (2, 6)
    ledger.reserve(B, 1)
    assert (ledger.usage().held_blocks, ledger.usage().held_tokens) == (3, 8)


def test_what_is_reserved_ahead_is_empty():
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 9))
    ledger.reserve(A, 9)
    assert (ledger.usage().held_blocks, ledger.usage().held_tokens) == (3, 0)


def test_a_block_is_as_full_as_its_fullest_holder_says():
    """One sequence has gone back in it, the other has not; after a reset it is not even published."""
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 8))
    ledger.fork(A, [B])
    ledger.truncate(B, 5)
    assert ledger.usage().held_tokens == 8
    ledger.reset(CacheEpoch(1))
    assert ledger.usage().held_tokens == 8
    ledger.free(A)
    assert ledger.usage().held_tokens == 5
