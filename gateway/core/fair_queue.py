"""Whose turn it is among flows that share something: deficit round robin, in tokens. Pure.

Each flow comes in turn and is granted a quantum of tokens times its weight; what it does not spend is kept for its next
turn, as long as it has something waiting. So over any time in which two flows wait, the tokens that each was served,
divided by its weight, differ by no more than a quantum and the largest item of each (M. Shreedhar and G. Varghese,
"Efficient fair queueing using deficit round robin", 1995). Counting requests instead would give a flow of long prompts
most of the machine.

Within a flow, the higher priority goes first, then the older item: a flow's priorities are its own affair and take
nothing from the others.
"""

from bisect import insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import ceil
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Flow = TypeVar("Flow", bound=Hashable)

QUANTUM_TOKENS = 2048
"""Of a flow of weight 1 in one turn: about one request of ordinary size."""


@dataclass(frozen=True, slots=True, order=True)
class _Entry(Generic[Item]):
    """Sorts in the order of service."""

    order: tuple[int, int]
    """(lower is more urgent, older)."""
    item: Item = field(compare=False)
    tokens: int = field(compare=False)


@dataclass(slots=True)
class _Line(Generic[Item]):
    weight: float
    waiting: list[_Entry[Item]] = field(default_factory=list["_Entry[Item]"])
    tokens: int = 0
    """Of all that waits."""
    deficit: float = 0.0
    granted: bool = False
    """The quantum of this turn."""

    @property
    def shortage(self) -> float:
        """Tokens that are still to be granted before its first item can be served; at most 0 if none are."""
        return self.waiting[0].tokens - self.deficit


class FairQueue(Generic[Flow, Item]):
    """Items that wait, by flow. `head` says whose turn it is; `discard` takes an item out; `serve` charges it, too."""

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        """Grant so many tokens a turn to a flow of weight 1."""
        self._quantum = quantum_tokens
        self._lines: dict[Flow, _Line[Item]] = {}
        self._turns: deque[Flow] = deque()
        """The flows that have something waiting; the first one's turn it is."""
        self._flow_of: dict[Item, Flow] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._flow_of)

    def tokens_before(self, flow: Flow) -> float:
        """The most that is served before an item that came now as the last of its flow.

        Its flow's own tokens, and what the others are served meanwhile by their weights, but no more than they have.
        """
        own = self._lines.get(flow)
        if own is None:
            return sum(min(line.tokens, self._quantum * line.weight) for line in self._lines.values())
        others = (line for line in self._lines.values() if line is not own)
        return own.tokens + sum(min(line.tokens, own.tokens * line.weight / own.weight) for line in others)

    def add(self, flow: Flow, item: Item, *, tokens: int, weight: float = 1.0, priority: int = 0) -> None:
        """Let an item of a flow wait. The flow has the weight that was named last."""
        assert item not in self._flow_of, item
        line = self._lines.get(flow)
        if line is None:
            line = self._lines[flow] = _Line(weight)
            self._turns.append(flow)
        self._arrivals += 1
        line.weight = weight
        line.tokens += tokens
        insort(line.waiting, _Entry((-priority, self._arrivals), item, tokens))
        self._flow_of[item] = flow

    def head(self) -> Item | None:
        """The item whose turn it is; None if none waits."""
        if not self._turns:
            return None
        visits = 0
        while (line := self._line_in_turn()).shortage > 0:
            line.granted = False
            self._turns.rotate(-1)
            visits += 1
            if visits % len(self._turns) == 0:
                self._pass_idle_rounds()
        return line.waiting[0].item

    def _line_in_turn(self) -> _Line[Item]:
        """The first flow's, with what it is granted in this turn."""
        line = self._lines[self._turns[0]]
        if not line.granted:
            self._grant(line, 1)
            line.granted = True
        return line

    def _grant(self, line: _Line[Item], turns: int) -> None:
        line.deficit += turns * self._quantum * line.weight

    def _pass_idle_rounds(self) -> None:
        """Grant at once what all would get in the rounds before the next in which somebody is served.

        There may be millions: nothing but its type bounds what a request asks for while there is no worker.
        """
        lines = self._lines.values()
        rounds = min(ceil(line.shortage / (self._quantum * line.weight)) for line in lines) - 1
        for line in lines:
            self._grant(line, rounds)

    def serve(self, item: Item) -> None:
        """Take out what `head` said, on its flow's account."""
        line = self._lines[self._flow_of[item]]
        line.deficit -= line.waiting[0].tokens
        self.discard(item)

    def discard(self, item: Item) -> None:
        """Take out an item, wherever it is; one that does not wait changes nothing."""
        flow = self._flow_of.pop(item, None)
        if flow is None:
            return
        line = self._lines[flow]
        at = next(at for at, entry in enumerate(line.waiting) if entry.item == item)
        line.tokens -= line.waiting.pop(at).tokens
        if not line.waiting:
            del self._lines[flow]
            self._turns.remove(flow)

    def check(self) -> None:
        """Assert the invariants."""
        assert set(self._turns) == self._lines.keys(), (self._turns, self._lines.keys())
        assert len(self._turns) == len(self._lines)
        for flow, line in self._lines.items():
            assert line.waiting == sorted(line.waiting), flow
            assert line.tokens == sum(entry.tokens for entry in line.waiting), flow
            assert line.deficit >= 0, (flow, line.deficit)
        assert sum(len(line.waiting) for line in self._lines.values()) == len(self._flow_of)
