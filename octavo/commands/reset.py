"""`octavo reset`: have cache managers forget what is remembered, while requests run."""

from collections.abc import Sequence

from octavo.commands.console import out
from octavo.commands.managers import Metadata, answers
from octavo.errors import UnknownWorker
from octavo.records.insight import CacheReset
from octavo.status import translated
from octavo.v1 import cache_manager_pb2
from octavo.v1.cache_manager_pb2_grpc import CacheManagerStub
from octavo.wire.insight import reset_from_wire

_TIMEOUT_SECONDS = 5.0


def reset(addresses: Sequence[str], worker: str | None) -> None:
    """Reset all workers of these cache managers, or one wherever it attends, and print what was forgotten.

    Raises:
        CommandFailed: a cache manager does not answer; all others have done their part.
        UnknownWorker: the worker attends none of them.
    """
    request = cache_manager_pb2.ResetPrefixCacheRequest(worker_id=worker or "")

    def ask(manager: CacheManagerStub, metadata: Metadata) -> CacheReset | UnknownWorker:
        try:
            with translated():
                reply = manager.ResetPrefixCache(request, timeout=_TIMEOUT_SECONDS, metadata=metadata)
                return reset_from_wire(reply)
        except UnknownWorker as error:
            return error

    unknown: UnknownWorker | None = None
    for address, done in answers(addresses, ask):
        if isinstance(done, UnknownWorker):
            unknown = done
            continue
        workers = f"{done.workers} worker{'' if done.workers == 1 else 's'}"
        out.print(f"{address}: {workers} forgot {done.blocks:,} blocks; the cache epoch is {done.cache_epoch} now.")
        if worker is not None:
            return
    if unknown is not None:
        raise unknown
