"""What a tenant may have in a minute, and when it may have more."""

import re

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.pace import LEAST_SECONDS, Pace
from gateway.core.quotas import UNBOUNDED, Quota, Quotas
from octavo.errors import InvalidRequest, QuotaExceeded


def test_a_minute_of_requests_passes_at_once_and_the_next_is_told_when_to_come() -> None:
    quotas, quota = Quotas(), Quota(requests_per_minute=6)
    for _ in range(6):
        quotas.charge("acme", quota, 1, 0.0)
    with pytest.raises(QuotaExceeded, match=r"6 requests a minute; 1 more in 10\.0 s") as refused:
        quotas.charge("acme", quota, 1, 0.0)
    assert refused.value.retry_after_seconds == pytest.approx(10.0)
    quotas.charge("acme", quota, 1, 10.0)


def test_what_a_request_did_not_take_is_given_back() -> None:
    quotas, quota = Quotas(), Quota(tokens_per_minute=100)
    quotas.charge("acme", quota, 100, 0.0)
    with pytest.raises(QuotaExceeded, match="100 tokens a minute; 60 more in"):
        quotas.charge("acme", quota, 60, 0.0)
    quotas.settle("acme", 100, used=30)
    quotas.charge("acme", quota, 70, 0.0)


def test_a_request_of_more_than_a_minute_holds_can_never_pass() -> None:
    with pytest.raises(InvalidRequest, match="101 tokens, the tenant's quota is 100 a minute"):
        Quotas().charge("acme", Quota(tokens_per_minute=100), 101, 0.0)
    with pytest.raises(InvalidRequest, match=re.escape("prompt + n x max_completion_tokens: 101")):
        Quotas().charge("acme", Quota(tokens_per_minute=100), 101, 0.0, "max_completion_tokens")


def test_a_refusal_charges_nothing_and_no_tenant_pays_for_another() -> None:
    quotas, quota = Quotas(), Quota(requests_per_minute=1, tokens_per_minute=100)
    quotas.charge("acme", Quota(requests_per_minute=1, tokens_per_minute=100), 10, 0.0)
    with pytest.raises(QuotaExceeded, match="requests"):
        quotas.charge("acme", quota, 90, 0.0)
    quotas.charge("other", quota, 100, 0.0)
    quotas.charge("acme", quota, 90, 60.0)


def test_without_a_quota_there_is_no_bound_and_a_changed_one_counts_at_once() -> None:
    quotas = Quotas()
    for _ in range(1000):
        quotas.charge("acme", UNBOUNDED, 1 << 40, 0.0)
    quotas.charge("acme", Quota(requests_per_minute=1), 1, 0.0)
    quotas.charge("acme", Quota(requests_per_minute=2), 1, 0.0)
    quotas.charge("acme", UNBOUNDED, 1, 0.0)
    for _ in range(2):  # one that comes back begins full as well
        quotas.charge("acme", Quota(requests_per_minute=2), 1, 0.0)


class Minute(RuleBasedStateMachine):
    """Over any time, no more than a minute's worth and what has flowed in since is ever taken."""

    def __init__(self) -> None:
        super().__init__()
        self.quotas = Quotas()
        self.quota = Quota(tokens_per_minute=120)
        self.now = 0.0
        self.taken = 0

    @rule(tokens=st.integers(1, 120), used=st.integers(0, 120))
    def charge_and_end(self, tokens: int, used: int) -> None:
        try:
            self.quotas.charge("acme", self.quota, tokens, self.now)
        except QuotaExceeded as refusal:
            self.now += (refusal.retry_after_seconds or 0) + 1e-6
            self.quotas.charge("acme", self.quota, tokens, self.now)
        self.quotas.settle("acme", tokens, min(tokens, used))
        self.taken += min(tokens, used)

    @rule(seconds=st.floats(0, 90))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def no_more_was_taken_than_there_was(self) -> None:
        self.quotas.check()
        assert self.taken <= 120 + 2 * self.now + 1e-3


TestMinute = Minute.TestCase


def test_the_pace_is_that_of_the_time_in_which_somebody_waits() -> None:
    pace = Pace()
    pace.ended(1_000_000, 50.0)
    assert pace.seconds_for(1) is None, "nobody waited"
    pace.busy(100.0)
    pace.ended(100, 100.0 + LEAST_SECONDS)
    assert pace.seconds_for(50) == pytest.approx(LEAST_SECONDS / 2)
    pace.idle()
    pace.ended(1_000_000, 200.0)
    assert pace.seconds_for(50) == pytest.approx(LEAST_SECONDS / 2)


def test_the_pace_follows_a_fleet_that_has_become_faster() -> None:
    pace = Pace()
    pace.busy(0.0)
    for second in range(1, 60):
        pace.ended(10, float(second))
    for second in range(60, 160):
        pace.ended(100, float(second))
    assert pace.seconds_for(100) == pytest.approx(1.0, rel=0.05)
