"""Sub-block reuse in the books: what is copied, from where, and when not."""

import pytest

from cache_manager.core.ledger import Ledger
from cache_manager.core.single_flight import WaitFor
from octavo.ids import CacheEpoch, SequenceId
from octavo.records.attend import BlockCopy
from octavo.records.scope import Scope
from tests.support.books import append, compute, exchange, idle, open_ledger, tokens_of

A, B, C, D = map(SequenceId, range(1, 5))


def told(ledger: Ledger) -> Ledger:
    """The same, once the worker knows all of it."""
    idle(ledger)
    return ledger


def with_chain(tokens, *, held=False, **fields) -> Ledger:
    """Books in which a sequence has computed these tokens; unless `held`, it has ended."""
    ledger = open_ledger(**fields)
    compute(ledger, A, tokens)
    if not held:
        ledger.free(A)
    return told(ledger)


@pytest.mark.parametrize(("shared", "hit"), [(3, 0), (15, 15), (16, 16), (17, 16), (20, 20), (31, 31)])
def test_a_prefix_is_shared_to_the_token_if_enough_of_a_block_begins_alike(shared, hit):
    """S4: B-1, B, B+1, 2B-1 shared tokens (B = 16), each followed by five of its own, with `min_copy_tokens` 4."""
    ledger = open_ledger(block_size=16, min_copy_tokens=4)
    compute(ledger, A, tokens_of(0, shared) + tokens_of(500, 20))
    assert ledger.attach(B, tokens_of(0, shared) + tokens_of(600, 5)) == hit
    ledger.check()


@pytest.mark.parametrize(("min_copy_tokens", "hit"), [(0, 0), (1, 48), (48, 48), (49, 0)])
def test_forty_eight_tokens_of_a_block_of_64_are_reused(min_copy_tokens, hit):
    """S7: nothing if only whole blocks may be used, 48 if parts may."""
    ledger = with_chain(tokens_of(0, 64), block_size=64, min_copy_tokens=min_copy_tokens)
    assert ledger.attach(B, tokens_of(0, 48) + tokens_of(500, 30)) == hit
    assert len(idle(ledger).copies) == (hit > 0)


@pytest.mark.parametrize("held", [True, False])
def test_the_part_is_copied_into_a_block_of_its_own(held):
    ledger = with_chain(tokens_of(0, 16), held=held, block_size=8)
    assert ledger.attach(B, [*tokens_of(0, 13), 99, 98]) == 13
    first, own = ledger.blocks(B)
    copies = idle(ledger).copies
    assert copies == (BlockCopy(source=copies[0].source, target=own),)
    append(ledger, B, [99, 98, 97])
    assert ledger.blocks(B) == (first, own), "what was copied is written in place"
    assert idle(ledger).copies == ()
    ledger.check()
    assert ledger.attach(C, tokens_of(0, 17)) == 16, "what was copied from is as it was"
    assert ledger.attach(D, [*tokens_of(0, 13), 99, 98, 97, 0]) == 16, "and the copy is published under its own tokens"


def test_a_prompt_of_whole_blocks_is_computed_from_its_last_token_on():
    """S5: the last token is never taken from a copy."""
    ledger = with_chain(tokens_of(0, 16), block_size=8)
    assert ledger.attach(B, tokens_of(0, 16)) == 15


def test_the_closest_of_the_blocks_that_follow_is_copied():
    ledger = open_ledger(block_size=8)
    for sequence, end in ((A, 4), (B, 6), (C, 5)):
        compute(ledger, sequence, tokens_of(0, 8 + end) + tokens_of(100 * sequence, 8 - end))
    told(ledger)
    assert ledger.attach(D, [*tokens_of(0, 16), 0]) == 14
    assert idle(ledger).copies[0].source == ledger.blocks(B)[1]


def test_nothing_is_copied_from_behind_another_prefix():
    ledger = with_chain([*tokens_of(0, 8), *tokens_of(50, 8)], block_size=8)
    assert ledger.attach(B, [*tokens_of(20, 8), *tokens_of(50, 8)]) == 0
    assert ledger.attach(C, tokens_of(50, 8)) == 0


