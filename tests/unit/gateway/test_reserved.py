"""What a gateway has at one worker, summed as it comes and goes, against the same counted anew."""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gateway.core.fleet import Fleet
from gateway.core.in_flight import PromptBlocks, Sent
from gateway.core.reserved import ReservationId, Reserved, Sums
from octavo.ids import WorkerId
from octavo.records.scope import PLAIN
from tests.support.fleets import news, pool, snapshot, worker

HOST = worker("host", spec=pool(block_size=1))
PROMPTS = st.lists(st.integers(0, 1), max_size=4)


@dataclass(slots=True)
class Request:
    prompt: PromptBlocks
    cached_tokens: int
    output_tokens: int
    reports: int = 0
    """Since it was sent."""
    computed: bool = False


class Ledger(RuleBasedStateMachine):
    """Requests are sent, computed and end, and their worker reports, in any order. S38."""

    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.reserved = Reserved()
        self.requests: dict[ReservationId, Request] = {}
        self.last = 0

    @rule()
    def report(self) -> None:
        self.reserved.reported()
        for request in self.requests.values():
            request.reports += 1

    @rule(target=sent, prompt=PROMPTS, cached=st.integers(0, 4), output=st.integers(1, 9))
    def send(self, prompt: list[int], cached: int, output: int) -> ReservationId:
        self.last += 1
        reservation = ReservationId(self.last)
        request = Request(PromptBlocks(prompt, PLAIN), min(cached, len(prompt)), output)
        self.requests[reservation] = request
        self.reserved.add(
            reservation,
            prompt_tokens=len(prompt),
            prefill_tokens=len(prompt) - request.cached_tokens,
            output_tokens=output,
            blocks=request.prompt.of(HOST),
        )
        return reservation

    @rule(reservation=sent)
    def compute(self, reservation: ReservationId) -> None:
        waited = not self.requests[reservation].computed
        assert (self.reserved.compute(reservation) is not None) == waited
        self.requests[reservation].computed = True

    @rule(target=sent, reservation=consumes(sent), twice=st.booleans())
    def end(self, reservation: ReservationId, twice: bool) -> object:
        assert self.reserved.end(reservation) is not None
        assert not twice or self.reserved.end(reservation) is None
        del self.requests[reservation]
        return multiple()

    @rule(prompt=PROMPTS, indexed=st.integers(0, 4))
    def ask(self, prompt: list[int], indexed: int) -> None:
        """What begins otherwise changes no hit, so it need not be looked at."""
        asked = PromptBlocks(prompt, PLAIN)
        everything = [Sent(each.prompt.of(HOST), each.computed) for each in self.requests.values()]
        alike = self.reserved.alike(asked.of(HOST))
        known = min(indexed, max(0, len(prompt) - 1))  # the last token is always left to compute
        assert asked.hit(HOST, known, alike) == asked.hit(HOST, known, everything)

    @invariant()
    def the_sums_are_those_of_the_requests(self) -> None:
        self.reserved.check()
        assert set(self.reserved) == set(self.requests)
        assert self.reserved.unseen == self.counted(lambda reports: reports == 0)
        assert self.reserved.perhaps == self.counted(lambda reports: reports == 1)
        assert self.reserved.contained == self.counted(lambda reports: reports > 1)

    def counted(self, of: Callable[[int], bool]) -> Sums:
        chosen = [request for request in self.requests.values() if of(request.reports)]
        waiting = [request for request in chosen if not request.computed]
        return Sums(
            prompts=len(waiting),
            prompt_tokens=sum(each.prompt.tokens for each in waiting),
            prefill_tokens=sum(each.prompt.tokens - each.cached_tokens for each in waiting),
            settling_tokens=sum(each.prompt.tokens - each.cached_tokens for each in chosen if each.computed),
            new_positions=sum(each.prompt.tokens - each.cached_tokens + each.output_tokens for each in chosen),
        )


TestLedger = Ledger.TestCase


def test_how_a_worker_stands_takes_as_many_steps_with_a_thousand_requests_there_as_with_ten() -> None:
    stranger = PromptBlocks(range(1000, 1100), PLAIN)

    def steps(requests: int) -> int:
        fleet, blocks = Fleet(), PromptBlocks(range(100), PLAIN).of(worker("a"))
        fleet.apply(snapshot(worker("a")), now=0.0, manager="m")
        for at in range(requests):
            sent = fleet.reserve(worker("a"), prompt_tokens=100, cached_tokens=0, output_tokens=10, blocks=blocks)
            if at % 2:
                fleet.prefilled(sent)
            if at < 3:
                fleet.apply(news(worker("a")), now=0.0, manager="m")
        return calls_of(lambda: (fleet.standings([WorkerId("a")]), fleet.hits(stranger, fleet.workers)))

    steps(10)  # the stranger's hashes are kept from here on
    assert steps(1000) == steps(10)


def calls_of(work: Callable[[], object]) -> int:
    """Functions that are called in it, and generators that go on."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    gc.disable()  # who listens to the collector is called as well
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls
