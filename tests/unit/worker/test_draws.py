"""What a step is asked to draw and to judge."""

from octavo.records.sampling import SamplingParams
from tests.support.scheduling import World, submission

PENALISED = SamplingParams(frequency_penalty=0.5)


def test_a_plain_draw_carries_no_history() -> None:
    world = World()
    world.submit(submission(1, [1, 2, 3], stop_tokens=frozenset({9})))
    (chunk,) = world.step().chunks
    (draw,) = chunk.draws
    assert (draw.history, draw.forbidden, draw.shaped) == ((), (), False)


def test_penalties_hear_of_prompt_and_output_and_where_the_output_begins() -> None:
    world = World()
    world.submit(submission(1, [1, 2, 3], sampling=PENALISED))
    world.step()
    (chunk,) = world.step().chunks
    (draw,) = chunk.draws
    assert draw.history[:3] == (1, 2, 3)
    assert (len(draw.history), draw.output_begins, draw.position) == (4, 3, 4)


def test_what_an_earlier_visit_drew_is_output() -> None:
    world = World()
    stops = frozenset({9})
    world.submit(submission(1, [1, 2, 3, 4, 5], carried_tokens=2, sampling=PENALISED, min_tokens=3, stop_tokens=stops))
    (chunk,) = world.step().chunks
    assert (chunk.draws[0].output_begins, chunk.draws[0].forbidden) == (3, (9,))
    (chunk,) = world.step().chunks
    assert chunk.draws[0].forbidden == ()


def test_no_stop_token_may_come_before_the_fewest_tokens_are_there() -> None:
    world = World()
    world.submit(submission(1, [1, 2, 3], max_tokens=5, min_tokens=2, stop_tokens=frozenset({9, 10})))
    forbidden = [set(world.step().chunks[0].draws[0].forbidden) for _ in range(4)]
    assert forbidden == [{9, 10}, {9, 10}, set(), set()]


def test_a_prompt_that_is_judged_is_computed_though_it_is_published() -> None:
    """S49: all positions, chunk by chunk, and told as in a cold run; nothing of it counts as cached."""
    world = World(max_step_tokens=8)
    prompt = [token % 5 for token in range(30)]
    world.submit(submission(1, prompt))
    world.run()
    computed = world.runner.computed_tokens
    for request in (2, 3):
        world.submit(submission(request, prompt, max_tokens=1, prompt_logprobs=0))
        world.run()
        world.assert_served(request)
        assert world.gateways.of(request).cached_tokens == 0
    assert world.runner.computed_tokens == computed + 2 * len(prompt)
    world.submit(submission(4, prompt))
    world.run()
    assert world.gateways.of(4).cached_tokens == 28
    world.assert_at_rest()


def test_a_judged_prompt_that_was_sent_away_reuses_what_was_told() -> None:
    """S49 and S18: what was judged before the preemption is neither judged nor computed again."""
    world = World(block_size=4, num_blocks=10, max_model_tokens=40, max_step_tokens=8)
    world.submit(submission(1, range(8), max_tokens=28))
    world.submit(submission(2, range(20, 40), max_tokens=2, prompt_logprobs=0))
    for _ in range(3):
        world.step()
    told = len(world.gateways.of(2).prompt_logprobs)
    assert 0 < told < 19
    world.lose_the_manager()
    world.run()
    for request in (1, 2):
        world.assert_served(request)
    world.assert_at_rest()
