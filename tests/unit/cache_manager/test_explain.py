"""Why a prompt finds what it finds."""

import pytest

from octavo.errors import InvalidRequest, UnknownSequence
from octavo.ids import CacheEpoch, SequenceId
from octavo.records.insight import HitEnd, PromptExplanation, TableBlock
from octavo.records.scope import Media, Scope
from tests.support.books import EPOCH, compute, idle, open_ledger, state_of, tokens_of

A, B = map(SequenceId, (1, 2))


def said(reused, end, position, **names):
    return PromptExplanation(epoch=EPOCH, reused_tokens=reused, end=end, position=position, **names)


def remembering(tokens, **fields):
    """Books that have computed these tokens, in blocks 0, 1, ..., for a sequence that has ended."""
    ledger = open_ledger(**fields)
    compute(ledger, A, tokens)
    ledger.free(A)
    return ledger


def test_the_first_differing_position_and_its_block_are_told():
    """S53: two prompts that differ at token 7."""
    ledger = remembering(tokens_of(0, 32), block_size=16)
    assert ledger.explain([*tokens_of(0, 7), 99, *tokens_of(8, 24)]) == said(7, HitEnd.DIFFERS, 7, block=0)
    assert ledger.explain([*tokens_of(0, 23), 99, 98]) == said(23, HitEnd.DIFFERS, 23, block=1)


@pytest.mark.parametrize("min_copy_tokens", [0, 8])
def test_what_is_in_common_and_not_copied_is_told_apart(min_copy_tokens):
    ledger = remembering(tokens_of(0, 32), block_size=16, min_copy_tokens=min_copy_tokens)
    assert ledger.explain([*tokens_of(0, 23), *tokens_of(90, 9)]) == said(16, HitEnd.DIFFERS, 23, block=1)


def test_a_prompt_that_differs_from_its_first_token_on_is_told_from_what():
    assert remembering(tokens_of(0, 4)).explain([99, 98]) == said(0, HitEnd.DIFFERS, 0, block=0)


@pytest.mark.parametrize("length", [17, 32, 20, 1])
def test_all_but_the_last_token_may_be_there(length):
    ledger = remembering(tokens_of(0, 32), block_size=16, min_copy_tokens=1)
    assert ledger.explain(tokens_of(0, length)) == said(length - 1, HitEnd.LAST_TOKEN, length - 1)


def test_where_nothing_follows_nothing_is_published():
    ledger = remembering(tokens_of(0, 10))
    assert ledger.explain(tokens_of(0, 20)) == said(8, HitEnd.NOT_PUBLISHED, 8)
    assert open_ledger().explain(tokens_of(0, 20)) == said(0, HitEnd.NOT_PUBLISHED, 0)


def test_other_keys_and_other_cache_epochs_find_nothing():
    """S6, S9: what is published under one root is not even hinted at under another one."""
    ledger = remembering(tokens_of(0, 10))
    for scope in (Scope(salt=b"s" * 32), Scope(media=(Media(0, b"m" * 32),))):
        assert ledger.explain(tokens_of(0, 10), scope) == said(0, HitEnd.NOT_PUBLISHED, 0)
    ledger.reset(CacheEpoch(1))
    assert ledger.explain(tokens_of(0, 10)) == said(0, HitEnd.NOT_PUBLISHED, 0)


def test_no_copy_is_promised_for_which_there_would_be_no_block():
    """The hits will be held by then, and what is to be copied is the last block that is not."""
    ledger = remembering(tokens_of(0, 16), block_size=8, num_blocks=2)
    assert ledger.explain(tokens_of(0, 15)) == said(8, HitEnd.LAST_TOKEN, 14)
    assert ledger.attach(B, tokens_of(0, 15)) == 8


def test_who_would_be_waited_for_is_told():
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 20))
    assert ledger.explain(tokens_of(0, 20)) == said(0, HitEnd.BEING_COMPUTED, 0, leader=A)


def test_to_explain_changes_nothing():
    """Neither the order of eviction nor a figure."""
    ledger = open_ledger(num_blocks=4)
    for sequence, start in ((A, 0), (B, 100)):
        compute(ledger, sequence, tokens_of(start, 8))
        ledger.free(sequence)
    before, order = state_of(ledger), list(ledger.free_list())
    ledger.explain([*tokens_of(0, 7), 9])
    assert (state_of(ledger), list(ledger.free_list())) == (before, order)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "tokens of the prompt: 0 of them, from 1 to 64"),
        (list(range(65)), "tokens of the prompt: 65 of them, from 1 to 64"),
        ([1000], "tokens of the prompt: token id 1000, vocab_size is 1000"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(tokens, said):
    with pytest.raises(InvalidRequest, match=said):
        open_ledger().explain(tokens)


def test_a_sequence_is_described_by_its_table():
    ledger = open_ledger()
    compute(ledger, A, tokens_of(0, 10))
    ledger.attach(B, tokens_of(0, 9))
    idle(ledger)
    described = ledger.describe(A)
    assert (described.epoch, described.length, described.room) == (EPOCH, 10, 12)
    assert described.blocks == (TableBlock(0, 2, True), TableBlock(1, 2, True), TableBlock(2, 1, False))
    with pytest.raises(UnknownSequence):
        ledger.describe(SequenceId(7))
