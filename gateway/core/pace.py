"""How fast requests get on, in tokens of work a second, to foretell a wait. Pure: time is an argument.

Measured only while somebody waits and somebody runs: an idle gateway's rate says how much is asked of it, not how much
it can do, and while there is no worker nothing can be done. Old measurements fade, so that the rate follows the fleet.
"""

from math import exp

MEMORY_SECONDS = 20.0
"""After so long, a measurement counts a third."""

LEAST_SECONDS = 2.0
"""Measured, before anything is foretold."""


class Pace:
    """The rate at which the work of ended requests goes away."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._busy_since: float | None = None

    def busy(self, now: float) -> None:
        """Somebody waits while others run, from now on if not before."""
        if self._busy_since is None:
            self._busy_since = now

    def idle(self) -> None:
        """Nobody waits any more, or nobody runs."""
        self._busy_since = None

    def ended(self, tokens: int, now: float) -> None:
        """A request has ended that took so many tokens; counts only while somebody waits."""
        if self._busy_since is None:
            return
        passed = now - self._busy_since
        faded = exp(-passed / MEMORY_SECONDS)
        self._tokens = self._tokens * faded + tokens
        self._seconds = self._seconds * faded + passed
        self._busy_since = now

    def seconds_for(self, tokens: float) -> float | None:
        """How long so many tokens take; None where it is not known."""
        if self._seconds < LEAST_SECONDS or self._tokens <= 0:
            return None
        return tokens * self._seconds / self._tokens
