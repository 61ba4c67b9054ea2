"""Into how many splits a history is cut: the rule that a kernel computes, and the room that its launcher makes."""

import pytest

pytest.importorskip("triton")

from worker.kernels import paged_decode

LENGTHS = [*range(1, 3000, 7), *(2**k + d for k in range(8, 21) for d in (-1, 0, 1))]


def _positions(span: int) -> int:
    split = paged_decode.split_positions.fn(span)  # the kernel's own code, on a number of Python's
    return getattr(split, "value", split)


def _splits(span: int) -> int:
    return -(-span // _positions(span))


@pytest.mark.parametrize(
    ("span", "positions"),
    [(1, 256), (256, 256), (2048, 256), (2049, 512), (4096, 512), (16384, 512), (16385, 1024), (131072, 4096)],
)
def test_the_rule_depends_on_the_span_alone(span: int, positions: int) -> None:
    assert _positions(span) == positions


def test_no_history_within_a_capacity_needs_more_room_than_is_made() -> None:
    most = 0
    for length in sorted(LENGTHS):
        most = max(most, _splits(length))
        assert most <= paged_decode.most_splits(length)


@pytest.mark.parametrize("capacity", [1, 256, 257, 2048, 2600, 4096, 9000, 16384, 10**6])
def test_no_more_room_is_made_than_some_history_within_the_capacity_needs(capacity: int) -> None:
    step = max(1, capacity // 5000)
    needed = max(_splits(length) for length in (*range(1, capacity + 1, step), min(capacity, 2048), capacity))

    assert paged_decode.most_splits(capacity) == needed
