"""The worker's loop: plan, exchange (if need be, until the manager and the scheduler agree), execute, apply, report.

One task runs the loop. Submissions and cancels are plain calls on the same event loop; they fall between two awaits of
it and take effect with the next plan, so there are no locks. The model runs in a thread, one step at a time.

What keeps every request alive:
- An exchange is made when there is something to tell or to ask (worker/core/tables.py), and at the latest a third of
  the lease after the one before, whatever the worker does meanwhile.
- When the manager is lost, or says that the epoch is over, all that ran is computed again under a new registration.
- A step that raises ends the requests that were in it, and no others.
- No gateway is waited for: one that does not read loses its stream, and its requests are cancelled.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.errors import Draining, OctavoError, StaleEpoch
from octavo.ids import Epoch
from octavo.records import Exchange, Grant, Refusal, Registration, StepReport, Submission
from worker.cache_client import CacheClient
from worker.core.scheduler import Scheduler
from worker.core.sequence import GatewayKey
from worker.core.step import StepPlan, StepResult
from worker.outbox import Outbox

log = logging.getLogger("octavo.worker.engine")

FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 0.5
FLUSH_SECONDS = 2.0
"""For the last exchange of a drained worker."""


@dataclass(slots=True)
class EngineCounts:
    """Since the process started."""

    steps: int = 0
    """Forward passes begun."""
    computed_tokens: int = 0
    """Put through the model."""
    failed_steps: int = 0
    """That raised."""
    lost_managers: int = 0
    """Times that the cache manager was away, or ended the epoch; tries to come back not counted."""


class StepRunner(Protocol):
    """The model on its pool."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; called from one thread at a time."""
        ...


