"""What a cache manager is told by its environment."""

from pydantic import Field

from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from octavo.settings import REDIS_FORMS, RedisAddress, ServiceSettings


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
        default=2.0, ge=0, description="after SIGTERM, seconds that workers may take to leave by themselves"
    )
    min_copy_tokens: int = Field(
        default=DEFAULT_MIN_COPY_TOKENS,
        ge=0,
        description="fewest tokens of a prompt's next block for which a published block is copied; 0: none is",
    )
    audit: bool = Field(
        default=False, description="recompute a worker's books after every exchange (slow); a violation is an error"
    )
