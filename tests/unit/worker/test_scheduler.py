"""What the scheduler promises, one scenario each; the order of things within a step is in the transcripts."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from octavo.errors import Draining, InvalidRequest, OctavoError, QueueFull
from octavo.ids import TenantTag
from octavo.records.serve import FinishReason
from tests.support.scheduling import GATEWAY, SAMPLED, World, submission
from worker.core.sequence import GatewayKey

SIZE = 4
"""Positions of a block, as books.pool_spec has it."""


def prompt_of(seed: int, length: int, vocabulary: int = 1000) -> list[int]:
    """A prompt like no other."""
    return random.Random(seed).choices(range(vocabulary), k=length)


def preempting_world() -> World:
    """Room for two of three long requests (S18)."""
    world = World(num_blocks=12)
    for request in range(3):
        world.submit(submission(request, prompt_of(request, 2 * SIZE), 4 * SIZE))
    return world


def test_a_preempted_request_resumes_with_the_text_it_would_have_had_alone():
    """S18."""
    world = preempting_world()
    world.run()
    assert world.scheduler.load().preemptions > 0
    for request in range(3):
        world.assert_served(request)
    world.assert_at_rest()


def test_a_resumed_request_counts_neither_its_prompt_twice_nor_its_own_blocks_as_hits():
    """S19."""
    world = preempting_world()
    world.run()
    load = world.scheduler.load()
    assert load.preemptions > 0
    assert (load.prompt_tokens, load.cached_tokens, load.output_tokens) == (3 * 2 * SIZE, 0, 3 * 4 * SIZE)
    assert [world.gateways.of(request).cached_tokens for request in range(3)] == [0, 0, 0]


def test_two_requests_of_sixty_percent_of_the_pool_both_finish():
    """S23: each has loaded its first part before either can go on."""
    world = World(num_blocks=10, max_step_tokens=6 * SIZE)
    for request in range(2):
        world.submit(submission(request, prompt_of(request, 3 * SIZE), 3 * SIZE))
    first = world.step()
    assert len(first.chunks) == 2
    world.run()
    for request in range(2):
        world.assert_served(request)


def test_what_can_never_fit_is_refused_and_those_behind_it_are_served():
    """S22: N blocks are possible, one token more is not, though the model would allow it."""
    world = World(num_blocks=8)
    world.submit(submission(1, prompt_of(1, 7 * SIZE), SIZE))
    with pytest.raises(InvalidRequest, match=r"28 \+ 5 = 33 tokens, a sequence here can have 32"):
        world.submit(submission(2, prompt_of(2, 7 * SIZE), SIZE + 1))
    world.submit(submission(3, prompt_of(3, SIZE)))
    world.run()
    world.assert_served(1)
    world.assert_served(3)


def test_everything_ends_once_arrivals_stop():
    """S24: a random load on a small pool; `run` fails if nothing moves while something waits."""
    world = World(num_blocks=16, max_step_tokens=10, max_running=6)
    dice = random.Random(24)
    for request in range(60):
        prompt = [*prompt_of(request % 3, SIZE * dice.randrange(3)), *prompt_of(request, dice.randint(1, 20))]
        world.submit(submission(request, prompt, dice.randint(1, 20), samples=dice.choice([1, 1, 3]), sampling=SAMPLED))
        if dice.random() < 0.5:
            world.step()
    world.run()
    for request in range(60):
        world.assert_served(request)
    world.assert_at_rest()


def test_all_samples_of_a_cancelled_request_are_gone_with_the_next_exchange():
    """S14: eight samples, cancelled after three tokens."""
    world = World(num_blocks=64, max_running=8)
    world.submit(submission(1, prompt_of(1, 10), 20, samples=8, sampling=SAMPLED))
    for _ in range(3):
        world.step()
    world.scheduler.cancel(GATEWAY, 1)
    world.step()
    world.assert_at_rest()
    assert [len(tokens) for tokens in world.gateways.of(1).tokens.values()] == [3] * 8


def test_one_cancelled_sample_of_eight_is_gone_and_the_others_go_on():
    """S14: the first one too, which the others were forked from."""
    for cancelled in (0, 5):
        world = World(num_blocks=64, max_running=8)
        world.submit(submission(1, prompt_of(1, 10), 20, samples=8, sampling=SAMPLED))
        for _ in range(3):
            world.step()
        world.scheduler.cancel(GATEWAY, 1, cancelled)
        world.run()
        world.assert_at_rest()
        heard = world.gateways.of(1)
        assert {sample: len(tokens) for sample, tokens in heard.tokens.items()} == {
            sample: 3 if sample == cancelled else len(world.solo(1, sample)) for sample in range(8)
        }
        assert all(heard.tokens[sample] == world.solo(1, sample) for sample in range(8) if sample != cancelled)


def test_a_request_cancelled_while_its_fork_finds_too_few_blocks_leaves_nothing():
    """S14: eight samples, and blocks for five of them."""
    world = World(num_blocks=8, max_running=8)
    world.submit(submission(1, prompt_of(1, 10), 4, samples=8, sampling=SAMPLED))
    world.step()
    world.in_flight = lambda: world.scheduler.cancel(GATEWAY, 1)
    world.step()
    world.run()
    world.assert_at_rest()


def test_an_unmet_fork_happens_for_no_child_and_costs_no_text():
    """S28: five children, and blocks for three."""
    world = World(num_blocks=6, max_running=8)
    world.submit(submission(1, prompt_of(1, 10), 4, samples=6, sampling=SAMPLED))
    world.step()
    held = world.ledger.audit().held_blocks
    world.step()
    _, grant = world.exchanges[-1]
    assert len(grant.unmet) == 5
    assert world.ledger.audit().held_blocks == held
    world.run()
    world.assert_served(1)
    world.assert_at_rest()


def test_a_stop_token_is_neither_told_nor_ever_written():
    """S2: nothing behind a stop, nor the stop itself, is committed."""
    world = World(vocab_size=4)
    world.submit(submission(1, [0, 1, 2], 40, stop_tokens=frozenset({3})))
    world.run()
    world.assert_served(1)
    assert world.gateways.of(1).reasons == {0: FinishReason.STOP}
    committed = [token for exchange, _ in world.exchanges for commit in exchange.commits for token in commit.tokens]
    assert committed[3:] == world.gateways.of(1).tokens[0]


def test_the_last_token_is_told_and_not_written():
    world = World()
    world.submit(submission(1, prompt_of(1, 5), 3))
    world.run()
    assert world.runner.computed_tokens == 5 + 3 - 1


def test_a_prompt_of_whole_blocks_computes_its_last_block_again_in_a_pool_it_fills():
    """S5: k blocks twice, in a pool that holds just them and the answer."""
    world = World(num_blocks=4)
    for request in range(2):
        world.submit(submission(request, prompt_of(0, 3 * SIZE), SIZE))
        world.run()
        world.assert_served(request)
    assert [world.gateways.of(request).cached_tokens for request in range(2)] == [0, 2 * SIZE]


def test_the_prompt_of_four_samples_is_counted_once_cold_and_warm():
    """S26: cached tokens are the full blocks before the prompt's last token, found when it was first attached."""
    world = World(num_blocks=64)
    for request in range(2):
        world.submit(submission(request, prompt_of(0, 10 * SIZE), 3, samples=4, sampling=SAMPLED))
        world.run()
        world.assert_served(request)
    load = world.scheduler.load()
    assert [world.gateways.of(request).cached_tokens for request in range(2)] == [0, 9 * SIZE]
    assert (load.prompt_tokens, load.cached_tokens, load.output_tokens) == (80, 36, 24)


