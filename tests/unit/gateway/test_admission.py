"""Who runs, who waits, who is refused."""

from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.core.admission import DEFAULT_MAX_TOKENS, Admission, Ticket, output_budget
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


def test_who_came_first_runs_first() -> None:
    door = Admission(max_running=1, max_waiting=5)
    for ticket in range(3):
        door.enter(Ticket(ticket), expires=100.0)
    order = [*door.turn(0.0).admitted]
    while door.running:
        door.leave(order[-1])
        order += door.turn(0.0).admitted

    assert order == [0, 1, 2]


def test_one_more_than_may_wait_is_refused_with_both_numbers_and_changes_nothing() -> None:
    door = Admission(max_running=1, max_waiting=1)
    for ticket in range(2):
        door.enter(Ticket(ticket), expires=100.0)
        door.turn(0.0)

    with pytest.raises(QueueFull, match="1 requests run and 1 wait, at most 1 and 1"):
        door.enter(Ticket(2), expires=100.0)

    assert (door.running, door.waiting) == (1, 1)


def test_waiting_ends_at_its_time_and_frees_the_place_in_the_queue() -> None:
    door = Admission(max_running=1, max_waiting=1)
    door.enter(Ticket(0), expires=100.0)
    door.turn(0.0)
    door.enter(Ticket(1), expires=5.0)

    assert door.turn(4.9).expired == ()
    assert door.turn(5.0).expired == (1,)
    assert (door.running, door.waiting) == (1, 0)


class Door(RuleBasedStateMachine):
    """Against two plain lists that are scanned for everything."""

    inside = Bundle("inside")

    def __init__(self) -> None:
        super().__init__()
        self.door = Admission(max_running=2, max_waiting=3)
        self.tickets = count()
        self.now = 0.0
        self.running: list[Ticket] = []
        self.waiting: list[tuple[Ticket, float]] = []

    def turn(self) -> None:
        turn = self.door.turn(self.now)
        expired = [ticket for ticket, expires in self.waiting if expires <= self.now]
        self.waiting = [entry for entry in self.waiting if entry[1] > self.now]
        admitted = [ticket for ticket, _ in self.waiting[: 2 - len(self.running)]]
        self.waiting = self.waiting[len(admitted) :]
        self.running += admitted
        assert (list(turn.admitted), list(turn.expired)) == (admitted, expired)

    @rule(target=inside, patience=st.integers(1, 5))
    def enter(self, patience: int) -> Ticket:
        ticket = Ticket(next(self.tickets))
        if len(self.running) == 2 and len(self.waiting) == 3:
            with pytest.raises(QueueFull):
                self.door.enter(ticket, expires=self.now + patience)
        else:
            self.door.enter(ticket, expires=self.now + patience)
            self.waiting.append((ticket, self.now + patience))
        self.turn()
        return ticket

    @rule(ticket=consumes(inside))
    def leave(self, ticket: Ticket) -> None:
        self.door.leave(ticket)
        self.running = [other for other in self.running if other != ticket]
        self.waiting = [entry for entry in self.waiting if entry[0] != ticket]
        self.turn()

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.turn()

    @invariant()
    def counts_and_invariants_hold(self) -> None:
        self.door.check()
        assert (self.door.running, self.door.waiting) == (len(self.running), len(self.waiting))


TestDoor = Door.TestCase
