"""How often a request is told its tokens."""

from gateway.core.interval import Interval


def told_after(interval: Interval, counts: list[int], sample: int = 0) -> list[int]:
    """How many tokens of one sample are told each time, of those that come so many at once."""
    told: list[int] = []
    untold = 0
    for count in counts:
        untold += count
        if interval.due(sample, count):
            interval.told()
            told.append(untold)
            untold = 0
    return told


def test_the_first_token_is_told_at_once_and_then_so_many_together() -> None:
    assert told_after(Interval(4), [1] * 10) == [1, 4, 4]
    assert told_after(Interval(1), [1] * 3) == [1, 1, 1]


def test_tokens_that_come_together_are_told_together() -> None:
    assert told_after(Interval(4), [3, 3, 3, 4]) == [3, 6, 4]


def test_a_sample_that_begins_late_is_told_its_first_token_at_once_too() -> None:
    interval = Interval(4)
    assert told_after(interval, [1, 1]) == [1]
    assert told_after(interval, [1, 1], sample=1) == [1]


def test_what_one_sample_has_is_told_with_anothers() -> None:
    interval = Interval(3)
    assert interval.due(0, 1)
    assert interval.due(1, 1)
    interval.told()
    assert not interval.due(0, 2)
    assert not interval.due(1, 2)
    assert interval.due(0, 1)
    interval.told()
    assert not interval.due(1, 2), "those of sample 1 were told with sample 0's"
