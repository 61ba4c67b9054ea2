"""Who runs, who waits, who is refused. Pure: time and tickets are arguments, what changed is a value.

Invariants: at most `max_running` run and at most `max_waiting` wait; nobody waits while there is room to run; who came
first runs first; everybody who waits has a time at which the waiting ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

from octavo.errors import InvalidRequest, QueueFull
from octavo.records import PoolSpec

Ticket = NewType("Ticket", int)
"""One request at the door; drawn by the caller, never used twice."""

DEFAULT_MAX_TOKENS = 256
"""Output tokens a sample when the client names no number."""


def output_budget(prompt_tokens: int, max_tokens: int | None, pools: Iterable[PoolSpec]) -> int:
    """Output tokens a sample may have, where one of `pools` (at least one) must hold prompt and output together.

    Raises:
        InvalidRequest: no pool can ever hold it, however long it waits.
    """
    pools = tuple(pools)
    longest = max(pool.max_model_tokens for pool in pools)
    largest = max(pool.capacity_tokens for pool in pools)
    if prompt_tokens >= longest:
        raise InvalidRequest(f"prompt: {prompt_tokens} tokens, the model takes {longest} with at least 1 of output")
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_tokens + wanted > largest:
        raise InvalidRequest(
            f"prompt + max_tokens: {prompt_tokens} + {wanted} = {prompt_tokens + wanted} tokens, "
            f"{'the model takes' if largest == longest else 'the largest pool holds'} {largest}"
        )
    return min(DEFAULT_MAX_TOKENS, largest - prompt_tokens) if max_tokens is None else max_tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """Tickets whose waiting has ended: those that run from now on, and those whose time was up."""

    admitted: tuple[Ticket, ...] = ()
    expired: tuple[Ticket, ...] = ()


class Admission:
    """The door of one gateway. Call `turn` after every change and act on what it returns."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        """Let `max_running` run at once and `max_waiting` more wait."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: set[Ticket] = set()
        self._waiting: dict[Ticket, float] = {}  # oldest first -> when its waiting ends

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def enter(self, ticket: Ticket, *, expires: float) -> None:
        """Queue a request; it waits until `expires` at most.

        Raises:
            QueueFull: as many wait as may wait, and as many run as may run.
        """
        assert ticket not in self._running, ticket
        assert ticket not in self._waiting, ticket
        room = self._max_running - len(self._running) + self._max_waiting
        if len(self._waiting) >= room:
            raise QueueFull(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, "
                f"at most {self._max_running} and {self._max_waiting}"
            )
        self._waiting[ticket] = expires

    def leave(self, ticket: Ticket) -> None:
        """Forget a request, whether it ran, waited, or was forgotten before."""
        self._running.discard(ticket)
        self._waiting.pop(ticket, None)

    def turn(self, now: float) -> Turn:
        """Drop those whose time is up, then let the oldest run while there is room."""
        expired = tuple(ticket for ticket, expires in self._waiting.items() if expires <= now)
        for ticket in expired:
            del self._waiting[ticket]
        admitted = tuple(self._waiting)[: self._max_running - len(self._running)]
        for ticket in admitted:
            del self._waiting[ticket]
        self._running.update(admitted)
        return Turn(admitted, expired)

    def check(self) -> None:
        """Assert the invariants that hold after every `turn`."""
        assert len(self._running) <= self._max_running, (len(self._running), self._max_running)
        assert len(self._waiting) <= self._max_waiting, (len(self._waiting), self._max_waiting)
        assert not self._waiting or len(self._running) == self._max_running, "somebody waits while there is room"
        assert not self._running & self._waiting.keys(), "somebody runs and waits"
