"""Prompts of two tenants that begin with what anybody may know: its blocks are everybody's, all others their own."""

from collections.abc import Sequence

import pytest

from cache_manager.core.changes import Published
from cache_manager.core.ledger import Ledger
from cache_manager.core.restoration import Restoration
from octavo.errors import InvalidRequest
from octavo.hashing import NO_SEAM, Seam, block_hashes
from octavo.ids import BlockHash, BlockId, Epoch, SequenceId
from octavo.records.attend import Attach, Exchange, HeldSequence, Inventory
from octavo.records.scope import Scope
from tests.support.books import compute, open_ledger, pool_spec, tokens_of

X, Y = b"x" * 32, b"y" * 32
PUBLIC = 10
"""Tokens: two full blocks and a half."""
PROMPT = tokens_of(0, 20)


def shared(ledger: Ledger, sequence: int, salt: bytes, tokens: Sequence[int] = PROMPT) -> int:
    """Compute a prompt whose beginning is public. Returns the tokens reused."""
    return compute(ledger, sequence, tokens, salt, PUBLIC)


def held_sequence(root: BlockHash, table: tuple[BlockId, ...], seam: Seam) -> HeldSequence:
    return HeldSequence(sequence=SequenceId(1), root=root, tokens=tuple(PROMPT), table=table, room=20, seam=seam)


def test_the_full_blocks_of_a_public_prefix_are_found_by_every_tenant():
    ledger = open_ledger(min_copy_tokens=0)
    assert shared(ledger, 1, X) == 0
    assert shared(ledger, 2, Y) == 8
    ledger.check()


def test_what_follows_it_is_found_by_its_own_tenant_only():
    ledger = open_ledger()
    shared(ledger, 1, X)
    assert shared(ledger, 2, X) == 16
    assert shared(ledger, 3, Y) == 8, "not a token of the block at the seam, which has public ones at its beginning"
    assert shared(ledger, 4, Y) == 16
    ledger.check()


def test_without_a_public_prefix_nothing_of_it_is_found():
    ledger = open_ledger(num_blocks=32)
    shared(ledger, 1, X)
    assert compute(ledger, 2, PROMPT, X) == 0
    assert compute(ledger, 3, PROMPT, Y) == 0
    assert compute(ledger, 4, PROMPT) == 8, "who has no salt shares what is everybody's"


def test_a_public_prefix_of_less_than_a_block_changes_nothing():
    ledger = open_ledger()
    compute(ledger, 1, PROMPT, X, public_tokens=3)
    assert compute(ledger, 2, PROMPT, X) == 16
    assert Scope(salt=X, public_tokens=3).seam(4) is NO_SEAM
    assert Scope(public_tokens=8).seam(4) is NO_SEAM
    assert Scope(salt=X, public_tokens=8).seam(4) == Seam(2, X)


def test_gateways_know_the_blocks_by_the_same_hashes():
    ledger, scope = open_ledger(), Scope(salt=X, public_tokens=PUBLIC)
    shared(ledger, 1, X)
    root = ledger.spec.chain_root(scope).hash()
    (change,) = ledger.take_changes()
    assert change == Published(tuple(block_hashes(root, PROMPT, 4, scope.seam(4))))
    assert root == ledger.spec.chain_root().hash()


def test_a_prompt_may_end_at_the_seam_and_its_output_is_private():
    ledger = open_ledger()
    compute(ledger, 1, tokens_of(0, 8), X, public_tokens=8)
    ledger.reserve(1, 4)
    ledger.commit(1, tokens_of(8, 4))
    ledger.free(1)
    assert compute(ledger, 2, PROMPT, Y, public_tokens=8) == 8
    assert compute(ledger, 3, PROMPT, X, public_tokens=8) == 12
    ledger.check()


def test_lost_books_are_opened_again_with_their_seams():
    spec, scope = pool_spec(), Scope(salt=X, public_tokens=PUBLIC)
    ledger = open_ledger()
    attach = Attach(1, PROMPT, scope)
    first = ledger.apply(Exchange(epoch=ledger.epoch, step=1, attaches=(attach,), reserves=((1, 20),)))
    second = ledger.apply(Exchange(epoch=ledger.epoch, step=2, commits=((1, PROMPT),)))
    [(_, _, table)] = first.tables
    held = held_sequence(first.roots[0], table, seam=scope.seam(4))
    restoration = Restoration(spec)
    restoration.add(Inventory(second.published, (held,)))
    for _ in restoration.steps():
        pass
    opened = restoration.open(Epoch(2))
    opened.check()
    assert sorted(opened.published()) == sorted(ledger.published())
    assert shared(opened, 2, Y) == 8
    assert shared(opened, 3, X) == 16


def test_an_inventory_whose_seam_is_not_that_of_its_blocks_is_refused():
    scope = Scope(salt=X, public_tokens=PUBLIC)
    ledger = open_ledger()
    attach = Attach(1, PROMPT, scope)
    first = ledger.apply(Exchange(epoch=ledger.epoch, step=1, attaches=(attach,), reserves=((1, 20),)))
    second = ledger.apply(Exchange(epoch=ledger.epoch, step=2, commits=((1, PROMPT),)))
    [(_, _, table)] = first.tables
    restoration = Restoration(pool_spec())
    restoration.add(Inventory(second.published, (held_sequence(first.roots[0], table, seam=NO_SEAM),)))
    with pytest.raises(InvalidRequest, match=r"sequence 1 has other tokens in block \d+, from position 8 on"):
        for _ in restoration.steps():
            pass
