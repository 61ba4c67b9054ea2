"""`octavo audit`: have cache managers recompute the books of their workers, and say whether they balance."""

from collections.abc import Sequence

from octavo.commands.console import CommandFailed, out
from octavo.commands.managers import Metadata, answers
from octavo.records.insight import PoolAudit
from octavo.v1 import cache_manager_pb2
from octavo.v1.cache_manager_pb2_grpc import CacheManagerStub
from octavo.wire.insight import audit_from_wire

_TIMEOUT_SECONDS = 60.0
"""A pool of a million blocks takes seconds."""


def audit(addresses: Sequence[str]) -> None:
    """Print a line for each worker of these cache managers.

    Raises:
        CommandFailed: a cache manager does not answer, or the books of a worker do not balance; all are asked.
    """
    wrong: list[str] = []
    for _, audits in answers(addresses, _audits):
        for worker, found in audits:
            out.print(f"{worker}: {_in_words(found)}")
            if found.violation:
                wrong.append(worker)
    if wrong:
        raise CommandFailed(f"books that do not balance: {', '.join(wrong)}")


def _audits(manager: CacheManagerStub, metadata: Metadata) -> list[tuple[str, PoolAudit]]:
    updates = manager.WatchFleet(cache_manager_pb2.WatchFleetRequest(), timeout=_TIMEOUT_SECONDS, metadata=metadata)
    workers = sorted(worker.worker_id for worker in next(updates).workers)
    updates.cancel()
    requests = [cache_manager_pb2.AuditRequest(worker_id=worker) for worker in workers]
    replies = [manager.Audit(request, timeout=_TIMEOUT_SECONDS, metadata=metadata) for request in requests]
    return [(worker, audit_from_wire(reply)) for worker, reply in zip(workers, replies, strict=True)]


def _in_words(found: PoolAudit) -> str:
    verdict = f"WRONG: {found.violation}" if found.violation else "the books balance"
    return (
        f"{verdict}. {found.num_blocks:,} blocks: {found.held_blocks:,} held by {found.sequences:,} sequences, "
        f"{found.cached_blocks:,} cached, {found.free_blocks:,} free."
    )