class Engine:
    """Owns the scheduler; sees to it that everything accepted ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        client: CacheClient,
        *,
        set_ready: Callable[[bool], Awaitable[None]],
        max_unread_reports: int = 1024,
    ) -> None:
        """`set_ready` is told whether new requests are welcome."""
        self._scheduler = scheduler
        self._runner = runner
        self._client = client
        self._set_ready = set_ready
        self._max_unread_reports = max_unread_reports
        self._outboxes: dict[GatewayKey, Outbox] = {}
        self._keys = itertools.count(1)
        self._woken = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._draining = False
        self._epoch = Epoch(0)
        self._step = 0
        self._heartbeat_seconds = 1.0
        self._renew_at = 0.0
        self.counts = EngineCounts()

    # ---- what the servicer calls -----------------------------------------------------------------------------

    def open_outbox(self) -> Outbox:
        """For a gateway that has come."""
        key = GatewayKey(next(self._keys))
        self._outboxes[key] = Outbox(key, self._max_unread_reports)
        return self._outboxes[key]

    def close_outbox(self, outbox: Outbox) -> None:
        """The gateway is gone, and all that it asked for is cancelled."""
        outbox.close()
        self._outboxes.pop(outbox.key, None)
        self._scheduler.cancel_gateway(outbox.key)
        self._wake()

    def submit(self, outbox: Outbox, submission: Submission) -> None:
        """Let a request wait for its turn, unless its stream has ended. Raises as Scheduler.submit."""
        if not outbox.closed:
            self._scheduler.submit(submission, outbox.key)
            self._wake()

    def refuse(self, outbox: Outbox, request: int, error: OctavoError) -> None:
        """Tell the gateway that one request is not taken."""
        self._publish({outbox.key: StepReport(refused=(Refusal(request, error),))})

    def cancel(self, outbox: Outbox, request: int, sample: int | None = None) -> None:
        """End a request, or one of its samples, without a word."""
        self._scheduler.cancel(outbox.key, request, sample)
        self._wake()

    # ---- life ------------------------------------------------------------------------------------------------

    async def run(self, registration: Registration) -> None:
        """Serve until cancelled. Raises the manager's OctavoError if it will not have this worker at all."""
        pauses = 0
        while True:
            try:
                await self._register(registration)
                pauses = 0
                await self._attend()
            except (ConnectionError, StaleEpoch, Draining) as error:
                level = logging.DEBUG if pauses else logging.WARNING  # once per loss
                self.counts.lost_managers += not pauses
                log.log(level, "manager_lost", extra={"epoch": self._epoch, "reason": str(error)})
            self._scheduler.preempt_all()
            if not self._scheduler.has_news:
                self._at_rest.set()
            await self._set_ready(False)
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2**pauses, LAST_PAUSE_SECONDS))
            pauses = min(pauses + 1, 8)

    async def drain(self, grace_seconds: float) -> None:
        """Take nothing new, let what runs finish within the grace, refuse the rest, tell the manager, end streams."""
        self._draining = True
        self._scheduler.drain()
        if not await self._rested_within(grace_seconds):
            self._publish(self._scheduler.refuse_all(Draining("the worker is shutting down")))
            await self._rested_within(FLUSH_SECONDS)
        for outbox in self._outboxes.values():
            outbox.close()

    async def _rested_within(self, seconds: float) -> bool:
        """Whether nothing was left to do and nothing to tell in time, or nobody to tell it to.

        Judged after at least one more exchange, or one more try to find the manager.
        """
        self._at_rest.clear()
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._at_rest.wait()
        return self._at_rest.is_set()

    # ---- the loop --------------------------------------------------------------------------------------------

    async def _register(self, registration: Registration) -> None:
        registered = await self._client.register(replace(registration, cache_epoch=self._scheduler.cache_epoch))
        self._epoch, self._step = registered.epoch, 0
        self._heartbeat_seconds = registered.lease_seconds / 3
        self._renew_at = _now() + self._heartbeat_seconds
        told = {"lease_seconds": registered.lease_seconds, "cache_epoch": registered.cache_epoch}
        log.info("registered", extra={"epoch": registered.epoch, **told})
        await self._set_ready(not self._draining)

    async def _attend(self) -> None:
        """Step after step, as long as the registration holds."""
        while True:
            self._woken.clear()
            await self._run_step()
            if not self._scheduler.has_news:
                self._at_rest.set()
                await self._sleep()

    async def _run_step(self) -> None:
        before, plan = self._scheduler.preemptions, self._plan()
        while isinstance(plan, Exchange):
            plan = self._scheduler.granted(await self._exchange(plan)) or self._plan()
        if preempted := self._scheduler.preemptions - before:
            log.info("sequences_preempted", extra={"sequences": preempted, "step": self._step})
        if plan.chunks:
            self._publish(await self._execute(plan))

    def _plan(self) -> Exchange | StepPlan:
        return self._scheduler.plan(self._epoch, self._step + 1)

    async def _execute(self, plan: StepPlan) -> dict[GatewayKey, StepReport]:
        """Run the step and take its result in. However this ends, the thread has ended before."""
        self.counts.steps += 1
        self.counts.computed_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        running = asyncio.create_task(asyncio.to_thread(self._runner.execute, plan))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=max(0.0, self._renew_at - _now()))
                if self._renew_at <= _now():
                    await self._renew()
        finally:
            await asyncio.wait({running})
            failure = running.exception()
        if failure is not None:
            self.counts.failed_steps += 1
            log.error("step_failed", exc_info=failure, extra={"sequences": len(plan.chunks)})
            return self._scheduler.step_failed(OctavoError(f"{type(failure).__name__} in the worker; see its log"))
        return self._scheduler.apply(running.result())

    async def _exchange(self, exchange: Exchange) -> Grant:
        """Raises ConnectionError or StaleEpoch when the worker must register again."""
        self._step = exchange.step
        self._renew_at = _now() + self._heartbeat_seconds
        try:
            return await self._client.exchange(exchange)
        except (StaleEpoch, Draining):
            raise
        except OctavoError as error:  # the two sides disagree about the books: a bug in one of them
            log.error("exchange_refused", exc_info=error, extra={"epoch": exchange.epoch, "step": exchange.step})
            raise StaleEpoch(f"the manager refuses step {exchange.step}") from error

    async def _renew(self) -> None:
        await self._exchange(self._scheduler.heartbeat(self._epoch, self._step + 1))

    async def _sleep(self) -> None:
        """Until somebody calls, or the lease wants to be renewed."""
        try:
            async with asyncio.timeout(self._renew_at - _now()):
                await self._woken.wait()
        except TimeoutError:
            await self._renew()

    def _wake(self) -> None:
        self._at_rest.clear()
        self._woken.set()

    def _publish(self, reports: dict[GatewayKey, StepReport]) -> None:
        for key, report in reports.items():
            outbox = self._outboxes.get(key)
            if outbox is None:
                continue
            outbox.put(report)
            if outbox.closed:
                self._scheduler.cancel_gateway(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
