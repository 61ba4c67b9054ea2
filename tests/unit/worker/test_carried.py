"""A request that began at another worker goes on here as if it had never moved."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.records.sampling import SamplingParams
from octavo.records.serve import FinishReason
from tests.support.scheduling import SAMPLED, World, submission

PROMPT = [3, 1, 4, 1, 5, 9]
GREEDY = SamplingParams()


@given(st.integers(0, 9), st.integers(0, 5), st.sampled_from([GREEDY, SAMPLED]))
def test_wherever_a_sample_is_cut_it_goes_on_with_the_same_tokens(cut: int, sample: int, sampling: SamplingParams):
    whole = submission(1, PROMPT, 10, samples=sample + 1, sampling=sampling)
    world = World()
    world.submit(whole)
    text = world.solo(1, sample)

    carried = submission(2, [*PROMPT, *text[:cut]], 10, first_sample=sample, carried_tokens=cut, sampling=sampling)
    world.submit(carried)
    world.run()

    heard = world.gateways.of(2)
    assert heard.tokens == {sample: text[cut:]}
    assert heard.reasons == {sample: FinishReason.LENGTH}
    world.assert_at_rest()


def test_samples_that_had_the_same_text_so_far_are_forked_under_their_own_numbers():
    world = World()
    whole = submission(1, PROMPT, 6, samples=5, sampling=SAMPLED)
    world.submit(whole)
    world.submit(replace(whole, request=2, samples=2, first_sample=3))
    world.run()

    here, there = world.gateways.of(2), world.gateways.of(1)
    assert here.tokens == {sample: there.tokens[sample] for sample in (3, 4)}
    world.assert_at_rest()


def test_a_stop_token_after_what_was_carried_is_found():
    world = World()
    world.submit(submission(1, PROMPT, 10))
    text = world.solo(1)
    stop = text[7]
    cut = 4
    assert stop not in text[:7]

    world.submit(submission(2, [*PROMPT, *text[:cut]], 10, carried_tokens=cut, stop_tokens=frozenset({stop})))
    world.run()

    assert world.gateways.of(2).tokens == {0: text[cut:7]}
    assert world.gateways.of(2).reasons == {0: FinishReason.STOP}


@pytest.mark.parametrize(
    ("prompt", "carried", "max_tokens", "message"),
    [
        ([1, 2, 3], 3, 9, "carried_tokens: 3, at most 2 of 3 tokens with max_tokens 9"),
        ([1, 2, 3], 2, 2, "carried_tokens: 2, at most 1 of 3 tokens with max_tokens 2"),
    ],
)
def test_what_has_no_prompt_or_nothing_left_to_draw_is_refused(
    prompt: list[int], carried: int, max_tokens: int, message: str
):
    world = World()
    with pytest.raises(InvalidRequest, match=message):
        world.submit(submission(1, prompt, max_tokens, carried_tokens=carried))


def test_a_sample_with_a_number_that_no_request_has_is_refused():
    world = World()
    with pytest.raises(InvalidRequest, match="first_sample: 65536, wanted from 0 to 65535"):
        world.submit(submission(1, PROMPT, 4, first_sample=65536))


def test_what_was_carried_takes_no_more_room_than_it_would_have_taken_before():
    """The longest sequence that fits when it begins fits when it is carried, and one token more does not."""
    world = World(num_blocks=4)  # 16 positions
    world.submit(submission(1, [*range(10)], 12, carried_tokens=6))
    with pytest.raises(InvalidRequest, match=r"prompt \+ max_tokens: 4 \+ 13 = 17 tokens"):
        world.submit(submission(2, [*range(10)], 13, carried_tokens=6))
