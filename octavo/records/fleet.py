"""Workers, their pools and their loads, as managers and gateways speak of them."""

from dataclasses import dataclass
from typing import NamedTuple

from octavo.hashing import NO_SEAM, ChainRoot
from octavo.ids import NEVER_RESET, UNKNOWN_INCARNATION, CacheEpoch, Epoch, Incarnation, WorkerId
from octavo.records.scope import PLAIN, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a worker's pool is made of."""

    model: str
    """The name clients ask for."""
    model_digest: bytes
    tokenizer_digest: bytes
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_tokens: int
    """Longest sequence that the model takes."""
    vocab_size: int
    adapter_digest: bytes = b""
    """Of the LoRA adapter in its weights, 32 bytes; empty: there is none. Its name is no part of this: another one may
    come under the same name."""
    block_bytes: int = 0
    """Memory of one block; 0 where it does not matter. What is owed to a tenant in bytes is counted with it."""

    @property
    def weights(self) -> tuple[bytes, bytes]:
        """What draws the tokens: none but the same can finish a text that these began."""
        return self.model_digest, self.adapter_digest

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that both the model and the pool can hold."""
        return min(self.max_model_tokens, self.num_blocks * self.block_size)

    def chain_root(self, scope: Scope = PLAIN, cache_epoch: CacheEpoch = NEVER_RESET) -> ChainRoot:
        """The root of the hash chains of this pool's sequences of that scope."""
        return ChainRoot(
            model_digest=self.model_digest,
            tokenizer_digest=self.tokenizer_digest,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            adapter_digest=self.adapter_digest,
            media=tuple((media.position, media.digest) for media in scope.media),
            salt=scope.salt if scope.seam(self.block_size) is NO_SEAM else b"",
            cache_epoch=cache_epoch,
        )


class WorkerLoad(NamedTuple):
    """What a worker has in hand; the totals count from its start."""

    running_sequences: int = 0
    waiting_sequences: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    held_blocks: int = 0
    cached_blocks: int = 0
    """Published blocks without an owner: evictable."""
    prompt_tokens: int = 0
    """Each prompt counted once."""
    cached_tokens: int = 0
    """Of the prompt tokens, those taken from published blocks."""
    output_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One worker of the fleet, as its manager knows it."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    """host:port of its Serve."""
    pool: PoolSpec
    load: WorkerLoad
    draining: bool = False
    incarnation: Incarnation = UNKNOWN_INCARNATION
    """The process: another epoch with the same one is the same process, which still has what it had."""
    cache_epoch: CacheEpoch = NEVER_RESET

    def chain_root(self, scope: Scope) -> ChainRoot:
        """The root of the hash chains under which it publishes sequences of that scope."""
        return self.pool.chain_root(scope, self.cache_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUpdate:
    """What changed in the fleet; a snapshot names every worker there is."""

    workers: tuple[WorkerInfo, ...] = ()
    gone: tuple[WorkerId, ...] = ()
    snapshot: bool = False
