"""Continuous batching: which tokens each step computes, for which sequences, and who gives way when blocks are short.

    exchange or step_plan = scheduler.plan(epoch, step)     the step, if the manager need not be told or asked before it
    step_plan = scheduler.granted(grant)                    None: plan again, under the next number
    reports = scheduler.apply(step_result)                  what the gateways are told

The rules:
- Decode first; then the prefills that run, in chunks; then the waiting, oldest first and none overtaken (admission.py),
  but for those that follow another sequence: they wait until it has computed what they have in common with it.
- Whoever finds too few blocks sends away the newest: first what came with this very exchange, then the newest that
  runs. It is freed, waits in the place of its age, and is computed again later. The oldest is never sent away, so it
  always gets on, and nobody holds blocks while waiting for blocks.
- Samples of one request share their prompt's prefill: once it is computed, their first tokens are drawn from the same
  logits, and the samples that go on are forked from the first. A fork that finds too few blocks leaves them waiting,
  each as a sequence of its own.
- The manager is asked when somebody needs a block, comes or forks, and told when a block is full or somebody leaves:
  what a sequence writes into a block of its own concerns nobody else. What a stop ended is never written, hence never
  published.
- A cancelled sequence leaves at once; its blocks are freed by the next exchange, after the step that may still write
  to them.
"""

from octavo.errors import Draining, OctavoError, QueueFull
from octavo.ids import CacheEpoch, Epoch, SequenceId
from octavo.records import (
    Exchange,
    Grant,
    Inventory,
    PoolSpec,
    StepReport,
    Submission,
    TokenLogprobs,
    WorkerLoad,
)
from worker.core.acceptance import require_runnable
from worker.core.admission import Doorkeeper
from worker.core.asked import Asked
from worker.core.branches import Branches
from worker.core.lineup import Lineup
from worker.core.requests import Requests
from worker.core.sequence import GatewayKey, Request, Sequence
from worker.core.shares import Share, share_out
from worker.core.step import Chunk, StepPlan, StepResult
from worker.core.tables import Tables


