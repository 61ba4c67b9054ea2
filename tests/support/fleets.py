"""Values of a fleet, with every field that does not matter filled in."""

from typing import Any

from octavo.ids import CacheEpoch, Epoch, Incarnation, WorkerId
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerInfo, WorkerLoad


def pool(**fields: Any) -> PoolSpec:
    """1,024 blocks of 16 for a model called "words"."""
    spec: dict[str, Any] = {
        "model": "words",
        "model_digest": b"m" * 32,
        "tokenizer_digest": b"t" * 32,
        "dtype": "float32",
        "kv_dtype": "float32",
        "block_size": 16,
        "num_blocks": 1024,
        "max_model_tokens": 8192,
        "vocab_size": 400,
    }
    return PoolSpec(**spec | fields)


def worker(
    name: str,
    *,
    epoch: int = 1,
    incarnation: int = 1,
    cache_epoch: int = 0,
    draining: bool = False,
    spec: PoolSpec | None = None,
    **load: int,
) -> WorkerInfo:
    """An idle worker; `load` are fields of WorkerLoad."""
    return WorkerInfo(
        worker_id=WorkerId(name),
        epoch=Epoch(epoch),
        address=f"{name}:1",
        pool=spec or pool(),
        load=WorkerLoad(**load),
        draining=draining,
        incarnation=Incarnation(incarnation),
        cache_epoch=CacheEpoch(cache_epoch),
    )


def snapshot(*workers: WorkerInfo) -> FleetUpdate:
    return FleetUpdate(workers=workers, snapshot=True)


def news(*workers: WorkerInfo, gone: tuple[str, ...] = ()) -> FleetUpdate:
    return FleetUpdate(workers=workers, gone=tuple(WorkerId(name) for name in gone))