def test_requests_that_share_a_cached_prefix_come_in_together_within_a_few_rounds():
    world = World(num_blocks=128, max_step_tokens=40, max_running=16)
    shared = prompt_of(0, 8 * SIZE)
    world.submit(submission(0, [*shared, 1]))
    world.run()
    for request in range(1, 13):
        world.submit(submission(request, [*shared, request]))
    rounds = len(world.exchanges)
    plan = world.step()
    assert len(plan.chunks) == 12
    assert len(world.exchanges) - rounds <= 3


@given(data=st.data())
def test_whoever_comes_in_can_be_computed_to_the_end_of_its_prompt(data):
    """With one output token each, nobody ever needs a block that admission did not foresee: none is preempted."""
    world = World(num_blocks=data.draw(st.integers(8, 14)), max_step_tokens=data.draw(st.integers(4, 40)))
    for request in range(data.draw(st.integers(2, 8))):
        shared = prompt_of(data.draw(st.integers(0, 1)), 8 * SIZE)[: SIZE * data.draw(st.integers(0, 6))]
        world.submit(submission(request, [*shared, *prompt_of(request, data.draw(st.integers(1, 7)))], 1))
        if data.draw(st.booleans()):
            world.step()
    world.run()
    assert world.scheduler.load().preemptions == 0


