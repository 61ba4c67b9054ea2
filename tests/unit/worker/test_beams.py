"""The rules of beam search, against another writing of them and by hand."""

from collections.abc import Sequence
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.records.sampling import BeamSearch
from octavo.records.serve import FinishReason
from tests.support.beam_oracle import Found, beam_search
from worker.core.beams import Beams, continuations_wanted
from worker.core.step import Continuation

VOCABULARY = 12


def scores(text: Sequence[int]) -> list[float]:
    """Of every token after a text: a function of it all."""
    return [-(crc32(bytes([*text, token])) % 400) / 64 for token in range(VOCABULARY)]


def likeliest(text: Sequence[int], count: int) -> list[Continuation]:
    ranked = sorted(enumerate(scores(text)), key=lambda pair: (-pair[1], pair[0]))
    return [Continuation(token, logprob) for token, logprob in ranked[:count]]


def search(prompt: list[int], beam: BeamSearch, stops: set[int], max_tokens: int, samples: int) -> list[Found]:
    beams = Beams(beam, stops, max_tokens)
    outputs: list[list[int]] = [[]]
    wanted = continuations_wanted(beam, stops)
    while branches := beams.advance(outputs, [likeliest([*prompt, *output], wanted) for output in outputs]):
        outputs = [[*outputs[branch.parent], branch.token] for branch in branches]
    return [(list(text.tokens), text.reason, text.cumulative) for text in beams.best(samples)]


@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    width=st.integers(1, 4),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    ends=st.sampled_from([{}, {"early_stopping": True}, {"exhaustive": True}]),
    stops=st.sets(st.integers(0, VOCABULARY - 1), max_size=2),
    max_tokens=st.integers(1, 8),
)
def test_a_search_finds_what_the_rules_say(
    prompt: list[int], width: int, length_penalty: float, ends: dict[str, bool], stops: set[int], max_tokens: int
) -> None:
    beam = BeamSearch(width=width, length_penalty=length_penalty, **ends)
    assert search(prompt, beam, stops, max_tokens, width) == beam_search(prompt, scores, beam, stops, max_tokens)


def test_one_beam_is_greedy() -> None:
    ((text, reason, _),) = search([1, 2], BeamSearch(width=1), set(), 6, 1)
    greedy = [1, 2]
    for _ in range(6):
        greedy.append(likeliest(greedy, 1)[0].token)
    assert (text, reason) == (greedy[2:], FinishReason.LENGTH)


def of(*pairs: tuple[int, float]) -> list[Continuation]:
    return [Continuation(token, logprob) for token, logprob in pairs]


def test_a_text_that_ends_below_the_width_is_not_kept() -> None:
    beams = Beams(BeamSearch(width=2), {9}, 10)
    going = beams.advance([[]], [of((1, -1.0), (2, -2.0), (9, -3.0), (3, -4.0))])
    assert [(branch.parent, branch.token) for branch in going] == [(0, 1), (0, 2)]
    with pytest.raises(AssertionError):
        beams.best(1)


def test_early_stopping_takes_the_first_texts_and_patience_waits_for_better_ones() -> None:
    first = of((9, -1.0), (8, -1.5), (1, -1.6), (2, -9.0), (3, -9.5), (4, -9.9))
    hasty = Beams(BeamSearch(width=2, early_stopping=True), {8, 9}, 10)
    assert hasty.advance([[]], [first]) == []
    assert [text.cumulative for text in hasty.best(2)] == [-1.0, -1.5]
    patient = Beams(BeamSearch(width=2, length_penalty=2.0), {8, 9}, 10)
    assert patient.advance([[]], [of((1, -1.0), (9, -1.2), (2, -1.3), (3, -9.0), (4, -9.5), (5, -9.9))]) != []
