"""How often something took how long."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence


class Durations:
    """Counts in buckets with fixed upper bounds."""

    def __init__(self, bounds_seconds: Sequence[float]) -> None:
        """`bounds_seconds` are the upper bounds, ascending; one more bucket has none."""
        self._bounds = tuple(bounds_seconds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        """It took so long, once."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_seconds += seconds

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper bound, how often it took no longer), ascending; the last bound is infinite."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield bound, total
