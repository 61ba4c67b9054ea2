"""One sequence computes a block, and the others wait for it; whoever leaves hands over. S37."""

import pytest

from cache_manager.core.single_flight import WaitFor
from octavo.ids import SequenceId
from octavo.records.scope import Scope
from tests.support.books import (
    append,
    exchange,
    open_ledger,
    tokens_of,
)

A, B, C, D = (SequenceId(number) for number in range(1, 5))
SIZE = 4


def test_eight_prompts_that_arrive_together_cost_what_they_cost_one_after_another():
    """S37: 104 tokens each, of which 96 are shared: 160 are computed, 14 blocks are held."""
    ledger = open_ledger(block_size=16, num_blocks=64)
    prompts = {number: [*tokens_of(0, 96), *tokens_of(100 * number, 8)] for number in range(1, 9)}
    wanted = [(number, 104) for number in prompts]
    first = ledger.apply(exchange(attaches=prompts, reserves=wanted))
    second = ledger.apply(
        exchange(
            step=2,
            commits={1: prompts[1]},
            attaches={number: prompts[number] for number in range(2, 9)},
            reserves=wanted[1:],
        )
    )
    assert (first.attached, first.waiting) == (((1, 0),), tuple((number, 1) for number in range(2, 9)))
    assert (second.attached, second.waiting) == (tuple((number, 96) for number in range(2, 9)), ())
    assert ledger.num_held == 14
    assert 104 + 7 * (104 - 96) == 160
    ledger.check()


def test_who_waits_is_not_in_the_books_and_its_reserve_is_passed_over():
    ledger = open_ledger()
    grant = ledger.apply(exchange(attaches={A: tokens_of(0, 9), B: tokens_of(0, 9)}, reserves=[(A, 9), (B, 9)]))
    assert B not in ledger
    assert (grant.unmet, ledger.num_held) == ((), 3)
    ledger.attach(B, tokens_of(500, 3))  # its id was not used up
    ledger.check()


def test_a_chunk_is_enough_for_a_prompt_that_goes_its_own_way_behind_it():
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 17))
    short, long = [*tokens_of(0, SIZE), *tokens_of(50, 5)], [*tokens_of(0, 3 * SIZE), 50]
    assert ledger.attach(B, short) == ledger.attach(C, long) == WaitFor(A)
    append(ledger, A, tokens_of(0, SIZE))
    assert ledger.attach(B, short) == SIZE
    assert ledger.attach(C, long) == WaitFor(A)


def test_a_block_that_is_half_written_lets_nobody_in():
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 9))
    append(ledger, A, tokens_of(0, SIZE - 1))
    assert ledger.attach(B, tokens_of(0, 9)) == WaitFor(A)
    append(ledger, A, [SIZE - 1])
    assert ledger.attach(B, tokens_of(0, SIZE + 1)) == SIZE


def test_what_no_hit_could_cover_is_not_waited_for():
    """S5: the block of a prompt's last token is computed for its logits, whoever else computes it."""
    ledger = open_ledger()
    for sequence in (A, B):
        assert ledger.attach(sequence, tokens_of(0, SIZE)) == 0
    assert ledger.attach(C, tokens_of(0, SIZE + 1)) == WaitFor(A)


def test_tenants_do_not_wait_for_each_other():
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 9), Scope(salt=b"a" * 32))
    assert ledger.attach(B, tokens_of(0, 9), Scope(salt=b"b" * 32)) == 0
    assert ledger.attach(C, tokens_of(0, 9)) == 0


def test_a_request_with_samples_is_computed_once_and_its_forks_lead_nobody():
    ledger = open_ledger()
    prompt = tokens_of(0, 9)
    ledger.attach(A, prompt)
    append(ledger, A, prompt)
    ledger.fork(A, [B, C])
    ledger.free(A)
    assert ledger.attach(D, prompt) == 2 * SIZE
    ledger.check()


@pytest.mark.parametrize("committed", [0, 3, SIZE, SIZE + 1])
def test_the_next_takes_over_from_a_leader_that_is_freed(committed):
    """Cancelled, preempted or ended: to the books it is the same."""
    ledger = open_ledger()
    prompt = tokens_of(0, 13)
    ledger.attach(A, prompt)
    append(ledger, A, prompt[:committed])
    assert ledger.attach(B, prompt) == WaitFor(A)
    grant = ledger.apply(exchange(finished=[A], attaches={B: prompt, C: prompt}))
    assert grant.attached == ((B, committed // SIZE * SIZE),)
    assert grant.waiting == ((C, B),)
    ledger.check()


def test_the_next_takes_over_from_a_leader_that_goes_back():
    ledger = open_ledger()
    prompt = tokens_of(0, 13)
    ledger.attach(A, prompt)
    append(ledger, A, prompt[: SIZE + 2])
    ledger.truncate(A, SIZE)
    assert ledger.attach(B, prompt) == SIZE
    assert ledger.attach(C, prompt) == WaitFor(B)


def test_a_preempted_leader_finds_what_it_had_computed_and_leads_again():
    ledger = open_ledger()
    prompt = tokens_of(0, 13)
    ledger.attach(A, prompt)
    append(ledger, A, prompt[: 2 * SIZE])
    grant = ledger.apply(exchange(finished=[A], attaches={C: prompt, B: prompt}))
    assert (grant.attached, grant.waiting) == (((C, 2 * SIZE),), ((B, C),))


def test_nobody_waits_for_a_sequence_that_writes_something_else_than_its_prompt():
    """A worker's bug costs sharing, and never a request that waits for ever."""
    ledger = open_ledger()
    ledger.attach(A, tokens_of(0, 13))
    append(ledger, A, tokens_of(500, SIZE))
    assert ledger.attach(B, tokens_of(0, 13)) == 0
