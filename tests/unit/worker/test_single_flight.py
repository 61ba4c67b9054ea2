"""Prompts that begin alike and arrive together: one computes, the others follow it, and take over when it leaves."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from octavo.errors import OctavoError
from tests.support.scheduling import GATEWAY, SAMPLED, World, submission
from worker.core.sequence import GatewayKey

SIZE = 4
"""Positions of a block, as books.pool_spec has it."""


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt like no other."""
    return random.Random(seed).choices(range(1000), k=length)


def prefilled_tokens(world: World) -> int:
    """Prompt tokens put through the model."""
    prompts = {len(wanted.prompt) for wanted in world.submissions.values()}
    (length,) = prompts
    return sum(len(chunk.tokens) for step in world.runner.steps for chunk in step.chunks if chunk.start < length)


def burst(world: World, shared: int, own: int, count: int, **fields: object) -> None:
    """Requests 0 to `count`, each with `own` tokens behind the same `shared` ones."""
    for request in range(count):
        world.submit(submission(request, [*prompt_of(0, shared), *prompt_of(1 + request, own)], **fields))


@pytest.mark.parametrize("budget", [16, 64, 104, 512])
def test_eight_requests_that_arrive_together_compute_their_common_beginning_once(budget):
    """S37: eight of 104 tokens that share 96: 160 tokens are computed and 14 blocks are held, whatever the chunks."""
    world = World(block_size=16, num_blocks=64, max_step_tokens=budget, max_running=16)
    burst(world, shared=96, own=8, count=8)
    held = 0
    while world.scheduler.has_news:
        world.step()
        held = max(held, world.ledger.num_held)
    assert prefilled_tokens(world) == 160
    assert held <= 14
    if budget >= 64:  # all decode together in some step
        assert held == 14
    assert [world.gateways.of(request).cached_tokens for request in range(8)] == [0] + 7 * [96]
    for request in range(8):
        world.assert_served(request)
    world.assert_at_rest()


def test_sixty_four_requests_with_one_cold_prefix_take_a_few_exchanges_more():
    """S37: 512 tokens are computed once, and those who wait are not asked for again and again."""
    world = World(block_size=16, num_blocks=128, max_step_tokens=512, max_running=64, max_model_tokens=8192)
    burst(world, shared=512, own=8, count=64)
    world.run()
    assert prefilled_tokens(world) == 512 + 64 * 8
    assert len(world.exchanges) <= len(world.runner.steps) + 2
    for request in range(64):
        world.assert_served(request)


def test_who_waits_is_asked_for_when_the_leader_has_what_it_needs_and_not_before():
    """A leader of eight chunks: a follower costs two attaches, not eight."""
    world = World(num_blocks=64, max_step_tokens=2 * SIZE, max_running=8)
    burst(world, shared=14 * SIZE, own=3, count=2)
    world.run()
    attaches = Counter(attach.sequence for exchange, _ in world.exchanges for attach in exchange.attaches)
    assert sum(len(grant.waiting) for _, grant in world.exchanges) <= 1
    assert max(attaches.values()) <= 2
    assert prefilled_tokens(world) == 14 * SIZE + 2 * 3


def test_a_follower_whose_own_way_begins_early_starts_while_the_leader_is_at_it():
    world = World(num_blocks=64, max_step_tokens=5 * SIZE, max_running=8)
    common = prompt_of(0, 8 * SIZE)
    world.submit(submission(0, common))
    world.submit(submission(1, [*common[: 4 * SIZE], *prompt_of(1, 2)]))
    world.step()
    plan = world.step()
    assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(5 * SIZE, 8 * SIZE), (4 * SIZE, 4 * SIZE + 2)]
    world.run()
    for request in range(2):
        world.assert_served(request)


def test_a_stranger_does_not_wait_behind_those_who_follow():
    world = World(num_blocks=64, max_step_tokens=4 * SIZE, max_running=8)
    burst(world, shared=15 * SIZE, own=1, count=4)
    world.submit(submission(4, prompt_of(99, 61), 1))
    plans = [world.step() for _ in range(4)]
    assert [chunk.start for chunk in plans[-1].chunks] == [12 * SIZE, 0]
    world.run()
    for request in range(5):
        world.assert_served(request)


