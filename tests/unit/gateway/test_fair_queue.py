"""Turns between flows, against plain lists, and the bound on what one flow may get more than another."""

from collections import deque
from itertools import combinations, count

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.fair_queue import FairQueue

QUANTUM = 16
LARGEST = 40
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
flows = st.sampled_from(sorted(WEIGHTS))


class Turns(RuleBasedStateMachine):
    """The order within a flow is that of a sorted list; between two flows that wait, tokens keep to their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str, int] = FairQueue(QUANTUM)
        self.items = count()
        self.tokens: dict[int, int] = {}
        self.waiting: dict[str, list[tuple[int, int]]] = {flow: [] for flow in WEIGHTS}
        """(lower is sooner, item)."""
        self.shared = {pair: dict.fromkeys(pair, 0.0) for pair in combinations(WEIGHTS, 2)}
        """Of each two flows, what each was served by weight since both have been waiting."""

    def remove(self, item: int) -> str:
        flow = next(flow for flow, line in self.waiting.items() if any(item == other for _, other in line))
        self.waiting[flow] = [entry for entry in self.waiting[flow] if entry[1] != item]
        return flow

    @rule(flow=flows, tokens=st.integers(1, LARGEST), priority=st.integers(-1, 1))
    def add(self, flow: str, tokens: int, priority: int) -> None:
        item = next(self.items)
        self.tokens[item] = tokens
        self.queue.add(flow, item, tokens=tokens, weight=WEIGHTS[flow], priority=priority)
        self.waiting[flow] = sorted([*self.waiting[flow], (-priority, item)])

    @precondition(lambda self: len(self.queue) > 0)
    @rule()
    def serve(self) -> None:
        item = self.queue.head()
        assert item is not None
        self.queue.serve(item)
        flow = next(flow for flow, line in self.waiting.items() if any(item == other for _, other in line))
        assert item == self.waiting[flow][0][1], "somebody of its flow was before it"
        self.remove(item)
        for pair, got in self.shared.items():
            if flow in pair:
                got[flow] += self.tokens[item] / WEIGHTS[flow]

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(item for line in self.waiting.values() for _, item in line)))
        self.queue.discard(item)
        self.remove(item)

    @invariant()
    def nobody_is_lost(self) -> None:
        self.queue.check()
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        assert (self.queue.head() is None) == (len(self.queue) == 0)

    @invariant()
    def of_two_that_wait_none_gets_ahead_by_more_than_a_turn(self) -> None:
        for pair, got in self.shared.items():
            one, other = pair
            if not (self.waiting[one] and self.waiting[other]):
                self.shared[pair] = dict.fromkeys(pair, 0.0)
                continue
            bound = QUANTUM + LARGEST / WEIGHTS[one] + LARGEST / WEIGHTS[other]
            assert abs(got[one] - got[other]) <= bound, (pair, got)

    @invariant()
    def what_is_before_a_newcomer_is_no_more_than_all_there_is(self) -> None:
        waiting = {flow: sum(self.tokens[item] for _, item in self.waiting[flow]) for flow in WEIGHTS}
        for flow, own in waiting.items():
            assert own <= self.queue.tokens_before(flow) <= sum(waiting.values())


TestTurns = Turns.TestCase


def served_round_by_round(waiting: dict[str, list[int]]) -> list[tuple[str, int]]:
    """(flow, tokens) in the order of service, by the paper's own loop: a turn after the other, a quantum for each."""
    lines = {flow: deque(tokens) for flow, tokens in waiting.items()}
    deficits = dict.fromkeys(lines, 0.0)
    served: list[tuple[str, int]] = []
    while lines:
        for flow, line in list(lines.items()):
            deficits[flow] += QUANTUM * WEIGHTS[flow]
            while line and line[0] <= deficits[flow]:
                deficits[flow] -= line[0]
                served.append((flow, line.popleft()))
            if not line:
                del lines[flow]
    return served


@given(waiting=st.dictionaries(flows, st.lists(st.integers(1, 40 * LARGEST), min_size=1, max_size=5)))
def test_rounds_in_which_nobody_is_served_change_nothing_but_what_all_are_granted(
    waiting: dict[str, list[int]],
) -> None:
    queue: FairQueue[str, tuple[str, int]] = FairQueue(QUANTUM)
    tokens_of = {(flow, at): tokens for flow, line in waiting.items() for at, tokens in enumerate(line)}
    for (flow, at), tokens in tokens_of.items():
        queue.add(flow, (flow, at), tokens=tokens, weight=WEIGHTS[flow])

    served: list[tuple[str, int]] = []
    while (item := queue.head()) is not None:
        queue.serve(item)
        served.append((item[0], tokens_of[item]))

    assert served == served_round_by_round(waiting)


def test_an_item_of_any_size_has_its_turn_without_a_loop_over_its_quanta() -> None:
    """Nobody would wait for the end of this test, nor for a gateway that did so."""
    queue: FairQueue[str, int] = FairQueue(1)
    queue.add("a", 1, tokens=1 << 60, weight=0.01)
    queue.add("b", 2, tokens=1 << 59, weight=0.01)

    assert queue.head() == 2
