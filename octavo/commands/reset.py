"""`octavo reset`: have cache managers forget what is remembered, while requests run."""

from collections.abc import Sequence

import grpc

from octavo.commands.console import out
from octavo.commands.problems import no_cache_manager
from octavo.errors import UnknownWorker
from octavo.records import CacheReset
from octavo.service import CHANNEL_OPTIONS
from octavo.status import translated
from octavo.v1 import cache_manager_pb2, cache_manager_pb2_grpc
from octavo.wire import reset_from_wire

_TIMEOUT_SECONDS = 5.0


def reset(addresses: Sequence[str], worker: str | None) -> None:
    """Reset all workers of these cache managers, or one wherever it attends, and print what was forgotten.

    Raises:
        CommandFailed: a cache manager does not answer; those before it have done their part.
        UnknownWorker: the worker attends none of them.
    """
    unknown: UnknownWorker | None = None
    for address in addresses:
        try:
            done = _reset(address, worker)
        except UnknownWorker as error:
            unknown = error
        else:
            workers = f"{done.workers} worker{'' if done.workers == 1 else 's'}"
            out.print(f"{address}: {workers} forgot {done.blocks:,} blocks; the cache epoch is {done.cache_epoch} now.")
            if worker is not None:
                return
    if unknown is not None:
        raise unknown


def _reset(address: str, worker: str | None) -> CacheReset:
    request = cache_manager_pb2.ResetPrefixCacheRequest(worker_id=worker or "")
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        manager = cache_manager_pb2_grpc.CacheManagerStub(channel)
        try:
            with translated():
                return reset_from_wire(manager.ResetPrefixCache(request, timeout=_TIMEOUT_SECONDS))
        except grpc.RpcError as error:
            raise no_cache_manager(address) from error
