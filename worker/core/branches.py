"""Samples that the next exchange forks from the one that computed their prompt.

Until then they are live, know what their parent knows, and stand in neither line. The parent writes no more before they
are forked: they alias all that it has computed by then.
"""

from octavo.ids import SequenceId
from octavo.records.attend import Fork
from worker.core.lineup import Lineup
from worker.core.sequence import Sequence
from worker.core.tables import Tables

_Branch = tuple[SequenceId, list[Sequence]]
"""Parent and children."""


class Branches:
    """The forks that are due."""

    def __init__(self, tables: Tables, lineup: Lineup) -> None:
        self._tables = tables
        self._lineup = lineup
        self._due: list[_Branch] = []
        self._asked: list[_Branch] = []

    def add(self, parent: SequenceId, children: list[Sequence]) -> None:
        """Fork the children from a sequence that has a table; it may end before that."""
        self._tables.fork(parent)
        self._due.append((parent, children))

    def take(self) -> tuple[tuple[Fork, ...], list[Sequence]]:
        """The forks of those that have not ended meanwhile, and the children, which run from now on."""
        living = [(parent, [child for child in own if not child.ended]) for parent, own in self._due]
        self._asked = [(parent, own) for parent, own in living if own]
        self._due = []
        children = [child for _, own in self._asked for child in own]
        for child in children:
            self._lineup.run(child)
        forks = (Fork(parent, tuple(child.id for child in own), reserve=1) for parent, own in self._asked)
        return tuple(forks), children

    def unanswered(self) -> None:
        """The exchange with the forks that were taken last got no answer: they are due again."""
        for parent, own in self._asked:
            unborn = [child for child in own if child in self._lineup.running and child not in self._tables]
            for child in unborn:
                self._lineup.running.remove(child)
            self._due.append((parent, unborn))
        self._asked = []

    def children(self) -> set[Sequence]:
        """Those who wait to be forked."""
        return {child for _, own in self._due for child in own if not child.ended}
