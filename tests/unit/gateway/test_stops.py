"""Stop strings in a stream of text, wherever the stream is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.stops import StopScanner

few_letters = st.text(alphabet="abc", max_size=30)
stop_strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4).map(tuple)


def scan(text: str, cuts: list[int], stops: tuple[str, ...]) -> tuple[str, bool]:
    """(what is released in all, whether a stop string was found) of a text that comes in pieces."""
    scanner = StopScanner(stops)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    released = "".join(map(scanner.push, pieces))
    return (released if scanner.stopped else released + scanner.flush()), scanner.stopped


def dumb(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Read letter by letter; the first stop string that is complete cuts, the longest of those that end together."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(few_letters, st.lists(st.integers(0, 30), max_size=8), stop_strings)
def test_the_outcome_depends_on_the_text_and_not_on_how_it_was_cut(
    text: str, cuts: list[int], stops: tuple[str, ...]
) -> None:
    assert scan(text, cuts, stops) == dumb(text, stops)


@given(few_letters, stop_strings)
def test_nothing_is_released_that_a_stop_string_takes_back(text: str, stops: tuple[str, ...]) -> None:
    scanner = StopScanner(stops)
    whole, _ = dumb(text, stops)
    released = ""
    for letter in text:
        released += scanner.push(letter)
        assert whole.startswith(released)


@pytest.mark.parametrize(
    ("stops", "pieces", "released"),
    [
        pytest.param(("\nUser:",), ["Hi.", "\nUs", "ed", " car"], ["Hi.", "", "\nUsed", " car"], id="a false start"),
        pytest.param(("\nUser:",), ["Hi.\n", "User", ":"], ["Hi.", "", ""], id="over three pieces"),
        pytest.param(("aab",), ["aaa", "b"], ["a", ""], id="a start within a start"),
        pytest.param((), ["as", "it", "is"], ["as", "it", "is"], id="nothing to look for"),
    ],
)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(
    stops: tuple[str, ...], pieces: list[str], released: list[str]
) -> None:
    scanner = StopScanner(stops)
    assert [scanner.push(piece) for piece in pieces] == released
