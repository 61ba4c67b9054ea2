"""When a client asks again, and after how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.retries import NEVER, Retries


@given(
    attempts=st.integers(1, 100),
    made=st.integers(1, 10**6),
    first=st.floats(0, 10),
    longest=st.floats(10, 1e6),
    chance=st.floats(0, 1, exclude_max=True),
    asked=st.none() | st.floats(0, 100),
)
def test_pauses_grow_up_to_a_bound_and_end(
    attempts: int, made: int, first: float, longest: float, chance: float, asked: float | None
) -> None:
    pause = Retries(attempts=attempts, first_seconds=first, longest_seconds=longest).pause(made, chance, asked)
    if made >= attempts:
        assert pause is None
    else:
        assert pause == (asked or 0.0) + chance * min(longest, first * 2.0 ** min(made - 1, 60))


def test_never_is_never() -> None:
    assert NEVER.pause(1, 0.5) is None


def test_clients_that_failed_together_come_back_apart() -> None:
    retries = Retries(first_seconds=1.0, longest_seconds=8.0)
    assert [retries.pause(1, chance) for chance in (0.0, 0.25, 0.5)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attempts": 0}, "attempts: 0, wanted at least 1"),
        ({"first_seconds": -1.0}, "first_seconds: -1.0, wanted 0 to longest_seconds 5.0"),
        ({"longest_seconds": 0.01}, "first_seconds: 0.1, wanted 0 to longest_seconds 0.01"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retries(**fields)  # type: ignore[arg-type]