def test_what_a_leaver_shares_with_one_that_stays_is_no_room():
    """The blocks of a prefix that another one still holds come back with that one, not before."""
    world = World(num_blocks=9, max_step_tokens=4)
    prefix = prompt_of(0, 2 * SIZE)
    world.submit(submission(0, [*prefix, 1, 2, 3], 1))
    world.submit(submission(1, prompt_of(1, 6 * SIZE + 1), 1))
    world.submit(submission(2, [0], 1))
    world.submit(submission(3, [*prefix, 4, 5, 6], 1))
    world.run()
    assert world.scheduler.load().preemptions == 0


def test_blocks_that_nobody_holds_are_no_room_for_those_who_will_hit_them():
    """A hit's blocks are then taken from the free ones, like any others."""
    world = World(num_blocks=4, max_step_tokens=2)
    prefix = prompt_of(0, 2 * SIZE)
    for request in (1, 2):
        world.submit(submission(request, [*prefix, 1], 1))
        world.run()
    assert world.gateways.of(2).cached_tokens == len(prefix)
    world.submit(submission(3, [1, 2], 4))
    world.step()
    world.submit(submission(4, [*prefix, *prompt_of(4, SIZE + 1)], 1))
    rounds = len(world.exchanges)
    world.run()
    assert world.scheduler.load().preemptions == 0
    assert sum(len(exchange.attaches) for exchange, _ in world.exchanges[rounds:]) == 1
    world.assert_served(4)


def test_nobody_comes_in_who_would_be_sent_away_at_the_next_block_border():
    world = World(num_blocks=5, max_step_tokens=SIZE)
    world.submit(submission(1, prompt_of(1, 2 * SIZE - 1), 6))
    world.submit(submission(2, prompt_of(2, 3 * SIZE - 1), 1))
    world.run()
    assert world.scheduler.load().preemptions == 0
    world.assert_served(2)


def test_blocks_freed_by_an_exchange_are_taken_by_who_comes_in_with_it():
    world = World(num_blocks=4)
    world.submit(submission(1, prompt_of(1, 2), 2))
    world.submit(submission(2, prompt_of(2, 2 * SIZE), 1))
    world.step()
    world.submit(submission(3, prompt_of(3, 2 * SIZE), 1))
    assert world.ledger.audit().held_blocks == 3
    assert len(world.step().chunks) == 2


def test_a_decode_step_asks_and_tells_nothing_while_its_blocks_have_room():
    """One exchange for each block of each sequence: to ask for it and to tell what filled the one before."""
    world = World(num_blocks=64)
    world.submit(submission(1, prompt_of(1, SIZE), 4 * SIZE))
    world.run()
    told = [[len(commit.tokens) for commit in exchange.commits] for exchange, _ in world.exchanges]
    assert told == [[], [SIZE], [SIZE], [SIZE], [SIZE], [SIZE - 1]]
    assert len(world.runner.steps) == 4 * SIZE
    world.assert_served(1)


def test_whoever_comes_in_meanwhile_asks_for_itself_only():
    world = World(num_blocks=64)
    world.submit(submission(1, prompt_of(1, SIZE + 1), 2 * SIZE))
    world.step()
    world.submit(submission(2, prompt_of(2, SIZE), 2))
    world.step()
    exchange, _ = world.exchanges[-1]
    assert [attach.tokens for attach in exchange.attaches] == [tuple(prompt_of(2, SIZE))]
    assert [wish.positions for wish in exchange.reserves] == [SIZE]
    world.run()
    world.assert_served(1)
    world.assert_served(2)


@pytest.mark.parametrize("prompt", [SIZE - 1, SIZE, SIZE + 1])
def test_a_forked_sequence_asks_before_it_writes_on(prompt):
    """S10. Boundary lengths kS-1, kS, kS+1: its tail has become its children's too."""
    world = World(num_blocks=64)
    world.submit(submission(1, prompt_of(1, prompt), 2 * SIZE, samples=3, sampling=SAMPLED))
    world.step()
    world.step()
    exchange, _ = world.exchanges[-1]
    (fork,) = exchange.forks
    assert [commit.sequence for commit in exchange.commits] == [fork.parent]
    assert fork.parent in [wish.sequence for wish in exchange.reserves]
    world.run()
    world.assert_served(1)