def test_nothing_is_copied_across_salts():
    """S51, in the books."""
    ledger = open_ledger(block_size=8)
    compute(ledger, A, tokens_of(0, 8), salt=b"x" * 32)
    assert ledger.attach(B, tokens_of(0, 7), Scope(salt=b"y" * 32)) == 0
    assert ledger.attach(C, tokens_of(0, 7), Scope(salt=b"x" * 32)) == 6


def test_nothing_is_copied_across_a_reset():
    """S9."""
    ledger = with_chain(tokens_of(0, 8), held=True, block_size=8)
    ledger.reset(CacheEpoch(1))
    assert ledger.attach(B, tokens_of(0, 7)) == 0
    append(ledger, B, [*tokens_of(0, 7), 70])
    assert ledger.attach(C, tokens_of(0, 9)) == 7
    ledger.check()


def test_without_a_block_for_the_copy_the_whole_blocks_are_reused_alone():
    ledger = with_chain(tokens_of(0, 16), held=True, block_size=8, num_blocks=2)
    assert ledger.attach(B, tokens_of(0, 15)) == 8
    assert ledger.blocks(B) == ledger.blocks(A)[:1]
    ledger.check()


def test_the_only_block_left_is_not_copied_onto_itself():
    """The prompt's own prefix and what is to be copied are all that could be evicted: neither is, before it is used."""
    ledger = with_chain(tokens_of(0, 16), block_size=8, num_blocks=2)
    assert ledger.attach(B, tokens_of(0, 15)) == 8
    ledger.reserve(B, 7)
    ledger.commit(B, tokens_of(8, 7))
    ledger.check()


def test_what_is_copied_may_be_evicted_in_the_same_exchange():
    """The copy comes first in the grant, and copies are made before any write."""
    ledger = with_chain(tokens_of(0, 16), block_size=8, num_blocks=3)
    prompt = [*tokens_of(0, 14), *tokens_of(100, 10)]
    grant = ledger.apply(exchange(attaches={B: prompt}, reserves=[(B, 24)]))
    assert (grant.attached, grant.unmet) == (((B, 14),), ())
    (copy,) = grant.copies
    assert ledger.blocks(B)[1:] == (copy.target, copy.source)
    ledger.check()


def test_copies_for_new_sequences_come_before_those_of_reserves():
    ledger = open_ledger(block_size=8, num_blocks=8)
    compute(ledger, A, tokens_of(0, 12))
    ledger.fork(A, [B])
    told(ledger)
    grant = ledger.apply(exchange(attaches={C: tokens_of(0, 7)}, reserves=[(B, 1), (C, 7)]))
    assert [copy.source for copy in grant.copies] == [ledger.blocks(A)[0], ledger.blocks(A)[1]]


def test_who_misses_a_block_that_is_being_computed_waits_even_if_a_part_of_it_could_be_copied():
    ledger = with_chain(tokens_of(0, 8), block_size=8)
    prompt = [*tokens_of(0, 6), *tokens_of(100, 6)]
    assert ledger.attach(A, prompt) == 6
    told(ledger)
    assert ledger.attach(B, prompt) == WaitFor(A)
    assert B not in ledger
    assert idle(ledger).copies == ()


def test_a_copy_makes_what_it_was_taken_from_the_last_to_be_evicted():
    ledger = open_ledger(block_size=8, num_blocks=4)
    for sequence, start in ((A, 0), (B, 100)):
        compute(ledger, sequence, tokens_of(start, 8))
        ledger.free(sequence)
    used = ledger.attach(C, [*tokens_of(0, 6), 9])
    assert used == 6
    ledger.free(C)
    assert ledger.attach(D, [*tokens_of(200, 23)]) == 0
    ledger.reserve(D, 23)
    assert ledger.attach(A, tokens_of(100, 9)) == 0
    assert ledger.attach(B, tokens_of(0, 9)) == 8


def test_the_figures_count_copies_and_their_tokens():
    ledger = with_chain(tokens_of(0, 16), block_size=8)
    ledger.attach(B, [*tokens_of(0, 13), 99])
    stats = ledger.stats()
    assert (stats.hit_tokens, stats.partial_hits, stats.partial_hit_tokens, stats.copied_blocks) == (13, 1, 5, 0)
