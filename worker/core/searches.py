"""The beam searches that run: each beam is a sequence, and a step of the search is a step of all its beams.

When every beam of a search has told its continuations, the search advances: losers end, winners go on, and where a beam
has several winners, the others are forked from it. The next exchange forks and frees; the fork comes first in it.

If some beam has still to be computed, because a step had no budget for it or it was sent back, those that have told
theirs *rest*: they give their blocks back and stand in neither line, so nobody holds blocks while another beam waits
for some. What they have told stays. A winner among them waits to be computed again, and finds what was published.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.core.beams import Beams, Branch
from worker.core.branches import Branches
from worker.core.lineup import Lineup
from worker.core.requests import Requests
from worker.core.sequence import Request, Sequence
from worker.core.step import Continuation
from worker.core.tables import Tables


@dataclass(slots=True)
class _Search:
    beams: Beams
    live: list[Sequence]
    """By rank."""
    told: dict[Sequence, tuple[Continuation, ...]] = field(default_factory=dict[Sequence, tuple[Continuation, ...]])
    """Of those that have, since the search last advanced."""


class Searches:
    """By request."""

    def __init__(self, tables: Tables, lineup: Lineup, branches: Branches, requests: Requests) -> None:
        self._tables = tables
        self._lineup = lineup
        self._branches = branches
        self._requests = requests
        self._searches: dict[Request, _Search] = {}
        self._touched: dict[Request, _Search] = {}

    def begin(self, first: Sequence) -> None:
        """A search by the request of its first sequence, which takes the places of all its beams."""
        submission = first.request.submission
        assert submission.beam is not None, submission
        first.unborn = submission.beam.width - 1
        beams = Beams(submission.beam, submission.stop_tokens, submission.max_tokens)
        self._searches[first.request] = _Search(beams, [first])

    def hear(self, sequence: Sequence, continuations: tuple[Continuation, ...]) -> None:
        """A step has computed the last token of a beam. `settle` must follow when all of the step is heard."""
        search = self._touched[sequence.request] = self._searches[sequence.request]
        search.told[sequence] = continuations

    def settle(self) -> list[Request]:
        """Let those searches advance whose beams have all spoken, and the others rest.

        Returns:
            The requests whose search is over: their gateways are told, their sequences are to be ended.
        """
        touched, self._touched = self._touched, {}
        over: list[Request] = []
        for request, search in touched.items():
            if len(search.told) < len(search.live):
                self._rest(search.told)
            elif not self._advance(request, search):
                over.append(request)
        return over

    def forget(self, request: Request) -> None:
        """The request has ended, whether it searches or not."""
        self._searches.pop(request, None)

    def resting(self) -> set[Sequence]:
        """Beams that stand in neither line."""
        told = (sequence for search in self._searches.values() for sequence in search.told)
        return {sequence for sequence in told if not sequence.ended}

    def _rest(self, told: Iterable[Sequence]) -> None:
        for sequence in told:
            if sequence in self._tables:
                self._lineup.rest(sequence)

    def _advance(self, request: Request, search: _Search) -> bool:
        """Whether the search goes on."""
        submission, parents = request.submission, search.live
        outputs = [parent.tokens[submission.output_begins :] for parent in parents]
        branches = search.beams.advance(outputs, [search.told[parent] for parent in parents])
        search.told = {}
        if not branches:
            self._requests.found(request, search.beams.best(submission.samples))
            return False
        families: dict[int, list[int]] = {}
        for rank, branch in enumerate(branches):
            families.setdefault(branch.parent, []).append(rank)
        for place, parent in enumerate(parents):
            parent.unborn = 0
            if place not in families:
                self._lineup.end(parent)
        numbers = set(range(len(branches))) - {parent.sample for parent in parents if not parent.ended}
        heirs: dict[int, Sequence] = {}
        for place, ranks in families.items():
            family = self._continue(parents[place], [branches[rank] for rank in ranks], numbers)
            heirs.update(zip(ranks, family, strict=True))
        search.live = [heirs[rank] for rank in range(len(branches))]
        return True

    def _continue(self, parent: Sequence, branches: list[Branch], numbers: set[int]) -> list[Sequence]:
        """The parent with the first branch, and a child with each of the others, under numbers that are free."""
        places = self._lineup.places_left - len(self._branches.children())
        forks = parent in self._tables and len(branches) - 1 <= places
        children: list[Sequence] = []
        for branch in branches[1:]:
            number = numbers.pop()
            child = (
                self._lineup.new_child(parent, number)
                if forks
                else self._lineup.new_sequence(parent.request, number, parent.tokens.copy())
            )
            child.tokens.append(branch.token)
            children.append(child)
        parent.tokens.append(branches[0].token)
        if parent not in self._tables:
            self._lineup.wait(parent)
        if not forks:
            for child in children:
                self._lineup.wait(child)
        elif children:
            self._branches.add(parent.id, children)
        return [parent, *children]
