"""What a cache manager is told by its environment."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from octavo.pool_part import parse_pool_part
from octavo.settings import REDIS_FORMS, Folder, RedisAddress, ServiceSettings


def _checked_part(text: str) -> str:
    parse_pool_part(text)
    return text


PoolPartText = Annotated[str, AfterValidator(_checked_part)]
"""A part of a pool, as octavo.pool_part reads it."""


class CacheManagerSettings(ServiceSettings):
    """Variables OCTAVO_*; see octavo.settings."""

    redis_url: RedisAddress = Field(
        default="redis://127.0.0.1:6379/0",
        description=f"where the fleet's copy of the prefix index lies; it may be away at any time. {REDIS_FORMS}",
    )
    lease_seconds: float = Field(
        default=5.0, gt=0, le=3600, description="seconds without an exchange after which a worker's pool is expired"
    )
    grace_seconds: float = Field(
        default=2.0, ge=0, description="after SIGTERM, seconds for workers that are leaving themselves"
    )
    min_copy_tokens: int = Field(
        default=DEFAULT_MIN_COPY_TOKENS,
        ge=0,
        description="fewest tokens of a prompt's next block for which a published block is copied; 0: none is",
    )
    eviction: Literal["segmented", "lru"] = Field(
        default="segmented",
        description="which blocks make room. lru: the least recently used; segmented: those that were found again stay "
        "longer, as far as that finds more",
    )
    tenants_file: Folder | None = Field(
        default=None, description="what is kept for each tenant (octavo.tenants), as for the gateways; unset: nothing"
    )
    retention_quota: PoolPartText = Field(
        default="25%",
        description="part of each pool, as 25% or 512MiB, that requests can have retained (retain_seconds): of each "
        "tenant that has no quota of its own, and of all who are no tenants together",
    )
    audit: bool = Field(
        default=False, description="recompute a worker's books after every exchange (slow); a violation is an error"
    )
