"""How much a tenant may have: token buckets for requests and for tokens. Pure: time is an argument.

A bucket holds at most a minute's worth and fills evenly. A request is charged when it comes, with all that it may take;
when it has ended, what it did not take is given back. What a bucket does not hold yet, the caller is told to wait for.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from octavo.errors import InvalidRequest, QuotaExceeded

_MINUTE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A tenant's, at each gateway; None is without bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompt and output together."""


UNBOUNDED = Quota()


class TokenBucket:
    """Begins full."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._holds = float(per_minute)
        self._counted = now

    def seconds_until(self, amount: int, now: float) -> float:
        """Until it holds so much, which is not more than a minute's worth; 0 if it does."""
        self._fill(now)
        return max(0.0, (amount - self._holds) / self.per_minute * _MINUTE_SECONDS)

    def take(self, amount: int) -> None:
        """Take out what it holds, as `seconds_until` has just found."""
        assert self._holds >= amount, (self._holds, amount)
        self._holds -= amount

    def give_back(self, amount: int) -> None:
        """Put back what was taken and not used."""
        self._holds = min(self.per_minute, self._holds + amount)

    def _fill(self, now: float) -> None:
        self._holds = min(self.per_minute, self._holds + (now - self._counted) * self.per_minute / _MINUTE_SECONDS)
        self._counted = now

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self._holds <= self.per_minute, (self._holds, self.per_minute)


class Quotas:
    """Every tenant's buckets. A quota that changes begins with full buckets."""

    def __init__(self) -> None:
        self._requests: dict[Hashable, TokenBucket] = {}
        self._tokens: dict[Hashable, TokenBucket] = {}

    def charge(self, tenant: Hashable, quota: Quota, tokens: int, now: float, output_field: str = "max_tokens") -> None:
        """Charge a request that may take so many tokens.

        Raises:
            InvalidRequest: it takes more than the tenant has in any minute; calls the outputs by their field.
            QuotaExceeded: not now; says when. Nothing is charged.
        """
        requests = _bucket(self._requests, tenant, quota.requests_per_minute, now)
        amounts = _bucket(self._tokens, tenant, quota.tokens_per_minute, now)
        if amounts is not None and tokens > amounts.per_minute:
            raise InvalidRequest(
                f"prompt + n x {output_field}: {tokens} tokens, the tenant's quota is {amounts.per_minute} a minute"
            )
        _require(requests, 1, "requests", now)
        _require(amounts, tokens, "tokens", now)
        if requests is not None:
            requests.take(1)
        if amounts is not None:
            amounts.take(tokens)

    def settle(self, tenant: Hashable, charged: int, used: int) -> None:
        """A request that was charged with so many tokens has ended."""
        if tenant in self._tokens and used < charged:
            self._tokens[tenant].give_back(charged - used)

    def check(self) -> None:
        """Assert the invariant of every bucket."""
        for bucket in (*self._requests.values(), *self._tokens.values()):
            bucket.check()


def _bucket(
    buckets: dict[Hashable, TokenBucket], tenant: Hashable, per_minute: int | None, now: float
) -> TokenBucket | None:
    """The tenant's bucket of that size; None where there is no bound."""
    if per_minute is None:
        buckets.pop(tenant, None)
        return None
    if tenant not in buckets or buckets[tenant].per_minute != per_minute:
        buckets[tenant] = TokenBucket(per_minute, now)
    return buckets[tenant]


def _require(bucket: TokenBucket | None, amount: int, what: str, now: float) -> None:
    seconds = 0.0 if bucket is None else bucket.seconds_until(amount, now)
    if bucket is not None and seconds > 0:
        raise QuotaExceeded(
            f"the tenant's quota is {bucket.per_minute} {what} a minute; {amount} more in {seconds:.1f} s",
            retry_after_seconds=seconds,
        )
