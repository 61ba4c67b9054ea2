"""A worker's reports in, a client's events out."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core import events
from gateway.core.events import Delta, Finished
from gateway.core.transcript import Said, Transcript
from octavo.records.serve import FinishReason, Prefilled, PromptLogprobs, SampleFinished, TokenLogprobs, Tokens


class Letters:
    """Token n is the n-th letter, but "z" is half a character, which shows as "?" once more tokens or the end come."""

    def __init__(self) -> None:
        self._waiting = ""

    def push(self, tokens: Any) -> str:
        text = self._waiting
        self._waiting = ""
        for token in tokens:
            letter = chr(ord("a") + token)
            text, self._waiting = (text + self._waiting, "?") if letter == "z" else (text + self._waiting + letter, "")
        return text

    def flush(self) -> str:
        rest, self._waiting = self._waiting, ""
        return rest


def transcript(samples: int = 1, *stops: str) -> Transcript:
    return Transcript(samples, Letters, stops)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) - ord("a") for letter in text)


def grew(text: str, sample: int = 0) -> list[Said]:
    return [Tokens(1, sample, tokens(text))]


def ended(reason: FinishReason = FinishReason.LENGTH, sample: int = 0) -> list[Said]:
    return [SampleFinished(1, sample, reason)]


def test_tokens_become_deltas_and_the_end_of_a_sample_is_told_once() -> None:
    story = transcript()
    assert list(story.add(grew("ab"))) == [Delta(0, "ab", (0, 1))]
    assert not story.finished
    assert list(story.add(ended())) == [Finished(0, FinishReason.LENGTH)]
    assert list(story.add(ended())) == []
    assert story.finished


def test_what_a_stop_string_held_back_comes_out_at_the_end() -> None:
    story = transcript(1, "abc")
    assert list(story.add(grew("xab"))) == [Delta(0, "x", tokens("xab"))]
    assert list(story.add(ended())) == [Delta(0, "ab", ()), Finished(0, FinishReason.LENGTH)]


def test_a_stop_string_ends_its_sample_and_what_the_worker_still_says_is_dropped() -> None:
    """S2: neither text nor tokens from behind the stop string."""
    story = transcript(1, "cd")
    assert list(story.add(grew("abc"))) == [Delta(0, "ab", tokens("abc"))]
    assert list(story.add(grew("dxyz"))) == [Delta(0, "", tokens("d")), Finished(0, FinishReason.STOP)]
    assert list(story.add(grew("more"))) == []
    assert (story.finished, story.output_tokens) == (True, 4)


def test_a_stop_string_that_only_the_last_half_character_completes_is_found() -> None:
    story = transcript(1, "a?")
    list(story.add(grew("az")))
    assert list(story.add(ended())) == [Finished(0, FinishReason.STOP)]


def test_half_a_character_is_flushed_before_the_end() -> None:
    story = transcript()
    assert list(story.add(grew("az"))) == [Delta(0, "a", tokens("az"))]
    assert list(story.add(ended(FinishReason.STOP))) == [Delta(0, "?", ()), Finished(0, FinishReason.STOP)]


def test_one_sample_that_stops_leaves_the_others_running() -> None:
    story = transcript(2, "b")
    list(story.add(grew("ab", sample=0)))
    assert not story.finished
    assert list(story.add(grew("ac", sample=1))) == [Delta(1, "ac", tokens("ac"))]
    list(story.add(ended(sample=1)))
    assert (story.finished, story.output_tokens) == (True, 4)


def test_what_a_sample_gained_in_several_steps_is_one_delta() -> None:
    story = transcript(2)
    steps = [Tokens(1, 0, (0,)), Tokens(1, 1, (1,)), Tokens(1, 0, (2, 3))]
    assert list(story.add(steps)) == [Delta(0, "acd", (0, 2, 3)), Delta(1, "b", (1,))]


def test_the_cached_tokens_are_those_that_the_worker_reports() -> None:
    story = transcript()
    list(story.add([Prefilled(1, 48)]))
    assert story.cached_tokens == 48


@given(
    st.lists(st.text(alphabet="abcz", max_size=5), max_size=8), st.lists(st.sampled_from(["ab", "ca", "?"]), max_size=2)
)
def test_how_a_worker_groups_its_tokens_changes_neither_text_nor_count(steps: list[str], stops: list[str]) -> None:
    def outcome(groups: list[str]) -> tuple[str, int, list[Any]]:
        story = transcript(1, *stops)
        events = [event for group in groups for event in story.add(grew(group))] + list(story.add(ended()))
        text = "".join(event.text for event in events if isinstance(event, Delta))
        return text, story.output_tokens, [event for event in events if isinstance(event, Finished)]

    assert outcome(steps) == outcome(["".join(steps)]) == outcome(list("".join(steps)))


def scored(text: str, *logprobs: float) -> list[Said]:
    return [Tokens(1, 0, tokens(text), tuple(map(TokenLogprobs, logprobs)))]


def test_logprobs_go_with_their_tokens_and_add_up() -> None:
    story = transcript(1, "c")
    assert list(story.add(scored("a", -1.0))) == [Delta(0, "a", (0,), (TokenLogprobs(-1.0),))]
    told = list(story.add(scored("bcd", -2.0, -3.0, -4.0)))
    assert told == [
        Delta(0, "b", (1, 2), (TokenLogprobs(-2.0), TokenLogprobs(-3.0))),
        Finished(0, FinishReason.STOP, -6.0),
    ]


def test_a_beam_tells_its_score_itself() -> None:
    story = transcript()
    list(story.add(grew("ab")))
    end = [SampleFinished(1, 0, FinishReason.LENGTH, -2.5)]
    assert list(story.add(end)) == [Finished(0, FinishReason.LENGTH, -2.5)]


def test_the_prompts_logprobs_are_told_once_and_whole_when_it_is_computed() -> None:
    story = transcript()
    first, second = (TokenLogprobs(-1.0),), (TokenLogprobs(-2.0), TokenLogprobs(-3.0))
    assert list(story.add([PromptLogprobs(1, 1, first)])) == []
    last = [PromptLogprobs(1, 2, second), Prefilled(1, 0)]
    assert list(story.add(last)) == [events.PromptLogprobs((*first, *second))]
    assert list(story.add(grew("a"))) == [Delta(0, "a", (0,))]
