"""When to stop asking somebody who does not answer, and when to ask again. Pure: the time is an argument.

    closed ── failures in a row ──> open ── its pause is over: one probe ──> half open ── answered ──> closed
                                     ^                                           │
                                     └────────── failed: a longer pause ─────────┘

Only the probe, which nobody waits for, can close it: a request never pays to find out.
"""

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Whether requests ask."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"
    """A probe is under way; requests do not ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """How much patience there is."""

    failures: int = 3
    """In a row, that open it."""
    first_pause: float = 0.1
    """Seconds from its opening to the first probe; each failure doubles them."""
    longest_pause: float = 2.0
    steady: float = 10.0
    """Seconds that it must have been closed for the pauses to start from the first again."""


class Breaker:
    """See above. Begins closed."""

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self._policy = policy or BreakerPolicy()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._failed_at = float("-inf")
        """When the last failure was counted."""
        self._pause = 0.0
        """Of the last opening; 0 if there was none."""
        self._since = 0.0
        """When the state was last entered."""

    @property
    def state(self) -> BreakerState:
        """Now."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether a request may ask."""
        return self._state is BreakerState.CLOSED

    @property
    def probe_at(self) -> float | None:
        """When the next probe is due; None unless it is open."""
        return self._since + self._pause if self._state is BreakerState.OPEN else None

    def succeeded(self) -> None:
        """A request that was allowed to ask had its answer. Once open, that is too late to count."""
        if self.closed:
            self._failures = 0

    def failed(self, asked: float, now: float) -> None:
        """A request that was allowed to ask, and did so at `asked`, had none.

        Once open, that is no news; nor is it when it asked before the last failure: many requests that hang in the
        same stall are one failure.
        """
        if not self.closed or asked < self._failed_at:
            return
        self._failures += 1
        self._failed_at = now
        if self._failures >= self._policy.failures:
            if now - self._since >= self._policy.steady:
                self._pause = 0.0
            self._open(now)

    def probe(self, now: float) -> bool:
        """Whether a probe is to be made now; if so, `probed` must follow."""
        if self.probe_at is None or now < self.probe_at:
            return False
        self._state = BreakerState.HALF_OPEN
        return True

    def probed(self, answered: bool, now: float) -> None:
        """How the probe went."""
        assert self._state is BreakerState.HALF_OPEN, self._state
        if not answered:
            self._open(now)
            return
        self._state, self._since, self._failures = BreakerState.CLOSED, now, 0

    def _open(self, now: float) -> None:
        policy = self._policy
        self._pause = min(policy.longest_pause, max(policy.first_pause, 2 * self._pause))
        self._state, self._since = BreakerState.OPEN, now
