"""Audits the books that were opened from an inventory, while they are in use.

To audit a large pool takes longer than a worker should wait for its first grant. So it is granted to at once, and the
audit goes on in parts, between which everybody is answered. Books that do not balance are a fault of this program: an
error for the log and the metrics, and an operator's to act on. The worker goes on.
"""

import asyncio
import logging
from collections.abc import Callable

from cache_manager.manager import Manager
from octavo.ids import Epoch, WorkerId

log = logging.getLogger("octavo.cache_manager.restored_audit")

MOST_SHOWN = 3
"""Violations named in the log."""


async def audit_restored(manager: Manager, now: Callable[[], float]) -> None:
    """Audit every worker's books once they are restored, one after the other, until cancelled."""
    while True:
        worker, epoch = await manager.restored.get()
        await audit_books(manager, now, worker, epoch)


async def audit_books(manager: Manager, now: Callable[[], float], worker: WorkerId, epoch: Epoch) -> None:
    """Audit one worker's books, and say what comes of it."""
    violations: list[str] = []
    began = now()
    for part in manager.audit_parts(worker, epoch):
        violations += part
        manager.was_busy(began, now())
        await asyncio.sleep(0)
        began = now()
    described = {"worker": worker, "epoch": epoch}
    if violations:
        manager.counts.unbalanced += 1
        shown = "; ".join(violations[:MOST_SHOWN])
        log.error("restored_books_unbalanced", extra={**described, "violations": len(violations), "first": shown})
    else:
        log.info("restored_books_audited", extra=described)
