"""The scheduler against a real ledger, under any order of submissions, cancels, forks, shortages and losses.

The model is a function of the whole sequence as it reads it back through the block table, so every text must be that
of a solo run. After every exchange the ledger audits itself and the scheduler checks its invariants.
"""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octavo.records.sampling import BeamSearch, SamplingParams
from octavo.records.scope import PLAIN, Scope
from octavo.records.serve import Submission
from tests.support.scheduling import World, submission
from worker.core.drafting import Drafter, Lookups
from worker.core.sequence import GatewayKey

VOCABULARY = 6
"""Few tokens, so that prompts share prefixes and stop tokens come up."""
LONGEST_BLOCKS = 6
"""Of the longest sequence; the pool is hardly larger."""
GATEWAYS = [GatewayKey(1), GatewayKey(2)]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.served: dict[int, GatewayKey] = {}
        self.prompt_tokens = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        spare_blocks=st.integers(0, 8),
        max_step_tokens=st.integers(1, 24),
        max_running=st.integers(4, 8),
        min_copy_tokens=st.sampled_from([0, 1, 1, 3]),
        overlap=st.booleans(),
        guesses=st.booleans(),
    )
    def open_world(
        self,
        block_size: int,
        spare_blocks: int,
        max_step_tokens: int,
        max_running: int,
        min_copy_tokens: int,
        overlap: bool,
        guesses: bool,
    ) -> None:
        self.longest = LONGEST_BLOCKS * block_size
        self.world = World(
            block_size=block_size,
            num_blocks=LONGEST_BLOCKS + spare_blocks,
            vocab_size=VOCABULARY,
            max_model_tokens=self.longest,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            min_copy_tokens=min_copy_tokens,
            overlap=overlap,
            drafter=Drafter(Lookups()) if guesses else None,
        )

    @rule(data=st.data(), count=st.integers(1, 4), gateway=st.sampled_from(GATEWAYS))
    def submit(self, data: st.DataObject, count: int, gateway: GatewayKey) -> None:
        for _ in range(count):
            wanted = self.draw_submission(data)
            self.world.submit(wanted, gateway)
            self.served[wanted.request] = gateway
            self.prompt_tokens += len(wanted.prompt)

    def draw_submission(self, data: st.DataObject) -> Submission:
        number = len(self.world.submissions)
        if data.draw(st.sampled_from([False, False, False, True]), label="searches"):
            return self.draw_search(data, number)
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.longest - 1), label="prompt")
        return submission(
            number,
            prompt,
            data.draw(st.integers(1, self.longest - len(prompt)), label="max_tokens"),
            samples=data.draw(st.sampled_from([1, 1, 2, 4]), label="samples"),
            sampling=SamplingParams(temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=number),
            stop_tokens=data.draw(st.sampled_from([frozenset[int](), frozenset({3})]), label="stop"),
            priority=data.draw(st.sampled_from([0, 0, 0, 1, -1]), label="priority"),
            scope=data.draw(st.sampled_from([PLAIN, PLAIN, Scope(salt=b"s" * 32)]), label="scope"),
            logprobs=data.draw(st.sampled_from([None, None, 0]), label="logprobs"),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0]), label="prompt_logprobs"),
        )

    def draw_search(self, data: st.DataObject, number: int) -> Submission:
        """Beams: width and stop token such that the vocabulary has enough continuations."""
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.longest - 1), label="prompt")
        width = data.draw(st.integers(1, 3), label="width")
        return submission(
            number,
            prompt,
            data.draw(st.integers(1, self.longest - len(prompt)), label="max_tokens"),
            samples=data.draw(st.integers(1, width), label="samples"),
            stop_tokens=data.draw(st.sampled_from([frozenset[int](), frozenset({3})]), label="stop"),
            beam=BeamSearch(
                width=width,
                length_penalty=data.draw(st.sampled_from([0.0, 1.0]), label="length_penalty"),
                early_stopping=data.draw(st.booleans(), label="early_stopping"),
            ),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0]), label="prompt_logprobs"),
        )

    @rule(steps=st.integers(1, 4), lateness=st.integers(0, 2))
    def step(self, steps: int, lateness: int) -> None:
        self.world.lateness = lateness
        for _ in range(steps):
            self.world.step()

    @rule(request=st.integers(0, 12), moment=st.sampled_from(["now", "in_flight", "in_step"]))
    def cancel(self, request: int, moment: str) -> None:
        gateway = self.served.pop(request, GATEWAYS[0])
        self.during(moment, lambda: self.world.scheduler.cancel(gateway, request))

    @rule(gateway=st.sampled_from(GATEWAYS), moment=st.sampled_from(["now", "in_flight"]))
    def lose_a_gateway(self, gateway: GatewayKey, moment: str) -> None:
        self.served = {request: own for request, own in self.served.items() if own != gateway}
        self.during(moment, lambda: self.world.scheduler.cancel_gateway(gateway))

    def during(self, moment: str, act: Callable[[], Any]) -> None:
        """Act now, or while the next step is on its way; acting twice changes nothing."""
        if moment == "now":
            act()
            return
        setattr(self.world, moment, act)
        rounds = len(self.world.exchanges)
        self.world.step()
        while moment == "in_flight" and self.world.scheduler.has_news and len(self.world.exchanges) == rounds:
            self.world.step()
        setattr(self.world, moment, lambda: None)

    @rule(moment=st.sampled_from(["now", "in_flight", "in_step"]))
    def reset(self, moment: str) -> None:
        self.during(moment, self.world.reset)

    @rule(asked=st.booleans())
    def lose_the_books(self, asked: bool) -> None:
        """All is computed again."""
        if asked:
            self.world.hear_no_answer()
        self.world.lose_the_manager()

    @rule(asked=st.booleans(), alone=st.integers(0, 5), request=st.integers(0, 12))
    def lose_the_manager(self, asked: bool, alone: int, request: int) -> None:
        """S17: a crash between any two exchanges. Nothing is computed again, and the index is as it was."""
        if asked:
            self.world.hear_no_answer()
        published = set(self.world.ledger.published())
        gateway = self.served.pop(request, GATEWAYS[0])
        self.world.recover(alone=alone, opening=lambda: self.world.scheduler.cancel(gateway, request))
        assert asked or published <= set(self.world.ledger.published())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        for request in self.served:
            self.world.assert_served(request)
        self.world.assert_at_rest()
        assert self.world.scheduler.load().prompt_tokens <= self.prompt_tokens


TestScheduler = SchedulerMachine.TestCase
