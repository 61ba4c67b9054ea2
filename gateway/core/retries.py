"""When a client asks again, and after how long. Pure: chance is an argument.

Only what certainly produced nothing is asked again: a refusal that says "not now", or a gateway that is not there, as
long as no part of an answer has come.
"""

from dataclasses import dataclass

from octavo.errors import Draining, NoWorker, Overloaded, WorkerLost

MAY_PASS: tuple[type[Exception], ...] = (Overloaded, NoWorker, Draining, WorkerLost, ConnectionError)
"""What may be otherwise a moment later. Of a deadline that passed nothing is left to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often, and how long apart."""

    attempts: int = 4
    """In all, the first included."""
    first_seconds: float = 0.1
    """The longest pause after the first attempt; it doubles with each further one."""
    longest_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Raises ValueError where a number makes no sense."""
        if self.attempts < 1:
            raise ValueError(f"attempts: {self.attempts}, wanted at least 1")
        if not 0 <= self.first_seconds <= self.longest_seconds:
            raise ValueError(f"first_seconds: {self.first_seconds}, wanted 0 to longest_seconds {self.longest_seconds}")

    def pause(self, attempts: int, chance: float, asked: float | None = None) -> float | None:
        """Seconds to wait when so many attempts have failed, or None where no other may follow.

        `chance` in [0, 1) spreads clients that failed together over the whole pause ("full jitter"), which begins when
        the `asked` seconds are over that the refusal named.
        """
        if attempts >= self.attempts:
            return None
        longest = min(self.longest_seconds, self.first_seconds * 2.0 ** min(attempts - 1, 60))
        return (asked or 0.0) + chance * longest


SOME = Retries()
"""Enough for a gateway that restarts or a worker that is being replaced."""
NEVER = Retries(attempts=1)
"""One attempt, no other."""
