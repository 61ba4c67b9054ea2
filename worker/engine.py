"""The worker's loop: the model computes a step while the manager is asked what the next one needs.

One task runs the loop. Each turn of it begins a step, if none runs and somebody has room for one; tells the gateways
what the last step said, which so delays no step; asks the manager, if there is something to tell or to ask; and then
waits for the step, the grant or a call. Submissions and cancels are plain calls on the same event loop; they fall
between two turns, so there are no locks. The model runs in a thread, one step at a time.

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

from octavo.errors import Draining, OctavoError
from octavo.records.attend import Grant, Registration
from octavo.records.serve import Refusal, StepReport, Submission
from worker.attendance import Attendance, InventoryRefused, ManagerLost
from worker.core.scheduler import Scheduler
from worker.core.sequence import GatewayKey
from worker.core.step import StepResult
from worker.model_thread import ModelThread, StepCounts, StepRunner
from worker.outbox import Outbox

log = logging.getLogger("octavo.worker.engine")

FLUSH_SECONDS = 1.0
"""For the last exchange of a drained worker."""


@dataclass(slots=True)
class EngineCounts(StepCounts):
    """Since the process started."""

    lost_managers: int = 0
    """Times that the cache manager was away, or ended the epoch; tries to come back not counted."""
    wait_seconds: float = 0.0
    """In which no step ran, though there was work, since an answer of the cache manager was not there yet."""


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
        overlap: bool = True,
    ) -> None:
        """`set_ready` is told whether new requests are welcome. Without `overlap` steps and exchanges take turns."""
        self.counts = EngineCounts()
        self._scheduler = scheduler
        self._model = ModelThread(runner, self.counts, self._look)
        self._attendance = attendance
        self._set_ready = set_ready
        self._max_unread_reports = max_unread_reports
        self._overlap = overlap
        self._exchange: asyncio.Task[Grant] | None = None
        self._unpublished: list[dict[GatewayKey, StepReport]] = []
        self._outboxes: dict[GatewayKey, Outbox] = {}
        self._keys = itertools.count(1)
        self._woken = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._draining = False

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
        try:
            while True:
                try:
                    await self._join(registration)
                    await self._set_ready(not self._draining)
                    await self._attend()
                except ManagerLost as loss:
                    await self._lose_manager(loss)
                await self._set_ready(False)
        finally:
            await self._leave_nothing_running()

    async def drain(self, grace_seconds: float) -> None:
        """Take nothing new and leave within the grace.

        What has not begun is handed over at once: it begins sooner elsewhere. What runs may finish; what does not is
        handed over before the grace ends, and its gateway goes on with it at another worker. Then the manager is told
        what is free, for which there is FLUSH_SECONDS whatever the grace, and the streams end.
        """
        leaving = Draining("the worker is shutting down")
        self._draining = True
        self._scheduler.drain()
        self._publish(self._scheduler.refuse_unbegun(leaving))
        if not await self._rested_within(max(0.0, grace_seconds - FLUSH_SECONDS)):
            self._publish(self._scheduler.refuse_all(leaving))
            await self._rested_within(FLUSH_SECONDS)
        for outbox in self._outboxes.values():
            outbox.close()

    async def _rested_within(self, seconds: float) -> bool:
        """Whether nothing was left to do and nothing to tell in time, or nobody to tell it to.

        Judged after at least one more look of the loop.
        """
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
            joining.add_done_callback(lambda _: self._look())
            try:
                while not joining.done():
                    await self._turn_alone()
                return await joining
            except InventoryRefused as error:
                log.error("inventory_refused", extra={"epoch": self._attendance.epoch, "reason": str(error)})
                await self._start_over()
            finally:
                joining.cancel()
                await asyncio.wait({joining})

    async def _turn_alone(self) -> None:
        """A step that no manager need know of, or the wait for something to do."""
        self._woken.clear()
        await self._end_step()
        self._begin_step()
        self._publish_all()
        if not self._scheduler.busy:
            self._at_rest.set()
        await self._woken.wait()

    async def _lose_manager(self, loss: ManagerLost) -> None:
        self.counts.lost_managers += not loss.by_choice
        self._scheduler.lost()
        if loss.books_in_doubt:
            await self._start_over()

    async def _start_over(self) -> None:
        """The books are lost, and with them what stands in the pool."""
        await self._model.until_over()
        await self._end_step()
        self._scheduler.preempt_all()

    async def _leave_nothing_running(self) -> None:
        """However the loop ends, its thread has ended before."""
        if self._exchange is not None:
            self._exchange.cancel()
            await asyncio.gather(self._exchange, return_exceptions=True)
        await self._model.until_over()

    # ---- the loop --------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Turn after turn, until the manager is lost."""
        while True:
            self._woken.clear()
            self._take_grant()
            await self._end_step()
            before = self._scheduler.preemptions
            if not self._overlap:
                self._ask()
            self._begin_step()
            self._publish_all()
            if self._overlap:
                self._ask()
            if preempted := self._scheduler.preemptions - before:
                log.info("sequences_preempted", extra={"sequences": preempted, "step": self._attendance.step})
            await self._wait()

    def _begin_step(self) -> None:
        """Let the model run, if it does not, and somebody has room for a step."""
        if self._model.is_busy or (self._exchange is not None and not self._overlap):
            return
        plan = self._scheduler.plan_step()
        if plan.chunks:
            self._model.begin(plan)

    async def _end_step(self) -> None:
        """Take in what the step has said, if it is over."""
        if self._model.has_failed and self._exchange is not None:
            await asyncio.wait({self._exchange})  # whoever it brings in is to start anew with all others
            self._take_grant()
        if self._model.is_over:
            self._unpublished.append(self._outcome(self._model.end()))

    def _outcome(self, outcome: StepResult | BaseException) -> dict[GatewayKey, StepReport]:
        if isinstance(outcome, StepResult):
            return self._scheduler.apply(outcome)
        log.error("step_failed", exc_info=outcome)
        return self._scheduler.step_failed(OctavoError(f"{type(outcome).__name__} in the worker; see its log"))

    def _ask(self) -> None:
        """Begin an exchange, if none is under way and there is reason for one."""
        renew = self._attendance.renewal_in == 0
        if self._exchange is not None or (self._model.is_busy and not self._overlap and not renew):
            return
        exchange = self._scheduler.ask(self._attendance.epoch, self._attendance.step + 1, renew=renew)
        if exchange is not None:
            self._exchange = asyncio.create_task(self._attendance.exchange(exchange))
            self._exchange.add_done_callback(lambda _: self._look())

    def _take_grant(self) -> None:
        """Follow the grant, if it is there. Raises ManagerLost if there is none to come."""
        exchange = self._exchange
        if exchange is not None and exchange.done():
            self._exchange = None
            self._scheduler.granted(exchange.result())

    async def _wait(self) -> None:
        """Until a step or an exchange is over, somebody calls, or the lease wants to be renewed."""
        idle = not self._model.is_busy
        if idle and self._exchange is None and not self._scheduler.has_news:
            self._at_rest.set()
        waits_for_grant = idle and self._exchange is not None and self._scheduler.busy
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._attendance.renewal_in if self._exchange is None else None):
                await self._woken.wait()
        if waits_for_grant:
            self.counts.wait_seconds += asyncio.get_running_loop().time() - began

    def _look(self) -> None:
        """Something is over."""
        self._woken.set()

    def _wake(self) -> None:
        self._at_rest.clear()
        self._woken.set()

    def _publish_all(self) -> None:
        """Tell the gateways what the last steps have said."""
        unpublished, self._unpublished = self._unpublished, []
        for reports in unpublished:
            self._publish(reports)

    def _publish(self, reports: dict[GatewayKey, StepReport]) -> None:
        for key, report in reports.items():
            outbox = self._outboxes.get(key)
            if outbox is None:
                continue
            outbox.put(report)
            if outbox.closed:
                self._scheduler.cancel_gateway(key)
