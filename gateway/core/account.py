"""On whose account a request runs, and what keeps its blocks apart from other people's.

This is the only place where a salt is made. It is a hash of the operator's secret, the tenant and the client's own
`cache_salt`, each behind its length: what a client sends is mixed with what the gateway knows of it and never stands in
its place, so nobody reaches another tenant's blocks whatever they send. Neither name nor salt leaves the gateway in
clear: workers and cache managers get the hash, Redis gets hashes over it.
"""

from dataclasses import dataclass, field

from gateway.core.quotas import UNBOUNDED, Quota
from octavo.hashing import digest_of
from octavo.ids import NOBODY, TenantTag
from octavo.tenants import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A tenant, as far as its requests need it."""

    tag: TenantTag
    realm: bytes = field(repr=False)
    """Of the secret and the tenant, 32 bytes; none where everybody shares."""
    weight: float = 1.0
    """Its share of the fleet beside other tenants', when not all can be served at once."""
    quota: Quota = UNBOUNDED

    def salt(self, cache_salt: str) -> bytes:
        """What keeps apart the blocks of a request with this `cache_salt`: 32 bytes, or none where all may share."""
        if not (self.realm or cache_salt):
            return b""
        return digest_of(b"octavo salt", self.realm, cache_salt.encode())


def account_of(tenant: Tenant | None, secret: str) -> Account:
    """The account of a tenant; None is everybody, where there is no tenants file."""
    if tenant is None:
        return Account(tag=NOBODY, realm=digest_of(b"octavo realm", secret.encode()) if secret else b"")
    return Account(
        tag=tenant.tag,
        realm=digest_of(b"octavo realm", secret.encode(), tenant.name.encode()),
        weight=tenant.weight,
        quota=Quota(requests_per_minute=tenant.requests_per_minute, tokens_per_minute=tenant.tokens_per_minute),
    )


OPEN = account_of(None, "")
"""Where there are neither tenants nor a secret."""
