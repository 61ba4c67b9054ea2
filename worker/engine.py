"""The worker's loop: plan, exchange (if need be, until the manager and the scheduler agree), execute, apply, report.

One task runs the loop. Submissions and cancels are plain calls on the same event loop; they fall between two awaits of
it and take effect with the next plan, so there are no locks. The model runs in a thread, one step at a time.

What keeps every request alive:
- An exchange is made when there is something to tell or to ask (worker/core/tables.py), and at the latest a third of
  the lease after the one before, whatever the worker does meanwhile.
- When the manager is lost, whoever has room in its blocks is computed on, while a manager is looked for; that one is
  told what the pool holds and the work goes on where it is. Only if it will not believe that, or if the two sides have
  disagreed, all that ran is computed again. Without a manager for a lease time, the worker takes no new requests.
- A step that raises ends the requests that were in it, and no others.
- No gateway is waited for: one that does not read loses its stream, and its requests are cancelled.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import Draining, OctavoError
from octavo.records import Exchange, Refusal, Registration, StepReport, Submission
from worker.attendance import Attendance, InventoryRefused, ManagerLost
from worker.core.scheduler import Scheduler
from worker.core.sequence import GatewayKey
from worker.core.step import StepPlan, StepResult
from worker.outbox import Outbox

log = logging.getLogger("octavo.worker.engine")

FLUSH_SECONDS = 2.0
"""For the last exchange of a drained worker."""

LOOK_SECONDS = 1.0
"""During a long step without a manager, from look to look whether there is one."""


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
        attendance: Attendance,
        *,
        set_ready: Callable[[bool], Awaitable[None]],
        max_unread_reports: int = 1024,
    ) -> None:
        """`set_ready` is told whether new requests are welcome."""
        self._scheduler = scheduler
        self._runner = runner
        self._attendance = attendance
        self._set_ready = set_ready
        self._max_unread_reports = max_unread_reports
        self._outboxes: dict[GatewayKey, Outbox] = {}
        self._keys = itertools.count(1)
        self._woken = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._draining = False
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
        """Let a request wait for its turn, unless its stream has ended.

        Raises:
            Draining: the worker leaves, or has been without a cache manager for too long.
            OctavoError: as Scheduler.submit.
        """
        if self._attendance.is_cut_off:
            raise Draining("the worker finds no cache manager and takes nothing new")
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
        while True:
            try:
                await self._join(registration)
                await self._set_ready(not self._draining)
                await self._attend()
            except ManagerLost as loss:
                self.counts.lost_managers += 1
                if loss.books_in_doubt:
                    self._scheduler.preempt_all()
                else:
                    self._scheduler.lost()
            await self._set_ready(False)

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

        Judged after at least one more look of the loop.
        """
        self._at_rest.clear()
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._at_rest.wait()
        return self._at_rest.is_set()

    # ---- without a manager -----------------------------------------------------------------------------------

    async def _join(self, registration: Registration) -> None:
        """Find a manager; meanwhile, go on with what needs none."""
        while True:
            joining = asyncio.create_task(self._attendance.join(registration, self._scheduler, self._wake))
            try:
                while not joining.done():
                    await self._step_alone(joining)
                return await joining
            except InventoryRefused as error:
                log.error("inventory_refused", extra={"epoch": self._attendance.epoch, "reason": str(error)})
                self._scheduler.preempt_all()
            finally:
                joining.cancel()
                await asyncio.wait({joining})

    async def _step_alone(self, joining: asyncio.Task[None]) -> None:
        """A step that no manager need know of, or the wait for something to do."""
        self._woken.clear()
        plan = self._scheduler.plan_alone()
        if plan.chunks:
            await self._execute(plan)
            return
        if not self._scheduler.busy:
            self._at_rest.set()
        waking = asyncio.create_task(self._woken.wait())
        await asyncio.wait({joining, waking}, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()

    # ---- the loop --------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Step after step, until the manager is lost."""
        while True:
            self._woken.clear()
            await self._run_step()
            if not self._scheduler.has_news:
                self._at_rest.set()
                await self._sleep()

    async def _run_step(self) -> None:
        before, plan = self._scheduler.preemptions, self._plan()
        while isinstance(plan, Exchange):
            plan = self._scheduler.granted(await self._attendance.exchange(plan)) or self._plan()
        if preempted := self._scheduler.preemptions - before:
            log.info("sequences_preempted", extra={"sequences": preempted, "step": self._attendance.step})
        if plan.chunks:
            await self._execute(plan)

    def _plan(self) -> Exchange | StepPlan:
        return self._scheduler.plan(self._attendance.epoch, self._attendance.step + 1)

    async def _execute(self, plan: StepPlan) -> None:
        """Run the step, take its result in and tell the gateways; then raise ManagerLost if that happened meanwhile."""
        self.counts.steps += 1
        self.counts.computed_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        running = asyncio.create_task(asyncio.to_thread(self._runner.execute, plan))
        loss: ManagerLost | None = None
        try:
            while not running.done():
                wait = self._attendance.renewal_in
                await asyncio.wait({running}, timeout=LOOK_SECONDS if wait is None else wait)
                if loss is None and self._attendance.renewal_in == 0:
                    loss = await self._renew()
        finally:
            await asyncio.wait({running})  # however this ends, the thread has ended before
        self._publish(self._outcome(running, plan))
        if loss is not None:
            raise loss

    def _outcome(self, step: asyncio.Task[StepResult], plan: StepPlan) -> dict[GatewayKey, StepReport]:
        failure = step.exception()
        if failure is None:
            return self._scheduler.apply(step.result())
        self.counts.failed_steps += 1
        log.error("step_failed", exc_info=failure, extra={"sequences": len(plan.chunks)})
        return self._scheduler.step_failed(OctavoError(f"{type(failure).__name__} in the worker; see its log"))

    async def _renew(self) -> ManagerLost | None:
        """Make an exchange for the lease's sake. Returns the loss of the manager, if that is what comes of it."""
        heartbeat = self._scheduler.heartbeat(self._attendance.epoch, self._attendance.step + 1)
        try:
            self._scheduler.renewed(await self._attendance.exchange(heartbeat))
        except ManagerLost as loss:
            return loss
        return None

    async def _sleep(self) -> None:
        """Until somebody calls, or the lease wants to be renewed."""
        try:
            async with asyncio.timeout(self._attendance.renewal_in):
                await self._woken.wait()
        except TimeoutError:
            if (loss := await self._renew()) is not None:
                raise loss from None

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
