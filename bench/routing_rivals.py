"""Ways to choose a worker that are in use elsewhere, each written from its description, beside Octavo's own.

All of them see the same figures: what each worker holds of the prompt, what was sent there in this moment included.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

from bench.fleet_model import Policy, View
from gateway.core.in_flight import Hit
from gateway.core.routing import SHARES, Shares, choose

_NO_HIT = Hit(0)


def octavo(view: View, draw: Callable[[], float], shares: Shares = SHARES) -> int:
    """gateway.core.routing."""
    return view.standings.index(choose(view.work, view.standings, view.hits, draw, shares).chosen.standing)


class RoundRobin:
    """One worker after another."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, view: View, draw: Callable[[], float]) -> int:
        """The next."""
        self._next += 1
        return self._next % len(view.standings)


def least_loaded(view: View, draw: Callable[[], float]) -> int:
    """The worker with the fewest prompt tokens queued; of several, with the fewest positions held."""
    return _least([(one.queued_tokens, one.held_tokens) for one in view.standings], draw)


@dataclass(frozen=True, slots=True)
class PrefillBlocks:
    """weight x (blocks to compute there, for this prompt and those queued) + blocks held by what decodes there."""

    weight: float

    def __call__(self, view: View, draw: Callable[[], float]) -> int:
        """The least sum."""
        costs = [
            self.weight * (len(view.work.prompt) - reused + standing.queued_tokens) + standing.held_tokens
            for standing, reused in zip(view.standings, _reused(view), strict=True)
        ]
        return _least(costs, draw)


@dataclass(frozen=True, slots=True)
class RequestThresholds:
    """The longest hit while requests are spread evenly; else the worker with the fewest requests.

    Spread unevenly: the most at one worker are `absolute` more, and `relative` times as many, as the fewest. A prompt
    of which nobody has `least_hit` goes to the worker with the most room.
    """

    absolute: int = 32
    relative: float = 1.1
    least_hit: float = 0.5

    def __call__(self, view: View, draw: Callable[[], float]) -> int:
        """By requests, not by tokens."""
        most, fewest = max(view.requests), min(view.requests)
        if most - fewest > self.absolute and most > self.relative * fewest:
            return _least(list(view.requests), draw)
        reused = _reused(view)
        if max(reused) >= self.least_hit * len(view.work.prompt):
            return _least([-one for one in reused], draw)
        return _least([one.held_tokens + one.cached_tokens for one in view.standings], draw)


def one_cache(view: View, draw: Callable[[], float]) -> int:
    """For a cache that all workers share: the one with the least to compute before it."""
    return least_loaded(view, draw)


def policies() -> dict[str, Callable[[], Policy]]:
    """By name; each call makes a fresh one."""
    return {
        "octavo": lambda: octavo,
        "round_robin": RoundRobin,
        "least_loaded": lambda: least_loaded,
        "prefill_x1": lambda: PrefillBlocks(1),
        "prefill_x16": lambda: PrefillBlocks(16),
        "request_thresholds": RequestThresholds,
        "global_cache": lambda: one_cache,
    }


def variants() -> dict[str, Callable[[], Policy]]:
    """Octavo's own with each of its shares halved and doubled."""
    shares = {
        f"{field.name}_x{factor:g}": replace(SHARES, **{field.name: factor * getattr(SHARES, field.name)})
        for field in fields(Shares)
        for factor in (0.5, 2)
    }
    return {name: lambda these=these: partial(octavo, shares=these) for name, these in shares.items()}


def _reused(view: View) -> list[int]:
    hits = [view.hits.get(standing.info.worker_id, _NO_HIT) for standing in view.standings]
    return [min(hit.tokens, len(view.work.prompt) - 1) for hit in hits]


def _least(costs: list[float] | list[int] | list[tuple[int, int]], draw: Callable[[], float]) -> int:
    """The place of the least; ties break at random."""
    least = min(costs)  # type: ignore[type-var]
    places = [at for at, cost in enumerate(costs) if cost == least]
    return places[int(draw() * len(places))]
