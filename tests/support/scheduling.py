"""A worker's world without its service: the real scheduler, a real ledger, and a model that is a function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_manager.core.ledger import Ledger
from cache_manager.core.partial_hits import DEFAULT_MIN_COPY_TOKENS
from cache_manager.core.restoration import Restoration
from octavo.ids import NEVER_RESET, CacheEpoch, Epoch, SequenceId
from octavo.records.attend import Exchange, Grant
from octavo.records.sampling import SamplingParams
from octavo.records.serve import FinishReason, StepReport, Submission, TokenLogprobs
from tests.support import books
from tests.support.beam_oracle import beam_search
from tests.support.fakes import FunctionRunner, Model, beam_scores, judgement, next_token, solo_text
from worker.core.drafting import Drafter
from worker.core.scheduler import Scheduler
from worker.core.sequence import GatewayKey
from worker.core.step import StepPlan

GATEWAY = GatewayKey(1)
EPOCH = Epoch(1)


def submission(request: int, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Submission:
    """A greedy request without stop tokens."""
    return Submission(request=request, prompt=tuple(prompt), max_tokens=max_tokens, **fields)


@dataclass(slots=True)
class Heard:
    """What a gateway was told of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    cumulative: dict[int, float | None] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    error: Exception | None = None


class Gateways:
    """What was told, by request number; every number is used once."""

    def __init__(self) -> None:
        self._heard: dict[int, Heard] = {}

    def of(self, request: int) -> Heard:
        return self._heard.setdefault(request, Heard())

    def hear(self, report: StepReport) -> None:
        for part in report.prompt_logprobs:
            told = self.of(part.request).prompt_logprobs
            assert part.start == 1 + len(told), f"{part} after {len(told)}"
            told += part.tokens
        for done in report.prefilled:
            assert self.of(done.request).cached_tokens is None, f"request {done.request} was prefilled twice"
            self.of(done.request).cached_tokens = done.cached_tokens
        for new in report.tokens:
            assert new.sample not in self.of(new.request).reasons, f"{new} after the end"
            self.of(new.request).tokens.setdefault(new.sample, []).extend(new.tokens)
            self.of(new.request).logprobs.setdefault(new.sample, []).extend(new.logprobs)
        for end in report.finished:
            assert end.sample not in self.of(end.request).reasons, f"{end} for the second time"
            self.of(end.request).reasons[end.sample] = end.reason
            self.of(end.request).cumulative[end.sample] = end.cumulative_logprob
        for refusal in report.refused:
            self.of(refusal.request).error = refusal.error


