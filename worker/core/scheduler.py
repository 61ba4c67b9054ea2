"""Continuous batching: which tokens each step computes, for which sequences, and what the manager is asked meanwhile.

    exchange = scheduler.ask(epoch, number)    None: nothing to tell or to ask
    scheduler.granted(grant)                   or `lost`
    step_plan = scheduler.plan_step()          without chunks: nobody has room
    reports = scheduler.apply(step_result)     or `step_failed`; what the gateways are told

Steps and exchanges go side by side, one of each at a time (dialogue.py). A step takes whoever has room for it, so it
waits for no exchange while anybody has.

The rules:
- Decode first; then the prefills that run, in chunks; then the waiting, in their order (order.py), as long as there is
  room for them (admission.py). Those that follow another sequence wait until it has computed what they have in common
  with it, and take no budget.
- Where blocks are short somebody is sent back (order.py): it is freed, waits, and is computed again later. Nobody holds
  blocks while waiting for blocks.
- Samples of one request share their prompt's prefill: once it is computed, their first tokens are drawn from the same
  logits, and the samples that go on are forked from the first. A fork that finds too few blocks leaves them waiting,
  each as a sequence of its own.
- The beams of a search are sequences that advance together (searches.py): losers end, winners are forked.
- The manager is asked when somebody needs a block, comes or forks, and told when a block is full or somebody leaves:
  what a sequence writes into a block of its own concerns nobody else. What a stop ended is never written, hence never
  published.
- A cancelled sequence leaves at once; its blocks are freed after the step that may still write to them.
"""

from octavo.errors import Draining, OctavoError, QueueFull
from octavo.ids import CacheEpoch, Epoch
from octavo.records.attend import Exchange, Grant, Inventory
from octavo.records.fleet import PoolSpec, WorkerLoad
from octavo.records.serve import StepReport, Submission, TokenLogprobs
from worker.core.acceptance import require_runnable
from worker.core.dialogue import Dialogue
from worker.core.drafting import Counts, Drafter
from worker.core.lineup import Lineup
from worker.core.requests import Requests
from worker.core.searches import Searches
from worker.core.sequence import GatewayKey, Request, Sequence
from worker.core.shares import Share, share_out, within_room
from worker.core.step import Chunk, StepPlan, StepResult
from worker.core.tables import Tables


