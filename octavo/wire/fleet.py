"""Workers, their pools and their loads, as managers and gateways speak of them."""

from collections.abc import Callable
from functools import partial

from octavo.errors import InvalidRequest
from octavo.hashing import HASH_BYTES
from octavo.ids import CacheEpoch, Epoch, Incarnation, WorkerId
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerInfo, WorkerLoad
from octavo.v1 import cache_manager_pb2 as cache_manager_v1
from octavo.v1 import types_pb2 as types_v1
from octavo.wire.flat import NEW_TUPLE, absent_or_whole

_NEW_LOAD: Callable[[tuple[int, ...]], WorkerLoad] = partial(NEW_TUPLE, WorkerLoad)


def pool_to_wire(pool: PoolSpec) -> types_v1.PoolSpec:
    return types_v1.PoolSpec(
        model=pool.model,
        model_digest=pool.model_digest,
        tokenizer_digest=pool.tokenizer_digest,
        dtype=pool.dtype,
        kv_dtype=pool.kv_dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        max_model_tokens=pool.max_model_tokens,
        vocab_size=pool.vocab_size,
        block_bytes=pool.block_bytes,
        adapter_digest=pool.adapter_digest,
    )


def pool_from_wire(message: types_v1.PoolSpec) -> PoolSpec:
    """Raises InvalidRequest where a pool of that kind cannot exist."""
    for field in ("model", "dtype", "kv_dtype"):
        if not getattr(message, field):
            raise InvalidRequest(f"pool.{field}: empty")
    for field in ("model_digest", "tokenizer_digest"):
        if len(getattr(message, field)) != HASH_BYTES:
            raise InvalidRequest(f"pool.{field}: {len(getattr(message, field))} bytes, wanted {HASH_BYTES}")
    for field in ("block_size", "num_blocks", "max_model_tokens", "vocab_size"):
        if getattr(message, field) < 1:
            raise InvalidRequest(f"pool.{field}: {getattr(message, field)}, wanted at least 1")
    return PoolSpec(
        model=message.model,
        model_digest=message.model_digest,
        tokenizer_digest=message.tokenizer_digest,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_model_tokens=message.max_model_tokens,
        vocab_size=message.vocab_size,
        block_bytes=message.block_bytes,
        adapter_digest=absent_or_whole("pool.adapter_digest", message.adapter_digest, HASH_BYTES),
    )


def load_to_wire(load: WorkerLoad) -> types_v1.WorkerLoad:
    return types_v1.WorkerLoad(
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        queued_prefill_tokens=load.queued_prefill_tokens,
        held_blocks=load.held_blocks,
        cached_blocks=load.cached_blocks,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
        preemptions=load.preemptions,
    )


def load_from_wire(message: types_v1.WorkerLoad) -> WorkerLoad:
    """In the order of the record's fields."""
    return _NEW_LOAD(
        (
            message.running_sequences,
            message.waiting_sequences,
            message.queued_prefill_tokens,
            message.held_blocks,
            message.cached_blocks,
            message.prompt_tokens,
            message.cached_tokens,
            message.output_tokens,
            message.preemptions,
        )
    )


def worker_to_wire(worker: WorkerInfo) -> cache_manager_v1.WorkerInfo:
    return cache_manager_v1.WorkerInfo(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        address=worker.address,
        pool=pool_to_wire(worker.pool),
        load=load_to_wire(worker.load),
        draining=worker.draining,
        incarnation=worker.incarnation,
        cache_epoch=worker.cache_epoch,
    )


def worker_from_wire(message: cache_manager_v1.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        epoch=Epoch(message.epoch),
        address=message.address,
        pool=pool_from_wire(message.pool),
        load=load_from_wire(message.load),
        draining=message.draining,
        incarnation=Incarnation(message.incarnation),
        cache_epoch=CacheEpoch(message.cache_epoch),
    )


def fleet_to_wire(update: FleetUpdate) -> cache_manager_v1.FleetUpdate:
    return cache_manager_v1.FleetUpdate(
        workers=[worker_to_wire(worker) for worker in update.workers], gone=update.gone, snapshot=update.snapshot
    )


def fleet_from_wire(message: cache_manager_v1.FleetUpdate) -> FleetUpdate:
    return FleetUpdate(
        workers=tuple(worker_from_wire(worker) for worker in message.workers),
        gone=tuple(WorkerId(worker) for worker in message.gone),
        snapshot=message.snapshot,
    )
