"""The fleet as this gateway sees it now, and what follows from news of it.

A worker that its manager has given up may come back within a moment, with all that it has (it registers again), so
what runs there goes on. If it does not come back in GRACE_SECONDS and there is another worker of its model, whatever
it still has is taken away from it: it may be cut off from every manager, and stand still for want of blocks.
"""

import asyncio
from collections.abc import Callable

from gateway.catalogue import Catalogue
from gateway.core.fleet import GRACE_SECONDS, Fleet, WorkerProcess, process_of
from gateway.worker_client import Workers
from octavo.errors import WorkerLost
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerInfo


class FleetView:
    """Takes in what the managers say, and wakes those who wait for a worker."""

    def __init__(self, fleet: Fleet, catalogue: Catalogue, workers: Workers, clock: Callable[[], float]) -> None:
        """Change `fleet` through `catalogue`; `workers` are told who is left."""
        self._fleet = fleet
        self._catalogue = catalogue
        self._workers = workers
        self._clock = clock
        self._changed = asyncio.Event()

    def apply(self, update: FleetUpdate, manager: str) -> None:
        """Take in what a cache manager says of the workers."""
        self._change(lambda fleet: fleet.apply(update, self._clock(), manager))
        if update.snapshot:
            self._later(lambda: self._change(lambda fleet: fleet.forget_missing(self._clock())))

    def manager_away(self, manager: str) -> None:
        """A cache manager says nothing any more: its workers stay as they were."""
        self._change(lambda fleet: fleet.manager_away(manager))

    async def until_change(self, seconds: float) -> None:
        """Return at the next news, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def with_other_weights(self, pool: PoolSpec) -> set[WorkerProcess]:
        """Who cannot finish a text that was begun on such a pool."""
        return {process_of(worker) for worker in self._fleet.workers if worker.pool.weights != pool.weights}

    def wake(self) -> None:
        """Let everybody who waits for news look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _change(self, change: Callable[[Fleet], None]) -> None:
        present, leavers = self._catalogue.change(change)
        for info in leavers:
            self._later(lambda info=info: self._give_up(info))
        self._workers.keep(present)
        self.wake()

    def _give_up(self, gone: WorkerInfo) -> None:
        """Take from a worker that has left the fleet, and has not come back, what it still has."""
        present, process = self._fleet.workers, process_of(gone)
        replaced = any(worker.pool.model == gone.pool.model and not worker.draining for worker in present)
        if replaced and process not in map(process_of, present):
            self._workers.fail(process, WorkerLost(f"worker {gone.worker_id}: its cache manager has given it up"))

    @staticmethod
    def _later(act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(GRACE_SECONDS, act)