class Scheduler:
    """The worker's requests, queues and budget. Belongs to one task; knows no time and no I/O."""

    def __init__(
        self,
        pool: PoolSpec,
        *,
        max_step_tokens: int,
        max_running: int,
        max_waiting: int,
        drafter: Drafter | None = None,
    ) -> None:
        """A step computes at most `max_step_tokens`; `max_running` sequences have a table at once.

        `drafter` guesses what decodes say next; what it guesses is verified beside them.
        """
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._drafter = drafter
        self._requests = Requests()
        self._tables = Tables(pool.num_blocks, pool.block_size)
        self._lineup = Lineup(self._tables, max_running=max_running, block_size=pool.block_size)
        self._dialogue = Dialogue(
            self._tables, self._lineup, max_step_tokens=max_step_tokens, block_size=pool.block_size
        )
        self._searches = Searches(self._tables, self._lineup, self._dialogue.branches, self._requests)
        self._step: dict[Sequence, Chunk] = {}
        """Under way."""
        self._draining = False

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
        if submission.beam is None:
            first.unborn = submission.samples - 1
        else:
            self._searches.begin(first)
        self._lineup.wait(first)

    def cancel(self, gateway: GatewayKey, number: int, sample: int | None = None) -> None:
        """End a request, or one of its samples, without a word. One that is not there has just ended.

        The samples of a search are found at its end, so there is none to end before.
        """
        for request in self._requests.find(gateway, number):
            if sample is not None and request.submission.beam is not None:
                continue
            for sequence in request.live.copy():
                if sample is None or sequence.sample == sample:
                    self._end(sequence)

    def cancel_gateway(self, gateway: GatewayKey) -> None:
        """End all that came on one stream."""
        self._drop(self._requests.of_gateway(gateway))

    def drain(self) -> None:
        """Take nothing new from now on, and say so in every exchange, of which there is at least one."""
        self._draining = self._dialogue.must_tell = True

    def refuse_unbegun(self, error: OctavoError) -> dict[GatewayKey, StepReport]:
        """End with an error every request of which nothing has been computed."""
        return self._refuse([request for request in self._requests.all() if request.cached_tokens is None], error)

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

    @property
    def drafts(self) -> Counts:
        """How many tokens were guessed, and how many of them rightly."""
        return self._drafter.counts if self._drafter else Counts()

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

    def ask(self, epoch: Epoch, number: int, *, renew: bool = False) -> Exchange | None:
        """The next exchange, if there is something to tell or to ask, or if it is to be made anyway (`renew`).

        The grant must come to `granted`; if there is none, `lost` must be called.
        """
        frame = Exchange(epoch=epoch, step=number, load=self.load(), draining=self._draining)
        return self._dialogue.ask(frame, self._step, renew=renew)

    def granted(self, grant: Grant) -> None:
        """Follow the grant: who has a table now, what is in it, and who found too few blocks."""
        self._dialogue.granted(grant)

    def plan_step(self) -> StepPlan:
        """A step of those who have room; nobody may be there for it."""
        assert not self._step, "one step at a time"
        self._dialogue.settle()
        size = self._pool.block_size
        able = [within_room(sequence, size) for sequence in self._lineup.running if sequence in self._tables]
        shares = share_out((prospect for prospect in able if prospect.remaining > 0), self._max_step_tokens)
        guesses = self._guesses(shares)
        self._step = {share.sequence: share.chunk(guesses.get(share.sequence, ())) for share in shares}
        for sequence in self._step:
            self._requests.count_prompt(sequence)
        self._tables.writing(sequence.id for sequence in self._step)
        return StepPlan(tuple(self._step.values()), self._tables.take_copies() if self._step else ())

    def apply(self, result: StepResult) -> dict[GatewayKey, StepReport]:
        """Take in what the step has written and drawn."""
        step = self._end_step().items()
        for at, ((sequence, chunk), drawn) in enumerate(zip(step, result.tokens, strict=True)):
            if sequence.ended:
                continue
            if chunk.drafts:
                self._take_verified(sequence, chunk, drawn, result.logprobs.get(at))
                continue
            self._tables.wrote(sequence, chunk.end)
            if chunk.targets:
                self._requests.judged(sequence.request, chunk.start + 1, result.judged[at])
            if (continuations := result.continuations.get(at)) is not None:
                self._requests.prefilled(sequence.request)
                self._searches.hear(sequence, continuations)
            elif drawn:
                self._take_drawn(sequence, drawn, result.logprobs.get(at))
        self._drop(self._searches.settle())
        return self._requests.take_reports()

    def step_failed(self, error: OctavoError) -> dict[GatewayKey, StepReport]:
        """The step raised: its requests end with `error`, all others are computed again. No exchange is under way."""
        assert not self._dialogue.under_way, "the grant comes first"
        failed = {sequence.request for sequence in self._end_step() if not sequence.ended}
        reports = self._refuse(list(failed), error)
        for sequence in self._lineup.running.copy():
            self._lineup.start_over(sequence)
        return reports

    # ---- without a manager -----------------------------------------------------------------------------------

    def lost(self) -> None:
        """The manager is gone. What was asked last and not answered is asked again when one is back; tables stay."""
        self._dialogue.lost()

    def inventory(self) -> tuple[Inventory, ...]:
        """What to tell a manager without books, if there is anything. Steps alone may go on while it opens them."""
        return self._tables.inventory()

    def joined(self, cache_epoch: CacheEpoch) -> None:
        """A manager has taken the worker in, and publishes under this cache epoch."""
        self._dialogue.joined(cache_epoch)

    def preempt_all(self) -> None:
        """The books are lost and every table with them: whoever runs waits to be computed again."""
        assert not self._step, "the step ends first"
        self._dialogue.start_anew()

    def check(self) -> None:
        """Assert the invariants that hold between two calls of the engine's loop."""
        self._lineup.check()
        self._tables.check()
        lined_up = {*self._lineup.waiting, *self._lineup.running}
        branching = self._dialogue.branches.children()
        live = {sequence for request in self._requests.all() for sequence in request.live}
        resting = self._searches.resting()
        assert lined_up | branching | resting == live, (lined_up, branching, resting, live)
        assert len(lined_up) + len(branching) + len(resting) == len(live), (lined_up, branching, resting)
        for sequence in live:
            assert sequence.remaining > 0, sequence.age

    # ---- parts of a step -------------------------------------------------------------------------------------

    def _guesses(self, shares: list[Share]) -> dict[Sequence, tuple[int, ...]]:
        if self._drafter is None:
            return {}
        return self._drafter.guess(shares, block_size=self._pool.block_size, budget=self._max_step_tokens)

    def _end_step(self) -> dict[Sequence, Chunk]:
        step, self._step = self._step, {}
        self._tables.writing()
        return step

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
            self._dialogue.branches.add(first.id, children)

    def _take_verified(
        self, sequence: Sequence, chunk: Chunk, drawn: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None
    ) -> None:
        """The next tokens of a sample, up to the first that was not guessed: the others follow one that never came."""
        assert self._drafter is not None
        self._requests.prefilled(sequence.request)
        guesses = chunk.tokens[-chunk.drafts :]
        accepted = 0
        for at, token in enumerate(drawn):
            self._tables.wrote(sequence, chunk.start + 1 + at)
            accepted = at
            if self._requests.drawn(sequence, token, logprobs[at : at + 1] if logprobs else ()):
                self._end(sequence)
                break
            if guesses[at : at + 1] != (token,):
                break
        self._drafter.verified(sequence, len(guesses), accepted)

    def _end(self, sequence: Sequence) -> None:
        self._lineup.end(sequence)
        if self._drafter:
            self._drafter.forget(sequence)
        if not sequence.request.live:
            self._requests.forget(sequence.request)
            self._searches.forget(sequence.request)

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            for sequence in request.live.copy():
                self._end(sequence)

    def _refuse(self, requests: list[Request], error: OctavoError) -> dict[GatewayKey, StepReport]:
        for request in requests:
            self._requests.refused(request, error)
        self._drop(requests)
        return self._requests.take_reports()
