"""Who runs, who waits, who is refused."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.core.admission import DEFAULT_MAX_TOKENS, Admission, Ticket, Wish, output_budget
from gateway.core.fair_queue import QUANTUM_TOKENS
from octavo.errors import InvalidRequest, QueueFull
from tests.support.fleets import pool

SMALL = pool(num_blocks=4, max_model_tokens=1000)  # 64 positions
LARGE = pool(num_blocks=8, max_model_tokens=1000)  # 128 positions


def test_an_output_that_fits_the_largest_pool_is_granted_to_its_last_token() -> None:
    assert output_budget(28, 100, [SMALL, LARGE]) == 100


def test_one_token_more_than_the_largest_pool_holds_can_never_fit() -> None:
    """S22."""
    with pytest.raises(
        InvalidRequest, match=r"prompt \+ max_tokens: 28 \+ 101 = 129 tokens, the largest pool holds 128"
    ):
        output_budget(28, 101, [SMALL, LARGE])


def test_a_prompt_must_leave_the_model_one_token_of_output() -> None:
    model = pool(max_model_tokens=50)
    assert output_budget(49, None, [model]) == 1
    with pytest.raises(InvalidRequest, match="prompt: 50 tokens, the model takes 50"):
        output_budget(50, None, [model])


def test_what_a_pool_could_hold_and_the_model_cannot_is_not_blamed_on_the_pool() -> None:
    with pytest.raises(InvalidRequest, match=r"49 \+ 2 = 51 tokens, the model takes 50$"):
        output_budget(49, 2, [pool(max_model_tokens=50)])


def test_without_max_tokens_the_output_is_the_default_or_what_is_left() -> None:
    assert output_budget(1, None, [pool()]) == DEFAULT_MAX_TOKENS
    assert output_budget(100, None, [LARGE]) == 28


def test_without_max_tokens_an_output_may_be_as_long_as_it_must_be() -> None:
    assert output_budget(1, None, [pool()], min_tokens=DEFAULT_MAX_TOKENS + 1) == DEFAULT_MAX_TOKENS + 1
    assert output_budget(100, None, [LARGE], min_tokens=28) == 28
    with pytest.raises(InvalidRequest, match=r"prompt \+ min_tokens: 100 \+ 29 = 129 tokens, the largest pool holds"):
        output_budget(100, None, [LARGE], min_tokens=29)


def wish(*, flow: str = "", line: str = "words", tokens: int = 10, expires: float = 100.0, **fields: Any) -> Wish:
    return Wish(line=line, flow=flow, tokens=tokens, expires=expires, **fields)


def served(door: Admission, has_room: Callable[[Ticket], bool] = lambda _: True) -> list[Ticket]:
    """Who runs, one after the other, until nobody waits or can."""
    order = [*door.turn(0.0, has_room).admitted]
    at = 0
    while at < len(order):
        door.leave(order[at], 0.0)
        order += door.turn(0.0, has_room).admitted
        at += 1
        door.check()
    return order


def test_who_came_first_runs_first() -> None:
    door = Admission(max_running=1, max_waiting=5)
    for ticket in range(3):
        door.enter(Ticket(ticket), wish(), 0.0)
    assert served(door) == [0, 1, 2]


def test_a_higher_priority_runs_sooner_within_its_tenant_and_takes_nothing_from_another() -> None:
    door = Admission(max_running=1, max_waiting=9)
    for ticket, (flow, priority) in enumerate([("a", 0), ("a", 5), ("b", 0), ("b", -1)]):
        door.enter(Ticket(ticket), wish(flow=flow, priority=priority, tokens=QUANTUM_TOKENS), 0.0)
    assert served(door) == [1, 2, 0, 3]


def test_tenants_get_tokens_by_their_weights_whatever_the_size_of_their_requests() -> None:
    door = Admission(max_running=1, max_waiting=1000)
    sizes = {"small": QUANTUM_TOKENS // 8, "large": 2 * QUANTUM_TOKENS, "heavy": QUANTUM_TOKENS}
    tickets = {Ticket(at): flow for at, flow in enumerate(sizes) for at in range(at, 300, 3)}
    for ticket, flow in tickets.items():
        door.enter(ticket, wish(flow=flow, tokens=sizes[flow], weight=3.0 if flow == "heavy" else 1.0), 0.0)

    shares = dict.fromkeys(sizes, 0)
    for ticket in served(door)[:75]:
        shares[tickets[ticket]] += sizes[tickets[ticket]]
    assert shares["heavy"] == pytest.approx(3 * shares["large"], rel=0.2)
    assert shares["small"] == pytest.approx(shares["large"], rel=0.2)


def test_one_model_without_room_holds_up_no_other_and_nobody_of_its_own_overtakes() -> None:
    door = Admission(max_running=2, max_waiting=9)
    for ticket, line in enumerate(["full", "full", "words", "words"]):
        door.enter(Ticket(ticket), wish(line=line), 0.0)
    assert served(door, lambda ticket: ticket != 0) == [2, 3]
    assert (door.running, door.waiting) == (0, 2)
    assert served(door) == [0, 1]


def test_one_more_than_may_wait_is_refused_with_both_numbers_and_changes_nothing() -> None:
    door = Admission(max_running=1, max_waiting=1)
    for ticket in range(2):
        door.enter(Ticket(ticket), wish(), 0.0)
        door.turn(0.0)

    with pytest.raises(QueueFull, match="1 requests run and 1 wait, at most 1 and 1") as refused:
        door.enter(Ticket(2), wish(), 0.0)

    assert refused.value.retry_after_seconds is not None
    assert (door.running, door.waiting) == (1, 1)


def test_waiting_ends_at_its_time_and_frees_the_place_in_the_queue() -> None:
    door = Admission(max_running=1, max_waiting=1)
    door.enter(Ticket(0), wish(), 0.0)
    door.turn(0.0)
    door.enter(Ticket(1), wish(expires=5.0), 0.0)

    assert door.turn(4.9).expired == ()
    assert door.turn(5.0).expired == (1,)
    assert (door.running, door.waiting) == (1, 0)


def test_what_would_wait_beyond_its_deadline_is_refused_when_it_comes() -> None:
    """1,000 tokens went in 10 seconds; 500 more are before it, so its turn comes in 5."""
    door = Admission(max_running=1, max_waiting=20)
    for ticket in range(15):
        door.enter(Ticket(ticket), wish(tokens=100), 0.0)
    [running] = door.turn(0.0).admitted
    for second in range(1, 11):
        door.leave(running, float(second))
        [running] = door.turn(float(second)).admitted
    assert door.waiting == 4

    with pytest.raises(QueueFull, match=r"about 4\.0 s, and it may wait 3\.0 s") as refused:
        door.enter(Ticket(90), wish(tokens=100, expires=13.0), 10.0)
    assert refused.value.retry_after_seconds == pytest.approx(4.0)
    door.enter(Ticket(91), wish(tokens=100, expires=15.0), 10.0)
    door.check()


def test_the_time_in_which_nobody_could_run_says_nothing_of_how_fast_requests_go() -> None:
    """A minute without a worker, then 300 tokens in 3 seconds: 300 more take 3."""
    door = Admission(max_running=1, max_waiting=20)
    for ticket in range(7):
        door.enter(Ticket(ticket), wish(tokens=100), 0.0)
    for second in range(60):
        assert door.turn(float(second), lambda _: False).admitted == ()
    [running] = door.turn(60.0).admitted
    for second in (61.0, 62.0, 63.0):
        door.leave(running, second)
        [running] = door.turn(second).admitted

    with pytest.raises(QueueFull, match=r"about 3\.0 s, and it may wait 2\.0 s"):
        door.enter(Ticket(90), wish(tokens=100, expires=65.0), 63.0)


class Door(RuleBasedStateMachine):
    """One tenant, against two plain lists that are scanned for everything."""

    inside = Bundle("inside")

    def __init__(self) -> None:
        super().__init__()
        self.door = Admission(max_running=2, max_waiting=3)
        self.tickets = count()
        self.now = 0.0
        self.room = True
        self.running: list[Ticket] = []
        self.waiting: list[tuple[Ticket, float]] = []

    def turn(self) -> None:
        turn = self.door.turn(self.now, lambda _: self.room)
        expired = [ticket for ticket, expires in self.waiting if expires <= self.now]
        self.waiting = [entry for entry in self.waiting if entry[1] > self.now]
        admitted = [ticket for ticket, _ in self.waiting[: 2 - len(self.running)]] if self.room else []
        self.waiting = self.waiting[len(admitted) :]
        self.running += admitted
        assert (list(turn.admitted), list(turn.expired)) == (admitted, expired)

    @rule(target=inside, patience=st.integers(1, 5))
    def enter(self, patience: int) -> Ticket:
        ticket = Ticket(next(self.tickets))
        asked = wish(expires=self.now + patience)
        full = len(self.running) + len(self.waiting) == 2 + 3
        with suppress(QueueFull):
            self.door.enter(ticket, asked, self.now)
            self.waiting.append((ticket, asked.expires))
            assert not full
        self.turn()
        return ticket

    @rule(ticket=consumes(inside))
    def leave(self, ticket: Ticket) -> None:
        self.door.leave(ticket, self.now)
        self.running = [other for other in self.running if other != ticket]
        self.waiting = [entry for entry in self.waiting if entry[0] != ticket]
        self.turn()

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.turn()

    @rule()
    def room_comes_or_goes(self) -> None:
        self.room = not self.room
        self.turn()

    @invariant()
    def counts_and_invariants_hold(self) -> None:
        self.door.check()
        assert (self.door.running, self.door.waiting) == (len(self.running), len(self.waiting))


TestDoor = Door.TestCase
