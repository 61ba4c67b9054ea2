"""Who runs, who waits, who is refused. Pure: time and tickets are arguments, what changed is a value.

Requests for one model wait in one line, in which the tenants take turns (fair_queue.py). The first of a line runs when
there is a place for it here and room at some worker; until then nobody of its line overtakes it, or small requests
would keep a large one out for ever. Lines take turns for the places.

Invariants: at most `max_running` run and at most `max_waiting` more are here; the first of a line waits only while
there is no place or no room; everybody who waits has a time at which the waiting ends.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NewType

from gateway.core.fair_queue import FairQueue
from gateway.core.pace import Pace
from octavo.errors import InvalidRequest, QueueFull
from octavo.records.fleet import PoolSpec

Ticket = NewType("Ticket", int)
"""One request at the door; drawn by the caller, never used twice."""

DEFAULT_MAX_TOKENS = 256
"""Output tokens a sample when the client names no number."""


def default_budget(min_tokens: int) -> int:
    """Output tokens a sample may have whose client names no number, wherever they fit."""
    return max(DEFAULT_MAX_TOKENS, min_tokens)


def output_budget(
    prompt_tokens: int,
    max_tokens: int | None,
    pools: Iterable[PoolSpec],
    *,
    field: str = "max_tokens",
    min_tokens: int = 0,
) -> int:
    """Output tokens a sample may have, where one of `pools` (at least one) must hold prompt and output together.

    Raises:
        InvalidRequest: no pool can ever hold it, however long it waits; calls the output by its `field`.
    """
    if max_tokens is None and min_tokens > 1:
        field = "min_tokens"
    pools = tuple(pools)
    longest = max(pool.max_model_tokens for pool in pools)
    largest = max(pool.capacity_tokens for pool in pools)
    if prompt_tokens >= longest:
        raise InvalidRequest(f"prompt: {prompt_tokens} tokens, the model takes {longest} with at least 1 of output")
    wanted = max(1, min_tokens) if max_tokens is None else max_tokens
    if prompt_tokens + wanted > largest:
        raise InvalidRequest(
            f"prompt + {field}: {prompt_tokens} + {wanted} = {prompt_tokens + wanted} tokens, "
            f"{'the model takes' if largest == longest else 'the largest pool holds'} {largest}"
        )
    return min(default_budget(min_tokens), largest - prompt_tokens) if max_tokens is None else max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request wants, as far as its turn depends on it."""

    line: str
    """The model."""
    flow: Hashable
    """On whose account it runs."""
    tokens: int
    """Of work, at most."""
    expires: float
    """When its waiting ends."""
    weight: float = 1.0
    """Of its flow."""
    priority: int = 0
    """Within its flow; the higher is served sooner."""


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
        self._running: dict[Ticket, Wish] = {}
        self._waiting: dict[Ticket, Wish] = {}
        self._lines: dict[str, FairQueue[Hashable, Ticket]] = {}
        self._turns: deque[str] = deque()
        self._pace = Pace()

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def enter(self, ticket: Ticket, wish: Wish, now: float) -> None:
        """Queue a request; `turn` says when it runs.

        Raises:
            QueueFull: as many wait as may wait, and as many run as may run; or so much waits that its turn would come
                too late.
        """
        assert ticket not in self._running, ticket
        assert ticket not in self._waiting, ticket
        line = self._lines.get(wish.line)
        room = self._max_running - len(self._running) + self._max_waiting
        if len(self._waiting) >= room:
            raise QueueFull(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, "
                f"at most {self._max_running} and {self._max_waiting}",
                retry_after_seconds=self._pace.seconds_for(wish.tokens),
            )
        if line is not None:
            self._require_in_time(line.tokens_before(wish.flow), wish, now)
        else:
            line = self._lines[wish.line] = FairQueue()
            self._turns.append(wish.line)
        line.add(wish.flow, ticket, tokens=wish.tokens, weight=wish.weight, priority=wish.priority)
        self._waiting[ticket] = wish

    def leave(self, ticket: Ticket, now: float) -> None:
        """Forget a request, whether it ran, waited, or was forgotten before."""
        if (wish := self._running.pop(ticket, None)) is not None:
            self._pace.ended(wish.tokens, now)
        self._forget(ticket)

    def turn(self, now: float, take_room: Callable[[Ticket], bool] = lambda _: True) -> Turn:
        """Drop those whose time is up, then let the first of each line run while there are places and room.

        Args:
            now: the time.
            take_room: takes room for the request at some worker, or says that there is none; who gets it, runs.
        """
        expired = tuple(ticket for ticket, wish in self._waiting.items() if wish.expires <= now)
        for ticket in expired:
            self._forget(ticket)
        admitted: list[Ticket] = []
        blocked = 0
        while len(self._running) < self._max_running and blocked < len(self._turns):
            line = self._lines[self._turns[0]]
            self._turns.rotate(-1)
            ticket = line.head()
            assert ticket is not None, "a line without anybody"
            if not take_room(ticket):
                blocked += 1
                continue
            blocked = 0
            line.serve(ticket)
            self._running[ticket] = self._waiting[ticket]
            self._forget(ticket)
            admitted.append(ticket)
        if self._waiting and self._running:
            self._pace.busy(now)
        else:
            self._pace.idle()
        return Turn(tuple(admitted), expired)

    def _require_in_time(self, tokens_before: float, wish: Wish, now: float) -> None:
        """Refuse at once what would wait in vain, while its client can still go elsewhere."""
        seconds = self._pace.seconds_for(tokens_before)
        if seconds is not None and now + seconds > wish.expires:
            raise QueueFull(
                f"its turn would come in about {seconds:.1f} s, and it may wait {wish.expires - now:.1f} s",
                retry_after_seconds=seconds,
            )

    def _forget(self, ticket: Ticket) -> None:
        """Out of its line, which ends with its last."""
        wish = self._waiting.pop(ticket, None)
        if wish is None:
            return
        self._lines[wish.line].discard(ticket)
        if not len(self._lines[wish.line]):
            del self._lines[wish.line]
            self._turns.remove(wish.line)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._running) <= self._max_running, (len(self._running), self._max_running)
        assert len(self._running) + len(self._waiting) <= self._max_running + self._max_waiting
        assert not self._running.keys() & self._waiting.keys(), "somebody runs and waits"
        assert sum(map(len, self._lines.values())) == len(self._waiting)
        assert sorted(self._turns) == sorted(self._lines)
        for line in self._lines.values():
            line.check()
