"""Which sequences may share blocks: a table over every field of the key, one at a time, through real books."""

from dataclasses import fields, replace

import pytest

from cache_manager.core.ledger import Ledger
from octavo.hashing import ChainRoot
from octavo.ids import CacheEpoch, SequenceId
from octavo.records.scope import Media, Scope
from tests.support.books import EPOCH, append, compute, open_ledger, pool_spec, tokens_of

A, B, C = map(SequenceId, range(1, 4))
PROMPT = tokens_of(0, 16)
"""Four blocks, three of which a hit may cover."""

OTHER_POOLS = {
    "model_digest": b"M" * 32,
    "tokenizer_digest": b"T" * 32,
    "dtype": "bfloat16",
    "kv_dtype": "float8_e4m3fn",
    "block_size": 8,
    "adapter_digest": b"A" * 32,
}
IMAGE = Media(5, b"i" * 32)
SCOPE = Scope(salt=b"s" * 32, media=(IMAGE,))
OTHER_SCOPES = {
    "salt": b"S" * 32,
    "media": (replace(IMAGE, digest=b"I" * 32),),
}


def test_the_tables_name_every_field_of_the_key():
    assert {*OTHER_POOLS, *OTHER_SCOPES, "cache_epoch"} == {field.name for field in fields(ChainRoot)}


@pytest.mark.parametrize("field", OTHER_POOLS)
def test_workers_whose_pools_differ_in_a_field_of_the_key_publish_no_block_under_the_same_name(field):
    """S6, S8: dtype, model revision, adapter, and what else makes a worker's keys and values."""
    one, other = open_ledger(), open_ledger(**{field: OTHER_POOLS[field]})
    for ledger in (one, other):
        compute(ledger, A, PROMPT)
    assert len(one.published()) == 4
    assert not {*one.published()} & {*other.published()}


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "another name"), ("num_blocks", 99), ("max_model_tokens", 99), ("vocab_size", 99)],
)
def test_workers_whose_pools_differ_elsewhere_publish_under_the_same_names(field, value):
    """A gateway hashes a prompt once for all of them."""
    one, other = open_ledger(), open_ledger(**{field: value})
    for ledger in (one, other):
        compute(ledger, A, PROMPT)
    assert one.published() == other.published()


def scopes_but_for(field):
    yield replace(SCOPE, **{field: OTHER_SCOPES[field]})
    yield replace(SCOPE, **{field: type(OTHER_SCOPES[field])()})  # absent


@pytest.mark.parametrize(
    "other",
    [
        *(scope for field in OTHER_SCOPES for scope in scopes_but_for(field)),
        replace(SCOPE, media=(replace(IMAGE, position=6),)),
        replace(SCOPE, media=(IMAGE, Media(6, b"i" * 32))),
        Scope(),
    ],
    ids=repr,
)
def test_sequences_whose_scopes_differ_in_one_field_share_no_block(other):
    """S6, S51: image, its place, tenant."""
    ledger = open_ledger()
    compute_in(ledger, A, SCOPE)
    assert ledger.attach(B, PROMPT, other) == 0
    append(ledger, B, PROMPT)
    assert not {*ledger.blocks(A)} & {*ledger.blocks(B)}
    assert ledger.attach(C, PROMPT, SCOPE) == 12
    assert ledger.blocks(C) == ledger.blocks(A)[:3]
    ledger.check()


def test_what_was_published_before_a_reset_is_not_found_after_it():
    """S6, S9."""
    ledger = open_ledger()
    compute(ledger, A, PROMPT)
    old = {*ledger.published()}
    ledger.reset(CacheEpoch(1))
    assert compute(ledger, B, PROMPT) == 0
    assert not {*ledger.published()} & old
    assert ledger.attach(C, PROMPT) == 12


def test_books_that_open_in_a_later_cache_epoch_publish_under_its_names():
    """A worker that comes back goes on with the number that it was told."""
    reset, opened = open_ledger(), Ledger(pool_spec(), EPOCH, cache_epoch=CacheEpoch(7))
    reset.reset(CacheEpoch(7))
    for ledger in (reset, opened):
        compute(ledger, A, PROMPT)
    assert reset.published() == opened.published()


def compute_in(ledger, sequence, scope):
    reused = ledger.attach(sequence, PROMPT, scope)
    append(ledger, sequence, PROMPT[reused:])
    return reused
