"""Guesses: where they come from, how far they go, and that no text, exchange or block shows them."""

import collections.abc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.ids import SequenceId
from octavo.records.sampling import SamplingParams
from octavo.records.serve import FinishReason
from tests.support.scheduling import SAMPLED, World, submission
from worker.core.drafting import FIRST_REACH, MOST_REACH, STEP_ROWS, Drafter, Lookup, Lookups, Wish
from worker.core.sequence import Sequence

FEW: dict[str, Any] = {"vocab_size": 3}
"""Of three tokens, each pair has stood somewhere: there is always a guess, and one in three is right."""


def naive(tokens: list[int], most: int) -> tuple[int, ...]:
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return tuple(tokens[end + at % (len(tokens) - end)] for at in range(most))
    return ()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(1, 6))
def test_a_guess_is_what_followed_the_newest_tokens_where_they_stood_last(parts: list[list[int]], most: int) -> None:
    lookup, tokens = Lookup(), list[int]()
    for part in parts:
        tokens += part
        assert lookup.after(tokens, most) == naive(tokens, most)


def world(**fields: Any) -> World:
    return World(drafter=Drafter(Lookups()), **(FEW | fields))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, replace(SAMPLED, presence_penalty=0.5)])
def test_a_text_is_the_one_without_guesses(sampling: SamplingParams, overlap: bool) -> None:
    served = world(overlap=overlap, block_size=16, num_blocks=40)
    for number in range(4):
        served.submit(submission(number, [0, 1, 2, number % 3], 60, sampling=sampling, samples=1 + number % 2))
    served.run()

    for number in range(4):
        served.assert_served(number)
    served.assert_at_rest()
    drafts = served.scheduler.drafts
    assert drafts.drafted > drafts.accepted > 0
    assert len(served.runner.steps) < 60


def test_fewer_steps_are_made_and_every_one_within_its_budget() -> None:
    """The world asserts the budget of each step."""
    served = world(max_step_tokens=3, block_size=16, num_blocks=40)
    for number in range(2):
        served.submit(submission(number, [0, 1], 40))
    served.run()

    assert served.scheduler.drafts.accepted > 0
    served.assert_served(0)
    served.assert_served(1)


def test_a_guess_takes_no_block_and_no_exchange() -> None:
    plain, guessing = World(**FEW, block_size=8), world(block_size=8)
    for served in (plain, guessing):
        served.submit(submission(1, [0, 1], 60))
        served.run()

    blocks = [[grant.free_blocks for _, grant in served.exchanges] for served in (plain, guessing)]
    assert blocks[0] == blocks[1]
    told = [
        [commit.tokens for exchange, _ in served.exchanges for commit in exchange.commits]
        for served in (plain, guessing)
    ]
    assert told[0] == told[1], "what was guessed wrong is never told"


class Wrong:
    """Guesses what never comes."""

    def guess(self, wishes: list[Wish]) -> dict[Sequence, tuple[int, ...]]:
        return {wish.sequence: (0,) * wish.most for wish in wishes}

    def forget(self, sequence: Sequence) -> None:
        """Nothing is known of it."""


@pytest.mark.parametrize("overlap", [False, True])
def test_after_wrong_guesses_the_books_are_those_of_a_run_without_any(overlap: bool) -> None:
    """Step by step: no length counts a guess, so there is nothing to truncate, and no reserve is left behind by one.

    Where a step overlaps the exchange of the next one, a block may be there before it would be, one at most.
    """
    fields: dict[str, Any] = {"block_size": 8, "num_blocks": 40, "overlap": overlap, "model": lambda *_: 1}
    plain, guessing = World(**fields), World(**fields, drafter=Drafter(Wrong()))
    for served in (plain, guessing):
        for number in range(3):
            served.submit(submission(number, [2] * (5 + 3 * number), 50))
    while plain.scheduler.busy:
        plain.step()
        guessing.step()
        sequences = [id for id in map(SequenceId, range(10)) if id in plain.ledger]
        assert [guessing.ledger.length(id) for id in sequences] == [plain.ledger.length(id) for id in sequences]
        ahead = [len(guessing.ledger.blocks(id)) - len(plain.ledger.blocks(id)) for id in sequences]
        assert all(0 <= blocks <= overlap for blocks in ahead), ahead
        assert guessing.ledger.published() == plain.ledger.published()

    assert (guessing.scheduler.drafts.accepted, plain.scheduler.busy) == (0, guessing.scheduler.busy)
    assert guessing.scheduler.drafts.drafted > 50
    assert not any(exchange.truncations for exchange, _ in guessing.exchanges)


def test_a_stop_token_among_right_guesses_ends_the_text_there() -> None:
    solo = world()
    solo.submit(submission(1, [0, 1, 2, 0, 1, 2], 50))
    solo.run()
    text = solo.gateways.of(1).tokens[0]

    for stop in range(3):
        served = world()
        served.submit(submission(1, [0, 1, 2, 0, 1, 2], 50, stop_tokens=frozenset({stop})))
        served.run()
        assert served.gateways.of(1).tokens.get(0, []) == text[: text.index(stop)]
        assert served.gateways.of(1).reasons[0] is FinishReason.STOP
        served.assert_at_rest()


def test_whoever_guesses_well_guesses_further() -> None:
    served = World(
        drafter=Drafter(Lookups()), block_size=64, num_blocks=8, model=lambda tokens, *_: (tokens[-1] + 1) % 5
    )
    served.submit(submission(1, [0, 1, 2, 3, 4, 0], 120))
    served.run()

    drafts = [chunk.drafts for step in served.runner.steps for chunk in step.chunks if chunk.drafts]
    assert drafts[:3] == [FIRST_REACH, 2 * FIRST_REACH, MOST_REACH]
    assert served.scheduler.drafts.accepted == served.scheduler.drafts.drafted
    assert len(served.runner.steps) < 20


def test_whoever_guesses_badly_guesses_less() -> None:
    """The text alternates between a pair that has stood before and a token that is new."""
    served = World(drafter=Drafter(Lookups()), block_size=64, num_blocks=8, model=_pair_and_a_new_one)
    served.submit(submission(1, [0, 1, 5], 90))
    served.run()

    drafts = [chunk.drafts for step in served.runner.steps for chunk in step.chunks if chunk.drafts]
    assert drafts[:4] == [FIRST_REACH, FIRST_REACH // 2, 1, 1]
    assert served.scheduler.drafts.accepted == 0


def _pair_and_a_new_one(tokens: collections.abc.Sequence[int], *_: object) -> int:
    place = len(tokens) % 3
    return place if place < 2 else 10 + len(tokens)


def test_a_full_step_guesses_nothing() -> None:
    served = world(max_step_tokens=2 * STEP_ROWS, max_running=STEP_ROWS, block_size=16, num_blocks=200)
    for number in range(STEP_ROWS):
        served.submit(submission(number, [0, 1], 12))
    served.run()

    assert served.scheduler.drafts.drafted == 0
