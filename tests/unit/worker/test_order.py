"""Who is next and who goes: priorities, hits, patience, and how often one may be sent back."""

import random

import pytest

from octavo.ids import SequenceId
from octavo.records.serve import Submission
from tests.support.scheduling import GATEWAY, World, submission
from worker.core import order
from worker.core.sequence import Request, Sequence

SIZE = 4
"""Positions of a block, as books.pool_spec has it."""


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt like no other."""
    return random.Random(seed).choices(range(1000), k=length)


def arrivals(world: World) -> list[int]:
    """Requests in the order in which they came in, the first time."""
    prompts = {wanted.prompt: wanted.request for wanted in world.submissions.values()}
    came: dict[int, None] = {}
    for exchange, grant in world.exchanges:
        waiting = {sequence for sequence, _ in grant.waiting}
        for attach in exchange.attaches:
            number = next(prompts[prompt] for prompt in prompts if tuple(attach.tokens[: len(prompt)]) == prompt)
            if attach.sequence not in waiting:
                came.setdefault(number)
    return list(came)


def one_at_a_time() -> World:
    """A worker that runs one sequence, and runs one now that will be over soon, which nobody displaces."""
    world = World(max_running=1, num_blocks=64, max_step_tokens=64)
    world.submit(submission(0, prompt_of(0, 5), 2, priority=9))
    world.step()
    return world


def test_higher_priority_comes_in_first_and_the_older_of_equals():
    world = one_at_a_time()
    for request, priority in ((1, 0), (2, -5), (3, 7), (4, 0), (5, 7)):
        world.submit(submission(request, prompt_of(request, 5), 1, priority=priority))
    world.run()
    assert arrivals(world) == [0, 3, 5, 1, 4, 2]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_of_high_priority_takes_the_place_of_one_of_low(overlap: bool):
    """S21: it starts within two steps, the newest of the low ones is preempted, once, and all get their texts."""
    world = World(max_running=4, num_blocks=64, overlap=overlap)
    for request in range(4):
        world.submit(submission(request, prompt_of(request, 9), 12))
    for _ in range(6):
        world.step()
    assert world.scheduler.load().running_sequences == 4
    world.submit(submission(9, prompt_of(9, 6), 5, priority=1))
    plans = [world.step() for _ in range(2)]
    assert any(tuple(chunk.tokens) == tuple(prompt_of(9, 6)) for plan in plans for chunk in plan.chunks)
    world.run()
    assert world.scheduler.load().preemptions == 1
    attaches = [attach.tokens[:9] for exchange, _ in world.exchanges for attach in exchange.attaches]
    assert attaches.count(tuple(prompt_of(3, 9))) == 2
    for request in (0, 1, 2, 3, 9):
        world.assert_served(request)
    world.assert_at_rest()


def test_a_request_of_high_priority_finds_room_where_blocks_are_all_taken():
    world = World(max_running=8, num_blocks=12, max_step_tokens=64)
    for request in range(2):
        world.submit(submission(request, prompt_of(request, 4 * SIZE), 2 * SIZE))
    world.step()
    world.submit(submission(9, prompt_of(9, 5 * SIZE), 2, priority=3))
    assert 5 * SIZE in [len(chunk.tokens) for chunk in world.step().chunks]
    world.run()
    assert world.scheduler.load().preemptions == 1
    for request in (0, 1, 9):
        world.assert_served(request)


def test_nobody_is_displaced_by_its_equal_or_for_one_that_would_not_fit_all_the_same():
    world = World(max_running=2, num_blocks=64)
    world.submit(submission(0, prompt_of(0, 5), 8, priority=5))
    world.submit(submission(1, prompt_of(1, 5), 8))
    world.step()
    world.submit(submission(2, prompt_of(2, 5), 2))
    world.submit(submission(3, prompt_of(3, 5), 2, samples=2, priority=1))
    world.run()
    assert world.scheduler.load().preemptions == 0
    assert arrivals(world) == [0, 1, 3, 2]


def test_the_lowest_goes_first_then_who_has_just_come_then_the_newest_and_the_first_in_order_never():
    def running(arrival: int, priority: int = 0) -> Sequence:
        wanted = submission(arrival, [1], priority=priority)
        request = Request(gateway=GATEWAY, submission=wanted, arrival=arrival)
        return Sequence(request=request, sample=0, id=SequenceId(arrival), tokens=[1])

    low, eldest, came, young, newest = running(0, priority=-1), *(running(arrival) for arrival in range(1, 5))
    in_order = sorted((low, eldest, came, young, newest), key=order.service)
    assert order.going(in_order, [came]) == [low, came, newest, young]


def test_a_stream_of_high_priorities_holds_up_a_low_one_for_a_bounded_number_of_turns():
    world = one_at_a_time()
    world.submit(submission(1, prompt_of(1, 5), 1))
    for request in range(2, 40):
        world.submit(submission(request, prompt_of(request, 5), 1, priority=9))
    world.run()
    assert arrivals(world).index(1) == 1 + order.MOST_BEFORE_LOWER


def warm(world: World, shared: list[int]) -> None:
    """Let the prefix be found."""
    world.submit(submission(100, [*shared, 1], 1))
    world.run()


def hitting(request: int, shared: list[int]) -> Submission:
    return submission(request, [*shared, *prompt_of(request, 3)], 1)


def test_the_longest_hit_comes_in_first():
    shared = prompt_of(50, 6 * SIZE)
    world = World(max_running=1, num_blocks=64, max_step_tokens=64)
    warm(world, shared)
    world.submit(submission(0, prompt_of(0, 5), 2))
    world.step()
    world.submit(submission(1, prompt_of(1, 30), 1))
    world.submit(hitting(2, shared[: 2 * SIZE]))
    world.submit(hitting(3, shared))
    world.submit(hitting(4, shared[: 4 * SIZE]))
    world.run()
    assert arrivals(world)[1:] == [0, 3, 4, 2, 1]
    assert [world.gateways.of(request).cached_tokens for request in (1, 2, 3, 4)] == [0, 2 * SIZE, 6 * SIZE, 4 * SIZE]


def test_a_cold_request_is_passed_by_a_bounded_number_of_hits():
    shared = prompt_of(50, 6 * SIZE)
    world = World(max_running=1, num_blocks=64, max_step_tokens=64)
    warm(world, shared)
    world.submit(submission(0, prompt_of(0, 5), 2))
    world.step()
    world.submit(submission(1, prompt_of(1, 30), 1))
    for request in range(2, 30):
        world.submit(hitting(request, shared))
    world.run()
    assert arrivals(world)[2:].index(1) == order.MOST_PASSED


def test_what_is_forgotten_by_a_reset_is_no_hit():
    shared = prompt_of(50, 6 * SIZE)
    world = World(max_running=1, num_blocks=64, max_step_tokens=64)
    warm(world, shared)
    world.reset()
    world.submit(submission(0, prompt_of(0, 5), 2))
    world.step()
    world.submit(submission(1, prompt_of(1, 30), 1))
    world.submit(hitting(2, shared))
    world.run()
    assert arrivals(world)[1:] == [0, 1, 2]


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_is_sent_back_again_and_again_without_getting_on(overlap: bool):
    """S18, S23: high priorities come again and again, and each takes the place of the low one."""
    world = World(max_running=1, num_blocks=32, max_step_tokens=2, overlap=overlap)
    world.submit(submission(0, prompt_of(0, 30), 4))
    ends = world.gateways.of(0).reasons
    number = 1
    while not ends and number < 200:
        world.step()
        if number % 2:
            world.submit(submission(number, prompt_of(number, 3), 1, priority=1))
        number += 1
    assert ends, "the low one never got on"
    world.run()
    for request in world.submissions:
        world.assert_served(request)
    world.assert_at_rest()
