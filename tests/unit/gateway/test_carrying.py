"""What is left of a request, and for how long it is worth another try."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.carrying import FIRST_PAUSE_SECONDS, Losses, remaining
from gateway.core.fleet import WorkerProcess
from octavo.ids import Incarnation, WorkerId
from octavo.records.sampling import SamplingParams
from octavo.records.serve import Submission

PROMPT = (3, 1, 4)
outputs = st.lists(st.none() | st.lists(st.integers(0, 1), max_size=2), min_size=1, max_size=6)


def process(name: str) -> WorkerProcess:
    return WorkerId(name), Incarnation(1)


def whole(samples: int) -> Submission:
    return Submission(
        request=0,
        prompt=PROMPT,
        max_tokens=9,
        samples=samples,
        sampling=SamplingParams(temperature=1, seed=5),
        stop_tokens=frozenset({2}),
    )


def told(parts: Sequence[Submission]) -> dict[int, tuple[int, ...]]:
    """Of each sample that is asked for, the tokens that the parts say it has."""
    said: dict[int, tuple[int, ...]] = {}
    for part in parts:
        for sample in range(part.first_sample, part.first_sample + part.samples):
            assert sample not in said, "asked for twice"
            assert part.prompt[: part.output_begins] == PROMPT
            said[sample] = part.prompt[part.output_begins :]
    return said


@given(outputs)
def test_every_sample_that_has_not_ended_goes_on_from_its_own_tokens_and_no_other(
    drawn: list[list[int] | None],
) -> None:
    parts = remaining(whole(len(drawn)), drawn)
    assert told(parts) == {sample: tuple(tokens) for sample, tokens in enumerate(drawn) if tokens is not None}


@given(outputs)
def test_nothing_else_about_the_request_changes(drawn: list[list[int] | None]) -> None:
    request = whole(len(drawn))
    for part in remaining(request, drawn):
        assert (part.max_tokens, part.sampling, part.stop_tokens) == (
            request.max_tokens,
            request.sampling,
            request.stop_tokens,
        )
        assert part.longest_sequence == request.longest_sequence


@given(outputs)
def test_what_is_left_of_what_is_left_is_the_same(drawn: list[list[int] | None]) -> None:
    """Losing the next worker before it said anything changes nothing, which is how a request is carried twice."""
    request = whole(len(drawn))
    assert remaining(request, drawn) == remaining(request, [None if each is None else [*each] for each in drawn])


@given(outputs)
def test_neighbours_with_the_same_tokens_are_forked_from_one_computation(drawn: list[list[int] | None]) -> None:
    parts = remaining(whole(len(drawn)), drawn)
    for one, other in pairwise(parts):
        assert one.first_sample + one.samples < other.first_sample or one.prompt != other.prompt


def test_a_request_without_a_token_is_asked_for_as_it_was() -> None:
    assert remaining(whole(3), [[], [], []]) == (whole(3),)


def test_a_lost_worker_is_avoided_for_a_pause_that_doubles() -> None:
    losses = Losses(most=9)
    losses.lost(process("a"), 10.0)
    assert losses.avoided(10.0) == {process("a")}
    assert losses.next_chance(10.0) == 10.0 + FIRST_PAUSE_SECONDS
    assert losses.avoided(10.0 + FIRST_PAUSE_SECONDS) == frozenset()

    losses.lost(process("a"), 20.0)
    assert losses.next_chance(20.0) == 20.0 + 2 * FIRST_PAUSE_SECONDS


def test_a_worker_that_refuses_is_avoided_as_long_and_speaks_against_nobody() -> None:
    losses = Losses(most=1)
    losses.refused(process("a"), 10.0)
    assert losses.avoided(10.0) == {process("a")}
    assert losses.next_chance(10.0) == 10.0 + FIRST_PAUSE_SECONDS
    losses.refused(process("a"), 20.0)
    assert losses.next_chance(20.0) == 20.0 + 2 * FIRST_PAUSE_SECONDS
    assert not losses.hopeless


class Row(RuleBasedStateMachine):
    """Hopeless exactly after three losses in a row, whatever else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = Losses(most=3)
        self.now = 0.0
        self.row = 0

    @rule(name=st.sampled_from("abc"), seconds=st.floats(0, 3))
    def lose(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.losses.lost(process(name), self.now)
        self.row += 1

    @rule()
    def progress(self) -> None:
        self.losses.progressed()
        self.row = 0

    @rule(name=st.sampled_from("abc"))
    def refuse(self, name: str) -> None:
        self.losses.refused(process(name), self.now)

    @invariant()
    def gives_up_after_three(self) -> None:
        assert self.losses.hopeless == (self.row >= 3)

    @invariant()
    def a_chance_lies_ahead_and_brings_somebody_back(self) -> None:
        chance = self.losses.next_chance(self.now)
        if chance is not None:
            assert chance > self.now
            assert len(self.losses.avoided(chance)) < len(self.losses.avoided(self.now))


TestRow = Row.TestCase
