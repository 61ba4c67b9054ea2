"""What every tenant is owed in a pool: the operator's words -> blocks, once the pool is known."""

from collections.abc import Iterable
from dataclasses import dataclass

from cache_manager.core import eviction
from cache_manager.core.accounts import Allowance, Allowances
from cache_manager.core.eviction import EvictionPolicy
from octavo.pool_part import NOTHING, PoolPart
from octavo.records.fleet import PoolSpec
from octavo.tenants import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSettings:
    """For every pool of the fleet."""

    ratios: tuple[int, ...]
    """See EvictionPolicy."""
    tenants: tuple[Tenant, ...] = ()
    retention_quota: PoolPart = NOTHING
    """Of each tenant that has none of its own, and of all who are no tenants together."""

    def policy(self, pool: PoolSpec) -> EvictionPolicy:
        """The same in blocks of one pool."""
        return EvictionPolicy(ratios=self.ratios, allowances=self._allowances(pool))

    def _allowances(self, pool: PoolSpec) -> Allowances:
        return Allowances(
            named={tenant.tag: self._allowance(tenant, pool) for tenant in self.tenants},
            others=Allowance(retained_blocks=_blocks(self.retention_quota, pool)),
        )

    def _allowance(self, tenant: Tenant, pool: PoolSpec) -> Allowance:
        quota = self.retention_quota if tenant.retention_quota is None else tenant.retention_quota
        return Allowance(floor_blocks=_blocks(tenant.cache_floor, pool), retained_blocks=_blocks(quota, pool))


PLAIN_LRU = EvictionSettings(ratios=eviction.PLAIN_LRU.ratios)
SEGMENTED = EvictionSettings(ratios=eviction.SEGMENTED.ratios)


def require_floors_fit(tenants: Iterable[Tenant]) -> None:
    """Raises ValueError where more is owed than any pool has."""
    owed = sum(tenant.cache_floor.percent for tenant in tenants)
    if owed > 100:
        raise ValueError(f"cache_floor: {owed}% of a pool are owed to all tenants together, wanted at most 100%")


def _blocks(part: PoolPart, pool: PoolSpec) -> int:
    return part.blocks(pool.num_blocks, pool.block_bytes)
