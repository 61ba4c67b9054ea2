"""The breaker: when nobody asks any more, and who may ask again."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.breaker import Breaker, BreakerPolicy, BreakerState

POLICY = BreakerPolicy(failures=3, first_pause=1.0, longest_pause=8.0, steady=100.0)


def opened(now: float) -> Breaker:
    breaker = Breaker(POLICY)
    for _ in range(POLICY.failures):
        breaker.failed(now, now)
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(POLICY)
    breaker.failed(1.0, 1.0)
    breaker.failed(2.0, 2.0)
    assert breaker.closed
    breaker.failed(3.0, 3.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.probe_at == 4.0


def test_a_success_between_makes_failures_no_row() -> None:
    breaker = Breaker(POLICY)
    for now in range(10):
        breaker.failed(now, now)
        breaker.failed(now, now)
        breaker.succeeded()
    assert breaker.closed


def test_requests_that_hang_in_the_same_stall_are_one_failure() -> None:
    breaker = Breaker(POLICY)
    for asked in (1.0, 1.1, 1.2, 1.3):
        breaker.failed(asked, 2.0)
    assert breaker.closed
    breaker.failed(2.5, 3.0)
    breaker.failed(2.9, 3.1)  # began before the second failure
    assert breaker.closed
    breaker.failed(3.1, 4.0)
    assert not breaker.closed


def test_requests_that_end_late_change_nothing() -> None:
    """They were allowed to ask before it opened."""
    breaker = opened(5.0)
    breaker.succeeded()
    breaker.failed(5.9, 5.9)
    assert breaker.probe_at == 6.0


def test_a_probe_is_made_once_when_the_pause_is_over() -> None:
    breaker = opened(5.0)
    assert not breaker.probe(5.99)
    assert breaker.probe(6.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.closed
    assert not breaker.probe(7.0)


def test_a_probe_that_was_answered_closes_it() -> None:
    breaker = opened(5.0)
    assert breaker.probe(6.0)
    breaker.probed(True, 6.1)
    assert breaker.closed
    breaker.failed(6.2, 6.2)
    assert breaker.closed  # the row begins anew


def test_pauses_double_up_to_the_longest() -> None:
    breaker, now, pauses = opened(0.0), 0.0, list[float]()
    for _ in range(6):
        assert breaker.probe_at is not None
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        assert breaker.probe(now)
        breaker.probed(False, now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def reopened(after: float) -> Breaker:
    """Opened, closed by its first probe at 1.0, and opened again `after` that."""
    breaker = opened(0.0)
    assert breaker.probe(1.0)
    breaker.probed(True, 1.0)
    for _ in range(POLICY.failures):
        breaker.failed(1.0 + after, 1.0 + after)
    return breaker


def test_one_that_opens_again_soon_waits_longer() -> None:
    assert reopened(after=99.0).probe_at == 1.0 + 99.0 + 2.0


def test_one_that_was_steady_begins_with_the_first_pause() -> None:
    assert reopened(after=100.0).probe_at == 1.0 + 100.0 + 1.0


@given(st.lists(st.tuples(st.sampled_from(["succeeded", "failed", "good probe", "bad probe"]), st.floats(0, 20))))
def test_only_a_good_probe_closes_it_and_no_pause_is_too_long(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(POLICY), 0.0
    for event, passed in events:
        now += passed
        closed, probed = breaker.closed, False
        match event:
            case "succeeded":
                breaker.succeeded()
            case "failed":
                breaker.failed(now, now)
            case _ if breaker.probe(now):
                probed = event == "good probe"
                breaker.probed(probed, now)
            case _:
                pass
        assert not breaker.closed or closed or probed
        assert breaker.state is not BreakerState.HALF_OPEN
        if breaker.probe_at is not None:
            assert breaker.probe_at - now <= POLICY.longest_pause