class World:
    """Drives steps by hand and checks everything after each.

    Unless it overlaps, a step is planned when nothing is left to tell or to ask. If it does, a step is planned as soon
    as somebody has room, and the exchange is made while it runs.
    """

    def __init__(
        self,
        *,
        max_step_tokens: int = 16,
        max_running: int = 8,
        max_waiting: int = 1000,
        min_copy_tokens: int = DEFAULT_MIN_COPY_TOKENS,
        model: Model = next_token,
        overlap: bool = False,
        drafter: Drafter | None = None,
        **pool: Any,
    ) -> None:
        self.overlap = overlap
        self.spec = books.pool_spec(**pool)
        self.max_step_tokens = max_step_tokens
        self.min_copy_tokens = min_copy_tokens
        self.scheduler = Scheduler(
            self.spec,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            drafter=drafter,
        )
        self.runner = FunctionRunner(self.spec, model)
        self.gateways = Gateways()
        self.submissions: dict[int, Submission] = {}
        self.exchanges: list[tuple[Exchange, Grant]] = []
        self.rounds_before_step = 0
        """How many of them were over when the last step was planned."""
        self.reports: list[StepReport] = []
        self.in_flight: Callable[[], None] = lambda: None
        """Called while an exchange is under way."""
        self.in_step: Callable[[], None] = lambda: None
        """Called while a step runs."""
        self.lateness = 0
        """A grant comes while the step runs that it was asked beside; 1: after it; 2: while the next one runs."""
        self.open_books()

    def open_books(self) -> None:
        self.ledger = Ledger(self.spec, EPOCH, min_copy_tokens=self.min_copy_tokens)
        self.told_cache_epoch = NEVER_RESET
        self.waits: set[tuple[SequenceId, SequenceId]] = set()
        self._reopened = False
        self._late: Grant | None = None
        self._step = 0

    def submit(self, wanted: Submission, gateway: GatewayKey = GATEWAY) -> None:
        self.scheduler.submit(wanted, gateway)
        self.submissions[wanted.request] = wanted

    def reset(self) -> None:
        """Nothing that was published is found any more."""
        self.ledger.reset(CacheEpoch(self.ledger.cache_epoch + 1))

    def lose_the_manager(self) -> None:
        self.scheduler.preempt_all()
        self.open_books()
        self.scheduler.joined(NEVER_RESET)

    def hear_no_answer(self) -> None:
        """The manager takes an exchange in and dies with it, if there is something to tell or ask."""
        plan = self.scheduler.plan_step() if self.overlap else StepPlan(())
        if self._late is None and (exchange := self.scheduler.ask(EPOCH, self._step + 1)) is not None:
            self.ledger.apply(exchange)
        self.finish(plan)

    def recover(self, *, alone: int = 0, opening: Callable[[], None] = lambda: None) -> None:
        """Another manager opens the books again, after so many steps without one. `opening` is called meanwhile."""
        preempted, told, wanted = self.scheduler.preemptions, self.told_cache_epoch, self.ledger.cache_epoch
        self.scheduler.lost()
        self.scheduler.check()
        for _ in range(alone):
            self.finish(self.scheduler.plan_step())
        restoration = Restoration(self.spec)
        for part in self.scheduler.inventory():
            restoration.add(part)
        opening()
        for _ in restoration.steps():
            self.finish(self.scheduler.plan_step())
        self.open_books()
        self.ledger = restoration.open(EPOCH, told, min_copy_tokens=self.min_copy_tokens)
        if wanted > told:  # a reset that the worker had not heard of
            self.ledger.reset(wanted)
        self.scheduler.joined(wanted)
        self.told_cache_epoch = wanted
        self._reopened = True
        self.ledger.check()
        assert self.scheduler.preemptions == preempted

    def ask(self) -> Grant | None:
        """The manager's answer, if it is to be asked or told anything."""
        exchange = self.scheduler.ask(EPOCH, self._step + 1)
        if exchange is None:
            return None
        self._step += 1
        grant = self.ledger.apply(exchange)
        self.ledger.check()
        self.exchanges.append((exchange, grant))
        self.check_waits(grant)
        self.in_flight()
        return grant

    def take(self, grant: Grant | None) -> None:
        """The answer comes."""
        if grant is not None:
            self.told_cache_epoch, self._reopened = grant.cache_epoch, False
            self.scheduler.granted(grant)
            self.scheduler.check()

    def exchange(self) -> bool:
        """One round with the ledger, unless there is nothing to tell or to ask."""
        grant = self.ask()
        self.take(grant)
        return grant is not None

    def check_waits(self, grant: Grant) -> None:
        """Who waits is not in the books, its leader is, and nobody is told the same twice: it was asked too soon."""
        for wait in grant.waiting:
            sequence, leader = wait
            assert sequence not in self.ledger
            assert leader in self.ledger
            assert wait not in self.waits, wait
            self.waits.add(wait)

    def plan(self) -> StepPlan:
        """A step, after rounds until the manager and the scheduler agree, unless somebody could run before."""
        plan = self.scheduler.plan_step() if self.overlap else StepPlan(())
        if not plan.chunks:
            self._take_late()
        for _ in range(1000):
            if plan.chunks or not self.exchange():
                return plan if plan.chunks else self.scheduler.plan_step()
        raise AssertionError("asked again and again")

    def step(self) -> StepPlan:
        """One whole step, with the exchange beside it."""
        plan = self.plan()
        self.rounds_before_step = len(self.exchanges)
        # Books that were opened again know equal blocks as one; the next grant tells it, as does one that is late.
        for chunk in plan.chunks:
            known = not self._reopened and self._late is None
            assert not known or chunk.table == self.ledger.blocks(chunk.sequence)
        self._take_late()
        grant = self.ask() if self.overlap and plan.chunks else None
        if self.lateness == 0:
            self.take(grant)
        self.finish(plan)
        if self.lateness == 1:
            self.take(grant)
        elif self.lateness == 2:
            self._late = grant
        return plan

    def _take_late(self) -> None:
        grant, self._late = self._late, None
        self.take(grant)

    def finish(self, plan: StepPlan) -> None:
        """Run a step that was planned."""
        if plan.chunks:
            assert sum(len(chunk.tokens) for chunk in plan.chunks) <= self.max_step_tokens
            result = self.runner.execute(plan)
            self.in_step()
            for report in self.scheduler.apply(result).values():
                self.reports.append(report)
                self.gateways.hear(report)
        self.scheduler.check()

    def run(self, most_steps: int = 10_000) -> None:
        """Until nothing waits or runs and the manager has been told all."""
        for _ in range(most_steps):
            if not self.scheduler.has_news and self._late is None:
                return
            self.step()
        raise AssertionError(f"not at rest after {most_steps} steps: {self.scheduler.load()}")

    def solo(self, request: int, sample: int = 0) -> list[int]:
        """What a sample of the request gets if it runs alone."""
        wanted = self.submissions[request]
        return solo_text(
            wanted.prompt,
            wanted.max_tokens,
            vocab_size=self.spec.vocab_size,
            sampling=wanted.sampling,
            sample=sample,
            stop=wanted.stop_tokens,
        )

    def assert_served(self, request: int) -> None:
        """Every sample ended, with the text of a solo run."""
        heard, wanted = self.gateways.of(request), self.submissions[request]
        assert heard.error is None
        assert sorted(heard.reasons) == list(range(wanted.samples))
        if wanted.beam is not None:
            self.assert_found(wanted)
        for sample in range(wanted.samples if wanted.beam is None else 0):
            text = self.solo(request, sample)
            assert heard.tokens.get(sample, []) == text, (request, sample)
            known = [*wanted.prompt, *text]
            ends = range(len(wanted.prompt), len(known)) if wanted.logprobs is not None else ()
            told = [judgement(known[:end], known[end]) for end in ends]
            assert heard.logprobs.get(sample, []) == told, (request, sample)
        ends = range(1, len(wanted.prompt)) if wanted.prompt_logprobs is not None else ()
        assert heard.prompt_logprobs == [judgement(wanted.prompt[:end], wanted.prompt[end]) for end in ends]

    def assert_found(self, wanted: Submission) -> None:
        """The search's texts are those of a search that runs alone."""
        assert wanted.beam is not None
        heard = self.gateways.of(wanted.request)
        found = beam_search(
            wanted.prompt,
            lambda tokens: beam_scores(tokens, self.spec.vocab_size),
            wanted.beam,
            wanted.stop_tokens,
            wanted.max_tokens,
        )
        for sample, (text, reason, cumulative) in enumerate(found[: wanted.samples]):
            assert heard.tokens.get(sample, []) == text, (wanted, sample)
            assert (heard.reasons[sample], heard.cumulative[sample]) == (reason, cumulative)

    def assert_at_rest(self) -> None:
        """No block has an owner, no counter is left standing."""
        audit, load = self.ledger.audit(), self.scheduler.load()
        assert (audit.held_blocks, audit.sequences, audit.violation) == (0, 0, "")
        assert audit.free_blocks + audit.cached_blocks == self.spec.num_blocks
        assert (load.running_sequences, load.waiting_sequences, load.queued_prefill_tokens) == (0, 0, 0)


SAMPLED = SamplingParams(temperature=1.0, seed=7)
