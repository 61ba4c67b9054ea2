"""What a gateway is told by its environment."""

from pydantic import Field, SecretStr

from gateway.core.interval import MAX_INTERVAL
from octavo.models import DEFAULT, FORMS
from octavo.settings import (
    REDIS_FORMS,
    Address,
    Addresses,
    Folder,
    ModelsSettings,
    Names,
    RedisAddress,
    ServiceSettings,
)


class GatewaySettings(ServiceSettings, ModelsSettings):
    """Variables OCTAVO_*; see octavo.settings."""

    http_listen: Address | None = Field(
        default=None, description="host:port to serve OpenAI's HTTP API on; unset: nowhere; port 0: a free one"
    )
    cache_manager: Addresses = Field(
        default=("127.0.0.1:7100",),
        description="host:port of the cache manager; of several, separated by commas, all are watched",
    )
    redis_url: RedisAddress = Field(
        default="redis://127.0.0.1:6379/0",
        description=f"where the prefix index lies; it may be away at any time. {REDIS_FORMS}",
    )
    lookup_seconds: float = Field(
        default=0.005,
        gt=0,
        le=1,
        description="seconds a look-up in the prefix index may take before it counts as no hits",
    )
    model: Names = Field(
        default=(DEFAULT,),
        description=f"{FORMS}: whose tokenizer to use; of several, separated by commas, each is served by the workers "
        "that have it",
    )
    tenants_file: Folder | None = Field(
        default=None, description="who may ask, by their API keys (octavo.tenants); unset: anybody"
    )
    public_prefixes_file: Folder | None = Field(
        default=None,
        description="beginnings of prompts that tenants share although their blocks are kept apart "
        "(gateway.public_prefixes); unset: none",
    )
    salt_secret: SecretStr = Field(
        default=SecretStr(""),
        description="goes into every salt, so that nobody without it can tell a prompt by the hashes of its blocks; "
        "the same for all gateways",
    )
    remembered_tokens: int = Field(
        default=4 << 20,
        ge=0,
        description="tokens of earlier answers kept, 4 bytes each, so that the next turn of a conversation finds what "
        "was computed even where its text would be tokenised otherwise; 0: none",
    )
    stream_interval: int = Field(
        default=1,
        ge=1,
        le=MAX_INTERVAL,
        description="tokens of a stream that are told together, but for its first and its last, where the request does "
        "not say: of more than 1, a gateway relays several times as many a second",
    )
    max_running_requests: int = Field(default=256, ge=1, description="requests at the workers at once")
    max_waiting_requests: int = Field(default=1024, ge=0, description="further requests that wait for a place")
    max_wait_seconds: float = Field(
        default=30.0, gt=0, description="seconds a request may wait for a place, or for the first worker of its model"
    )
    max_request_seconds: float = Field(
        default=3600.0, gt=0, description="seconds a request may take when its client names no deadline"
    )
    max_attempts: int = Field(
        default=5, ge=1, description="workers that may be lost under a request in a row, without a token in between"
    )
    max_standstill_seconds: float = Field(
        default=30.0, gt=0, description="seconds a request that was let in waits for a worker while there is none"
    )
    max_samples: int = Field(default=64, ge=1, description="outputs of one request (n)")
    max_prompt_bytes: int = Field(
        default=4 << 20,
        ge=1,
        description="bytes of a prompt, not yet tokenised; a whole message may have 4 times as many",
    )
    max_batch_requests: int = Field(
        default=256, ge=1, description="requests in one call of GenerateBatch, prompts of one completion over HTTP"
    )
    max_stop_strings: int = Field(default=16, ge=0, description="stop strings of one request")
    max_stop_bytes: int = Field(default=1024, ge=1, description="bytes of one stop string")