def test_a_lost_manager_costs_a_recompute_and_no_request():
    world = World(num_blocks=32)
    for request in range(3):
        world.submit(submission(request, prompt_of(request, 9), 6, samples=2, sampling=SAMPLED))
    for _ in range(3):
        world.step()
    world.lose_the_manager()
    assert world.scheduler.load().running_sequences == 0
    world.run()
    for request in range(3):
        world.assert_served(request)
    world.assert_at_rest()


def test_a_manager_that_is_back_goes_on_with_what_the_worker_holds():
    """S17: in the middle of everything, with an exchange that was not answered; nothing is computed twice."""
    world = World(num_blocks=64)
    for request in range(3):
        world.submit(submission(request, prompt_of(request, 9), 6, samples=2, sampling=SAMPLED))
    for _ in range(6):
        world.hear_no_answer()
        world.recover(alone=2)
        world.step()
    world.run()
    for request in range(3):
        world.assert_served(request)
    world.assert_at_rest()
    assert world.runner.computed_tokens == 3 * (9 + 2 * 5)


def test_a_block_that_a_grant_takes_from_a_sequence_that_has_just_ended_is_not_told_as_its_own():
    """It wrote what another had written: its block is merged away and given to the next while it is cancelled."""
    world = World(block_size=1, num_blocks=9)
    for request in range(2):
        world.submit(submission(request, [1], 3, samples=2 - request))
    world.step()
    world.in_flight = lambda: world.scheduler.cancel(GATEWAY, 1)
    world.step()
    world.in_flight = lambda: None
    world.recover()
    world.run()
    world.assert_served(0)
    world.assert_at_rest()


def test_a_step_that_fails_ends_its_own_requests_and_no_others():
    world = World(max_step_tokens=8)
    world.submit(submission(1, prompt_of(1, 8)))
    world.submit(submission(2, prompt_of(2, 8)))
    plan = world.plan()
    assert len(plan.chunks) == 1
    for report in world.scheduler.step_failed(OctavoError("the model broke")).values():
        world.gateways.hear(report)
    world.run()
    assert str(world.gateways.of(1).error) == "the model broke"
    world.assert_served(2)
    world.assert_at_rest()


def test_requests_of_different_streams_may_have_the_same_number():
    world = World()
    world.submit(submission(1, [1, 2, 3], 2), GatewayKey(1))
    world.submit(submission(1, [4, 5, 6], 3), GatewayKey(2))
    world.scheduler.cancel_gateway(GatewayKey(1))
    world.run()
    world.assert_served(1)


def test_a_request_beyond_the_longest_queue_is_refused():
    world = World(max_waiting=1)
    world.submit(submission(1, [1]))
    with pytest.raises(QueueFull, match="1 sequences, at most 1 may wait"):
        world.submit(submission(2, [2]))
    world.run()
    world.assert_served(1)


def test_a_draining_scheduler_finishes_what_it_has_and_takes_nothing():
    world = World()
    world.submit(submission(1, [1, 2, 3]))
    world.scheduler.drain()
    with pytest.raises(Draining):
        world.submit(submission(2, [1]))
    world.run()
    world.assert_served(1)
    assert world.exchanges
    assert all(exchange.draining for exchange, _ in world.exchanges)


def test_a_scheduler_that_begins_to_drain_says_so_at_once():
    world = World()
    world.submit(submission(1, [1], 8))
    world.step()
    world.step()
    rounds = len(world.exchanges)
    world.scheduler.drain()
    world.step()
    assert [exchange.draining for exchange, _ in world.exchanges[rounds:]] == [True]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (submission(1, []), "prompt: 0 tokens, wanted at least 1"),
        (submission(1, [1, 1000]), "prompt: token id 1000 at position 1, wanted from 0 to 999"),
        (submission(1, [1], 0), "max_tokens: 0, wanted from 1 to 64"),
        (submission(1, [1], samples=0), "samples: 0, wanted from 1 to 8"),
        (submission(1, [1], retain_seconds=604_801), "retain_seconds: 604801, wanted from 0 to 604800"),
        (submission(1, [1], samples=9), "samples: 9, wanted from 1 to 8"),
        (submission(1, [1] * 61), r"prompt \+ max_tokens: 61 \+ 4 = 65 tokens, a sequence here can have 64"),
    ],
)
def test_what_could_not_run_is_refused_with_both_numbers_and_changes_nothing(wanted, reason):
    world = World()
    with pytest.raises(InvalidRequest, match=reason):
        world.submit(wanted)
    assert not world.scheduler.has_news