def leading_world() -> World:
    """Request 0 has computed two of six blocks; request 1 follows it, and 2 begins alike."""
    world = World(num_blocks=64, max_step_tokens=2 * SIZE + 1, max_running=8)
    burst(world, shared=6 * SIZE, own=2, count=3, samples=2, sampling=SAMPLED)
    world.step()
    world.step()
    assert world.scheduler.load().running_sequences == 1
    assert world.scheduler.load().waiting_sequences == 2
    return world


def test_nobody_waits_for_a_sequence_from_before_a_reset():
    """S9: what it computes will not be found, so one of those who come after computes it again, once."""
    world = leading_world()
    world.reset()
    world.run()
    assert prefilled_tokens(world) == (24 + 2) + 24 + 2 * 2
    for request in range(3):
        world.assert_served(request)
    assert [world.gateways.of(request).cached_tokens for request in range(3)] == [0, 0, 6 * SIZE]
    world.assert_at_rest()


def test_who_comes_after_a_reset_counts_on_nothing_that_was_computed_before_it():
    world = World(num_blocks=10, max_step_tokens=64, max_running=8)
    world.submit(submission(0, prompt_of(0, 4 * SIZE + 1), 12))
    world.step()
    world.reset()
    while world.exchanges[-1][1].cache_epoch == 0:  # until the worker has heard of it
        world.step()
    world.submit(submission(1, prompt_of(0, 4 * SIZE + 1)))
    world.run()
    assert not any(grant.unmet for _, grant in world.exchanges), "it came in when there was room for all of it"
    for request in range(2):
        world.assert_served(request)


def cancel_now(world: World) -> None:
    world.scheduler.cancel(GATEWAY, 0)


def cancel_in_flight(world: World) -> None:
    world.in_flight = lambda: cancel_now(world)
    world.step()
    world.in_flight = lambda: None


def cancel_in_step(world: World) -> None:
    world.in_step = lambda: cancel_now(world)
    world.step()
    world.in_step = lambda: None


def fail_the_step(world: World) -> None:
    world.plan()
    world.scheduler.step_failed(OctavoError("the model broke"))


@pytest.mark.parametrize("leave", [cancel_now, cancel_in_flight, cancel_in_step, fail_the_step])
def test_the_next_takes_over_from_a_leader_that_goes_for_good(leave: Callable[[World], None]):
    """S14. What the leader had computed stays; the rest is computed once more, by one of the two."""
    world = leading_world()
    leave(world)
    world.run()
    for request in (1, 2):
        world.assert_served(request)
    assert prefilled_tokens(world) <= 6 * SIZE + 3 * SIZE + 3 * 2
    world.assert_at_rest()


def test_who_waited_for_the_requests_of_a_lost_gateway_takes_over():
    world = World(num_blocks=64, max_step_tokens=2 * SIZE, max_running=8)
    prompt = prompt_of(0, 6 * SIZE + 1)
    world.scheduler.submit(submission(7, prompt), GatewayKey(2))
    world.submit(submission(1, prompt))
    world.step()
    world.step()
    world.scheduler.cancel_gateway(GatewayKey(2))
    world.run()
    world.assert_served(1)
    world.assert_at_rest()


def test_a_lost_manager_forgets_who_waits_and_all_is_computed_once_again():
    world = leading_world()
    world.lose_the_manager()
    computed = world.runner.computed_tokens
    world.run()
    for request in range(3):
        world.assert_served(request)
    assert prefilled_tokens(world) == computed + 6 * SIZE + 3 * 2
    world.assert_at_rest()


def test_a_preempted_leader_leads_again_in_its_turn():
    """S18: an older request needs the block; the leader is sent back, and those who follow it wait for it still."""
    world = World(num_blocks=10, max_step_tokens=2 * SIZE, max_running=8)
    world.submit(submission(9, prompt_of(9, SIZE), 5 * SIZE))
    world.step()
    shared = prompt_of(0, 6 * SIZE)
    for request in range(3):
        world.submit(submission(request, [*shared, request], 2))
    world.run()
    for request in (9, 0, 1, 2):
        world.assert_served(request)
    world.assert_at_rest()


def test_what_follows_another_is_queued_for_what_it_will_compute_itself():
    """Or gateways would flee from work that nobody has to do."""
    world = World(num_blocks=64, max_step_tokens=2 * SIZE, max_running=8)
    burst(world, shared=6 * SIZE, own=2, count=3)
    world.step()
    world.step()
    assert world.scheduler.load().queued_prefill_tokens == (6 * SIZE + 2 - 4 * SIZE) + 2 * 2
