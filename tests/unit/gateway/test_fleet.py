"""What a gateway knows of its workers, and what it has sent there itself."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.core.fleet import GRACE_SECONDS, Fleet, ReservationId, Standing
from octavo.ids import WorkerId
from tests.support.fleets import news, snapshot, worker


def standing(fleet: Fleet, name: str) -> Standing:
    [only] = fleet.standings([WorkerId(name)])
    return only


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    fleet.apply(snapshot(*map(worker, names)), now=0.0, manager="m")
    return fleet


def reserve(fleet: Fleet, name: str, prompt: int = 164, cached: int = 64, output: int = 50) -> ReservationId:
    """100 tokens to compute, 150 new positions."""
    return fleet.reserve(worker(name), prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


def test_a_snapshot_replaces_the_fleet_and_news_amend_it() -> None:
    fleet = fleet_of("a", "b")
    fleet.apply(snapshot(worker("b"), worker("c")), now=-GRACE_SECONDS, manager="m")
    fleet.forget_missing(now=0.0)
    fleet.apply(snapshot(worker("b"), worker("c")), now=1.0, manager="m")
    fleet.apply(news(worker("d"), gone=("b", "never-there")), now=2.0, manager="m")

    assert {info.worker_id for info in fleet.workers} == {"c", "d"}


def test_a_worker_that_nobody_knows_has_no_standing() -> None:
    """S40."""
    assert fleet_of("a").standings([WorkerId("a"), WorkerId("ghost")]) == (standing(fleet_of("a"), "a"),)


def test_what_was_just_sent_counts_before_the_worker_reports_it() -> None:
    fleet = fleet_of("a", "b")
    reserve(fleet, "a")

    assert (standing(fleet, "a").queued_tokens, standing(fleet, "a").held_tokens) == (100, 150)
    assert (standing(fleet, "b").queued_tokens, standing(fleet, "b").held_tokens) == (0, 0)


def test_the_second_report_contains_a_reservation_so_it_is_not_counted_twice() -> None:
    fleet = fleet_of("a")
    reserve(fleet, "a")
    report = news(worker("a", queued_prefill_tokens=100, held_blocks=10))
    fleet.apply(report, now=1.0, manager="m")
    fleet.apply(report, now=2.0, manager="m")

    assert (standing(fleet, "a").queued_tokens, standing(fleet, "a").held_tokens) == (100, 160)


def test_a_computed_prompt_is_no_longer_queued_and_its_positions_stay_held() -> None:
    fleet = fleet_of("a")
    fleet.prefilled(reserve(fleet, "a"))

    assert (standing(fleet, "a").queued_tokens, standing(fleet, "a").held_tokens) == (0, 150)


def test_what_ended_is_cached_until_the_next_report_says_how_much() -> None:
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.prefilled(reservation)
    fleet.release(reservation)

    assert (standing(fleet, "a").held_tokens, standing(fleet, "a").cached_tokens) == (0, 150)
    fleet.apply(news(worker("a", cached_blocks=9)), now=1.0, manager="m")
    assert standing(fleet, "a").cached_tokens == 144


def test_what_a_report_calls_queued_is_not_when_its_prompt_was_computed_since() -> None:
    """Or the next request behind the same prefix would flee from a queue that is gone."""
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.apply(news(worker("a", queued_prefill_tokens=164, held_blocks=20)), now=1.0, manager="m")
    fleet.prefilled(reservation)
    assert standing(fleet, "a").queued_tokens == 0

    fleet.release(reservation)
    assert (standing(fleet, "a").held_tokens, standing(fleet, "a").cached_tokens) == (320 - 150, 150)


def test_of_what_a_report_calls_queued_own_prompts_count_without_their_hits() -> None:
    """S39: a worker calls all of a prompt queued until it comes to it. Beside it are 1,000 tokens of others."""
    fleet = fleet_of("a")
    reserve(fleet, "a")
    for _ in range(3):
        fleet.apply(news(worker("a", queued_prefill_tokens=164 + 1000)), now=1.0, manager="m")
        assert standing(fleet, "a").queued_tokens == 100 + 1000


def test_a_prompt_that_is_being_computed_counts_as_far_as_it_is_still_queued() -> None:
    fleet = fleet_of("a")
    reserve(fleet, "a")
    for left in (164, 90, 30):
        fleet.apply(news(worker("a", queued_prefill_tokens=left)), now=1.0, manager="m")

    assert standing(fleet, "a").queued_tokens == 30


def test_what_others_have_queued_stays_when_an_own_prompt_was_computed() -> None:
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.apply(news(worker("a", queued_prefill_tokens=164 + 1000)), now=1.0, manager="m")
    fleet.prefilled(reservation)

    assert standing(fleet, "a").queued_tokens == 1000


def test_a_request_that_is_cancelled_before_its_prompt_was_computed_is_queued_no_longer() -> None:
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.apply(news(worker("a", queued_prefill_tokens=164)), now=1.0, manager="m")
    fleet.release(reservation)

    assert standing(fleet, "a").queued_tokens == 0


def test_every_gateway_sees_the_fleets_load_in_tokens() -> None:
    """S39: three prompts of 100,000 tokens that one of four gateways sent, of which a tenth is cached."""
    fleets = [fleet_of("a") for _ in range(4)]
    for _ in range(3):
        reserve(fleets[0], "a", prompt=100_000, cached=10_000, output=50)
    assert [standing(fleet, "a").queued_tokens for fleet in fleets] == [270_000, 0, 0, 0]

    report = news(worker("a", queued_prefill_tokens=300_000, waiting_sequences=3, held_blocks=0))
    for fleet in fleets:
        for now in (1.0, 2.0):
            fleet.apply(report, now=now, manager="m")

    assert [standing(fleet, "a").queued_tokens for fleet in fleets] == [270_000, 300_000, 300_000, 300_000]
    assert [standing(fleet, "a").queued_prompts for fleet in fleets] == [3, 3, 3, 3]


def test_a_worker_that_registers_anew_still_has_what_was_sent_there() -> None:
    """Be it with another manager."""
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.apply(snapshot(worker("a", epoch=2)), now=1.0, manager="other")

    assert standing(fleet, "a").queued_tokens == 100
    fleet.release(reservation)
    assert (fleet.reservations, standing(fleet, "a").cached_tokens) == (0, 150)


def test_the_larger_epoch_counts_whoever_says_it() -> None:
    """A worker went from one manager to another, and the first one hears of it, and tells, later."""
    fleet = fleet_of("a")
    fleet.apply(snapshot(worker("a", epoch=2, held_blocks=7)), now=1.0, manager="other")
    fleet.apply(news(worker("a", epoch=1)), now=2.0, manager="m")
    assert standing(fleet, "a").info.epoch == 2
    fleet.apply(news(gone=("a",)), now=3.0, manager="m")
    assert standing(fleet, "a").held_tokens == 7 * 16
    fleet.apply(news(gone=("a",)), now=4.0, manager="other")
    assert fleet.workers == ()


def test_hits_count_for_the_books_that_were_asked_about_only() -> None:
    """S41: each worker had 64 tokens when the index was asked; by the time it answers, one is as it was."""
    asked = [worker(name) for name in ("same", "busier", "registered", "replaced", "reset", "gone")]
    fleet = Fleet()
    fleet.apply(snapshot(*asked), now=0.0, manager="m")
    later = (
        worker("busier", held_blocks=7),
        worker("registered", epoch=2),
        worker("reset", cache_epoch=1),
    )
    fleet.apply(news(*later, gone=("gone", "replaced")), now=1.0, manager="m")
    fleet.apply(news(worker("replaced", incarnation=2)), now=2.0, manager="other")

    found = {info.worker_id: 64 for info in asked}
    assert fleet.credited(asked, found) == {"same": 64, "busier": 64}
    assert fleet.credited(asked[:1], {}) == {}


def test_a_manager_that_has_started_anew_gives_its_workers_time_to_come_back() -> None:
    fleet = fleet_of("a", "b", "c")
    fleet.apply(snapshot(worker("d")), now=0.0, manager="other")
    reserve(fleet, "a")
    fleet.manager_away("m")
    fleet.forget_missing(now=100.0)
    fleet.apply(snapshot(worker("b", epoch=2)), now=100.0, manager="m")
    fleet.forget_missing(now=100.0 + GRACE_SECONDS - 0.1)
    assert {info.worker_id for info in fleet.workers} == {"a", "b", "c", "d"}
    fleet.apply(news(worker("a", epoch=3)), now=101.0, manager="m")
    fleet.forget_missing(now=100.0 + GRACE_SECONDS)
    assert {info.worker_id for info in fleet.workers} == {"a", "b", "d"}
    assert standing(fleet, "a").queued_tokens == 100


def test_a_lost_stream_ends_a_worker_only_if_no_manager_vouches_for_it() -> None:
    fleet = fleet_of("a", "b")
    fleet.stream_lost(worker("a"))
    fleet.manager_away("m")
    fleet.stream_lost(worker("b", incarnation=9))
    assert {info.worker_id for info in fleet.workers} == {"a", "b"}
    fleet.stream_lost(worker("a"))
    assert {info.worker_id for info in fleet.workers} == {"b"}


def test_a_new_process_starts_without_the_reservations_of_the_old_one() -> None:
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.apply(news(worker("a", epoch=2, incarnation=2)), now=1.0, manager="m")

    assert standing(fleet, "a").queued_tokens == 0
    fleet.prefilled(reservation)
    fleet.release(reservation)
    assert (fleet.reservations, standing(fleet, "a").cached_tokens) == (0, 0)


def test_releasing_twice_releases_once() -> None:
    fleet = fleet_of("a")
    reservation = reserve(fleet, "a")
    fleet.prefilled(reservation)
    fleet.release(reservation)
    fleet.release(reservation)

    assert (fleet.reservations, standing(fleet, "a").cached_tokens) == (0, 150)


MANAGERS = st.sampled_from(["m", "other"])


class Bookings(RuleBasedStateMachine):
    """Workers come, leave and register anew while requests are sent, computed and ended in any order. S38."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.open: set[ReservationId] = set()

    @rule(
        names=st.sets(st.sampled_from("abc")),
        epoch=st.integers(1, 3),
        process=st.integers(1, 2),
        whole=st.booleans(),
        manager=MANAGERS,
    )
    def hear(self, names: set[str], epoch: int, process: int, whole: bool, manager: str) -> None:
        workers = [worker(name, epoch=epoch, incarnation=process) for name in sorted(names)]
        self.fleet.apply(snapshot(*workers) if whole else news(*workers), now=0.0, manager=manager)

    @rule(name=st.sampled_from("abc"), manager=MANAGERS)
    def leave(self, name: str, manager: str) -> None:
        self.fleet.apply(news(gone=(name,)), now=0.0, manager=manager)

    @rule(manager=MANAGERS, late=st.booleans())
    def lose_a_manager(self, manager: str, late: bool) -> None:
        self.fleet.manager_away(manager)
        self.fleet.forget_missing(now=GRACE_SECONDS if late else 0.0)

    @rule(name=st.sampled_from("abc"), process=st.integers(1, 2))
    def lose_a_stream(self, name: str, process: int) -> None:
        self.fleet.stream_lost(worker(name, incarnation=process))

    @rule(target=sent, name=st.sampled_from("abc"), process=st.integers(1, 2), prefill=st.integers(0, 50))
    def send(self, name: str, process: int, prefill: int) -> ReservationId:
        info = worker(name, incarnation=process)
        reservation = self.fleet.reserve(info, prompt_tokens=prefill + 5, cached_tokens=5, output_tokens=10)
        self.open.add(reservation)
        return reservation

    @rule(reservation=sent)
    def compute(self, reservation: ReservationId) -> None:
        self.fleet.prefilled(reservation)

    @rule(reservation=consumes(sent))
    def end(self, reservation: ReservationId) -> None:
        self.fleet.release(reservation)
        self.open.discard(reservation)

    @invariant()
    def nothing_is_counted_that_has_ended(self) -> None:
        self.fleet.check()
        assert self.fleet.reservations == len(self.open)

    def teardown(self) -> None:
        for reservation in self.open:
            self.fleet.release(reservation)
        at_rest: list[Any] = [
            (one.queued_tokens, one.held_tokens) for one in self.fleet.standings(map(WorkerId, "abc"))
        ]
        assert all(load == (0, 0) for load in at_rest), at_rest


TestBookings = Bookings.TestCase
