"""Whether a worker has room for a prompt, beside what is there and what was let in for there."""

from gateway.core.fleet import Fleet
from gateway.core.in_flight import PromptBlocks
from gateway.core.room import Rooms
from octavo.records.fleet import WorkerInfo
from octavo.records.scope import Scope
from tests.support.fleets import news, pool, snapshot, worker

BLOCK = 16
A = worker("a", spec=pool(num_blocks=8))
B = worker("b", spec=pool(num_blocks=6))


def fleet_of(*workers: WorkerInfo) -> tuple[Fleet, Rooms]:
    fleet = Fleet()
    fleet.apply(snapshot(*workers), now=0.0, manager="m")
    return fleet, Rooms(fleet)


def prompt(tokens: int, *, first: int = 0) -> PromptBlocks:
    """`first`, `first` + 1, ..."""
    return PromptBlocks(range(first, first + tokens), Scope())


def test_who_was_let_in_takes_the_room_until_it_is_given_back() -> None:
    _, rooms = fleet_of(A)
    first, second = prompt(5 * BLOCK), prompt(5 * BLOCK, first=1000)
    assert rooms.take(first, [A])
    assert not rooms.take(second, [A])
    rooms.give_back(first)
    rooms.give_back(first)
    assert rooms.take(second, [A])
    assert rooms.taken == 1


def test_room_is_taken_to_the_last_position_and_no_further() -> None:
    _, rooms = fleet_of(A)
    assert rooms.take(prompt(5 * BLOCK), [A])
    assert not rooms.take(prompt(3 * BLOCK + 1, first=1000), [A])
    assert rooms.take(prompt(3 * BLOCK, first=2000), [A])
    assert not rooms.take(prompt(1, first=3000), [A])


def test_room_is_taken_where_there_is_most_of_it_so_each_worker_gets_its_share() -> None:
    _, rooms = fleet_of(A, B)
    taken = [rooms.take(prompt(4 * BLOCK, first=at), [A, B]) for at in (0, 1000, 2000, 3000)]
    assert taken == [True, True, True, False], "two at a, one at b"


def test_what_those_who_were_let_in_have_in_common_is_taken_once() -> None:
    """S37: a burst behind one prefix is let in as far as what differs has room."""
    _, rooms = fleet_of(A)
    shared = tuple(range(5 * BLOCK))
    burst = [PromptBlocks((*shared, *range(at, at + BLOCK)), Scope()) for at in range(1000, 5000, 1000)]
    assert [rooms.take(each, [A]) for each in burst] == [True, True, True, False]


def test_what_was_let_in_for_another_worker_is_not_shared_here() -> None:
    _, rooms = fleet_of(A, B)
    assert rooms.take(prompt(3 * BLOCK, first=1000), [A, B]), "at a, which has five blocks left"
    assert rooms.take(prompt(6 * BLOCK), [A, B]), "at b, which has none left"
    assert not rooms.take(prompt(6 * BLOCK), [A, B])


def test_a_tenant_shares_nothing_with_another() -> None:
    _, rooms = fleet_of(A)
    assert rooms.take(PromptBlocks(range(5 * BLOCK), Scope(salt=b"x" * 32)), [A])
    assert not rooms.take(PromptBlocks(range(5 * BLOCK), Scope(salt=b"y" * 32)), [A])
    assert rooms.take(PromptBlocks(range(5 * BLOCK), Scope(salt=b"x" * 32)), [A])


def test_what_was_sent_counts_until_it_is_computed_and_reported() -> None:
    """At no moment between its sending and the second report does it count as nothing."""
    fleet, rooms = fleet_of(A)
    other = prompt(5 * BLOCK, first=1000)
    reservation = fleet.reserve(A, prompt_tokens=5 * BLOCK, cached_tokens=0, output_tokens=1)
    assert not rooms.take(other, [A])
    fleet.prefilled(reservation)
    assert not rooms.take(other, [A])
    for _ in range(2):
        held = worker("a", spec=A.pool, held_blocks=5)
        fleet.apply(news(held), now=1.0, manager="m")
        assert not rooms.take(other, [held])
    fleet.release(reservation)
    free = worker("a", spec=A.pool)
    fleet.apply(news(free), now=2.0, manager="m")
    assert rooms.take(other, [free])


def test_room_at_a_worker_that_died_is_not_taken_from_the_next_process() -> None:
    fleet, rooms = fleet_of(A)
    assert rooms.take(prompt(8 * BLOCK), [A])
    again = worker("a", epoch=2, incarnation=2, spec=A.pool)
    fleet.apply(news(again), now=1.0, manager="m")
    assert rooms.take(prompt(8 * BLOCK, first=1000), [again])


def test_nobody_has_room_where_nobody_is() -> None:
    _, rooms = fleet_of()
    assert not rooms.take(prompt(1), [])
    assert not rooms.take(prompt(1), [A]), "gone meanwhile"