class Scheduler:
    """The worker's requests, queues and budget. Belongs to one task; knows no time and no I/O."""

    def __init__(self, pool: PoolSpec, *, max_step_tokens: int, max_running: int, max_waiting: int) -> None:
        """A step computes at most `max_step_tokens`; `max_running` sequences have a table at once."""
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._requests = Requests()
        self._tables = Tables(pool.num_blocks, pool.block_size)
        self._lineup = Lineup(self._tables, max_running=max_running, block_size=pool.block_size)
        self._door = Doorkeeper(self._tables, self._lineup, pool.block_size)
        self._branches = Branches(self._tables, self._lineup)
        self._asked = Asked()
        self._step: list[tuple[Sequence, Chunk]] = []
        self._draining = False
        self._must_tell = False

    # ---- what comes from the gateways ------------------------------------------------------------------------

    def submit(self, submission: Submission, gateway: GatewayKey) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidRequest: it could never run to its end here, or its number is in use on that stream.
            QueueFull: as many sequences wait as may wait.
            Draining: the worker takes nothing new.
        """
        if self._draining:
            raise Draining("the worker is draining")
        require_runnable(submission, self._pool, self._max_running)
        if len(self._lineup.waiting) >= self._max_waiting:
            raise QueueFull(f"waiting: {len(self._lineup.waiting)} sequences, at most {self._max_waiting} may wait")
        request = self._requests.accept(submission, gateway)
        first = self._lineup.new_sequence(request, submission.first_sample, list(submission.prompt))
        first.unborn = submission.samples - 1
        self._lineup.wait(first)

    def cancel(self, gateway: GatewayKey, number: int, sample: int | None = None) -> None:
        """End a request, or one of its samples, without a word. One that is not there has just ended."""
        for request in self._requests.find(gateway, number):
            for sequence in request.live.copy():
                if sample is None or sequence.sample == sample:
                    self._end(sequence)

    def cancel_gateway(self, gateway: GatewayKey) -> None:
        """End all that came on one stream."""
        self._drop(self._requests.of_gateway(gateway))

    def drain(self) -> None:
        """Take nothing new from now on, and say so in every exchange, of which there is at least one."""
        self._draining = self._must_tell = True

    def refuse_all(self, error: OctavoError) -> dict[GatewayKey, StepReport]:
        """End every request with an error."""
        return self._refuse(self._requests.all(), error)

    # ---- what the engine asks --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return len(self._requests) > 0

    @property
    def has_news(self) -> bool:
        """Whether an exchange would do more than keep the lease: something waits, runs or is to be told."""
        return self.busy or self._tables.untold

    @property
    def cache_epoch(self) -> CacheEpoch:
        """As the last grant said."""
        return self._tables.cache_epoch

    @property
    def preemptions(self) -> int:
        """How often a sequence has lost a table for which it had computed something."""
        return self._lineup.preemptions

    def load(self) -> WorkerLoad:
        """What is in hand. The counts of blocks are the manager's."""
        totals = self._requests.totals
        return WorkerLoad(
            running_sequences=len(self._lineup.running),
            waiting_sequences=len(self._lineup.waiting),
            queued_prefill_tokens=self._lineup.queued_tokens,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            output_tokens=totals.output_tokens,
            preemptions=self.preemptions,
        )

    # ---- one step --------------------------------------------------------------------------------------------

    def plan(self, epoch: Epoch, step: int) -> Exchange | StepPlan:
        """The exchange that must come first, with that number; or the step at once, if there is nothing to tell or ask.

        The grant must come to `granted`; if there is none, `lost` must be called.
        """
        forks, children = self._branches.take()
        running = share_out(self._lineup.running, self._max_step_tokens)
        left = self._max_step_tokens - sum(share.count for share in running)
        entering = [Share(*admitted) for admitted in self._door.admit(left)]
        attached = [share.sequence for share in entering]
        shares = [*running, *entering]
        commits, finished = self._tables.take_untold()
        reserves = tuple(share.reservation() for share in shares if not share.has_room(self._pool.block_size))
        self._asked = Asked(shares, children, attached, reserves)
        if not (commits or forks or finished or attached or reserves or self._must_tell):
            return self._step_plan()
        self._must_tell = False
        return Exchange(
            epoch=epoch,
            step=step,
            commits=commits,
            forks=forks,
            finished=finished,
            attaches=self._asked.attaches(),
            reserves=reserves,
            load=self.load(),
            draining=self._draining,
        )

    def heartbeat(self, epoch: Epoch, step: int) -> Exchange:
        """Keeps the lease while a step runs: asks for nothing, and tells nothing of what has to wait for its end.

        The grant must come to `renewed`.
        """
        return Exchange(epoch=epoch, step=step, load=self.load(), draining=self._draining)

    def renewed(self, grant: Grant) -> None:
        """Follow a grant that was not asked for anything: the manager may have had news of its own."""
        self._tables.take_in(grant)

    def granted(self, grant: Grant) -> StepPlan | None:
        """The step that the grant makes possible, empty if nobody is left to run; None: plan and ask again."""
        unmet = set(grant.unmet)
        self._enter_books(grant, unmet)
        self._make_room(unmet)
        if self._asked.shortage(unmet, self._pool.block_size) > 0 or self._has_room_for_more():
            return None
        return self._step_plan()

    def apply(self, result: StepResult) -> dict[GatewayKey, StepReport]:
        """Take in what the step has written and drawn."""
        step, self._step = self._step, []
        for at, ((sequence, chunk), drawn) in enumerate(zip(step, result.tokens, strict=True)):
            if sequence.ended:
                continue
            self._tables.wrote(sequence, chunk.end)
            if chunk.targets:
                self._requests.judged(sequence.request, chunk.start + 1, result.judged[at])
            if drawn:
                self._take_drawn(sequence, drawn, result.logprobs.get(at))
        return self._requests.take_reports()

    def step_failed(self, error: OctavoError) -> dict[GatewayKey, StepReport]:
        """The step raised: its requests end with `error`, all others are computed again."""
        failed = {sequence.request for sequence, _ in self._step if not sequence.ended}
        self._step = []
        reports = self._refuse(list(failed), error)
        for sequence in self._lineup.running.copy():
            self._lineup.send_back(sequence)
        return reports

    # ---- without a manager -----------------------------------------------------------------------------------

    def lost(self) -> None:
        """The manager is gone. What was asked last and not answered is asked again when one is back; tables stay."""
        self._tables.unanswered()
        self._branches.unanswered()
        for sequence in self._asked.attached:
            if sequence in self._lineup.running and sequence not in self._tables:
                self._lineup.turn_away(sequence)
        self._asked = Asked()
        self._must_tell = True

    def plan_alone(self) -> StepPlan:
        """A step that no manager need know of, perhaps empty: who has room goes on in it, nobody comes in."""
        size = self._pool.block_size
        able = [sequence for sequence in self._lineup.running if sequence.room(size) > 0]
        shares = share_out(able, self._max_step_tokens)
        self._asked = Asked([share.within_room(size) for share in shares])
        return self._step_plan()

    def inventory(self) -> tuple[Inventory, ...]:
        """What to tell a manager without books, if there is anything. Steps alone may go on while it opens them."""
        return self._tables.inventory()

    def joined(self, cache_epoch: CacheEpoch) -> None:
        """A manager has taken the worker in, and publishes under this cache epoch."""
        self._tables.follow_reset(cache_epoch)

    def preempt_all(self) -> None:
        """The books are lost and every table with them: whoever runs waits to be computed again."""
        self._tables.forget()
        self._branches.take()
        for sequence in self._lineup.running.copy():
            self._lineup.send_back(sequence)
            sequence.sent_back = False  # it was no shortage
        self._asked, self._step = Asked(), []
        self._must_tell = True

    def check(self) -> None:
        """Assert the invariants that hold between two calls of the engine's loop."""
        self._lineup.check()
        self._tables.check()
        lined_up = {*self._lineup.waiting, *self._lineup.running}
        branching = self._branches.children()
        live = {sequence for request in self._requests.all() for sequence in request.live}
        assert lined_up | branching == live, (lined_up, branching, live)
        assert not lined_up & branching, (lined_up, branching)
        for sequence in live:
            assert sequence.remaining > 0, sequence.age

    # ---- parts of a step -------------------------------------------------------------------------------------

    def _enter_books(self, grant: Grant, unmet: set[SequenceId]) -> None:
        """Follow the grant: who has a table now, and what is in it."""
        born = [child for child in self._asked.children if child.id not in unmet]
        waits = dict(grant.waiting)
        came_in = [sequence for sequence in self._asked.attached if sequence.id not in waits]
        self._tables.take_in(grant, [*born, *came_in], self._asked.met(unmet))
        for child in self._asked.children:
            if child.id in unmet and not child.ended:
                self._lineup.send_back(child)  # to be attached by itself
        for sequence in self._asked.attached:
            if sequence.id in waits and not sequence.ended:
                self._lineup.turn_away(sequence)
        for leader in (*came_in, *map(self._tables.known, waits.values())):
            if leader is not None and leader in self._tables:
                self._door.follow(leader)

    def _make_room(self, unmet: set[SequenceId]) -> None:
        """Send away as many of the newest as the unmet reserves need, but never the last one."""
        size = self._pool.block_size
        newcomers = [sequence for sequence in self._asked.attached if sequence in self._tables]
        newest = [*reversed(newcomers), *(old for old in reversed(self._lineup.running) if old not in newcomers)]
        for sequence in newest[:-1]:
            if self._asked.shortage(unmet, size) <= self._tables.returning:
                break
            self._lineup.send_back(sequence)
        enough = not self._asked.shortage(unmet, size)
        assert enough or self._tables.untold, f"{self._pool.num_blocks} blocks are too few: {newest}"

    def _has_room_for_more(self) -> bool:
        """Whether prefix hits, and those that turned out to wait, have left budget for more; all others have stayed."""
        return (
            bool(self._asked.attached)
            and self._asked.all_found_a_place(self._tables)
            and sum(share.computes for share in self._asked.granted(self._tables)) < self._max_step_tokens
            and self._door.would_admit()
        )

    def _step_plan(self) -> StepPlan:
        self._step = [(share.sequence, share.chunk()) for share in self._asked.granted(self._tables)]
        for sequence, _ in self._step:
            self._requests.count_prompt(sequence)
        chunks = tuple(chunk for _, chunk in self._step)
        return StepPlan(chunks, self._tables.take_copies() if chunks else ())

    # ---- ends ------------------------------------------------------------------------------------------------

    def _take_drawn(self, first: Sequence, drawn: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> None:
        """The next token of a sample, and of those that are born with it."""
        self._requests.prefilled(first.request)
        others = range(first.sample + 1, first.sample + first.width)
        children = [self._lineup.new_child(first, sample) for sample in others]
        first.unborn = 0
        for at, (sequence, token) in enumerate(zip((first, *children), drawn, strict=True)):
            if self._requests.drawn(sequence, token, logprobs[at : at + 1] if logprobs else ()):
                self._end(sequence)
        if children:
            self._branches.add(first.id, children)

    def _end(self, sequence: Sequence) -> None:
        self._lineup.end(sequence)
        if not sequence.request.live:
            self._requests.forget(sequence.request)

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            for sequence in request.live.copy():
                self._end(sequence)

    def _refuse(self, requests: list[Request], error: OctavoError) -> dict[GatewayKey, StepReport]:
        for request in requests:
            self._requests.refused(request, error)
        self._drop(requests)
        return self._requests.take_reports()