def test_a_number_in_use_is_refused_and_the_request_that_has_it_goes_on():
    world = World()
    world.submit(submission(1, [1, 2, 3]))
    with pytest.raises(InvalidRequest, match="request: 1 is running on this stream already"):
        world.scheduler.submit(submission(1, [4]), GATEWAY)
    world.run()
    world.assert_served(1)


def test_the_load_counts_prefill_that_is_still_to_do():
    world = World(max_step_tokens=8, num_blocks=64)
    world.submit(submission(1, prompt_of(1, 20)))
    world.submit(submission(2, prompt_of(2, 10)))
    assert world.scheduler.load().queued_prefill_tokens == 30
    world.step()
    load = world.scheduler.load()
    assert (load.running_sequences, load.waiting_sequences, load.queued_prefill_tokens) == (1, 1, 22)


def test_on_whose_account_a_request_runs_is_told_with_it_and_told_again_in_an_inventory():
    world = World()
    tenant = TenantTag(b"acme....")
    world.submit(submission(1, prompt_of(1, 2 * SIZE), tenant=tenant, retain_seconds=60))
    world.step()
    ((exchange, _),) = world.exchanges
    world.scheduler.lost()
    (held,) = (held for part in world.scheduler.inventory() for held in part.sequences)
    for told in (*exchange.attaches, held):
        assert (told.tenant, told.retain_seconds) == (tenant, 60)


def test_without_a_manager_nobody_gives_way_to_a_higher_priority():
    """Whoever gave way would compute nothing, and whoever it is for could not come in."""
    world = World(max_running=1)
    world.submit(submission(1, prompt_of(1, SIZE + 1), priority=0))
    world.step()
    world.scheduler.lost()
    world.submit(submission(2, prompt_of(2, SIZE + 1), priority=1))
    plan = world.scheduler.plan_step()
    assert len(plan.chunks) == 1
    world.finish(plan)
    world.recover()
    world.run()
    for request in (1, 2):
        world.assert_served(request)
    assert world.scheduler.preemptions == 1


def test_an_inventory_tells_what_is_left_of_a_prompt_and_of_a_decode_nothing():
    """A prompt that is being computed leads others; the one token that a decode computes next leads nobody."""
    world = World(max_step_tokens=SIZE + 1)
    world.submit(submission(1, prompt_of(1, SIZE)))
    world.step()
    long = prompt_of(2, 5 * SIZE)
    world.submit(submission(2, long))
    world.step()
    world.scheduler.lost()
    decode, prefill = (held for part in world.scheduler.inventory() for held in part.sequences)
    assert (len(decode.tokens), decode.ahead) == (SIZE + 1, ())
    assert (len(prefill.tokens), prefill.ahead) == (SIZE, tuple(long[SIZE:]))


def test_a_request_whose_prefix_is_evicted_while_it_waits_is_computed_anew_and_told_so():
    """S31, the worker's part: its gateway was promised the prefix, and counts what it is not given."""
    world = World(num_blocks=8, max_running=1)
    prompt = prompt_of(1, 4 * SIZE)
    world.submit(submission(1, prompt))
    world.run()
    world.submit(submission(2, prompt_of(2, 2 * SIZE), 6 * SIZE))
    world.step()
    world.submit(submission(3, [*prompt, 7]))
    world.run()
    world.assert_served(3)
    assert world.gateways.of(3).cached_tokens == 0


def test_who_is_cancelled_in_the_midst_of_a_step_is_freed_after_it():
    world = World(overlap=True)
    for request in range(2):
        world.submit(submission(request, prompt_of(request, 5), 8))
    world.step()
    plan = world.plan()
    assert len(plan.chunks) == 2
    world.scheduler.cancel(GATEWAY, 1)
    world.exchange()
    assert [exchange.finished for exchange, _ in world.exchanges if exchange.finished] == []
    world.finish(plan)
    world.exchange()
    assert world.exchanges[-1][0].finished == (plan.chunks[1].sequence,)
    world.run()
    world.assert_served(0)
    world.assert_at_rest()
