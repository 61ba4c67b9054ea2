"""Samples that the next exchange forks from the one that computed their prompt.

Until then they are live, know what their parent knows, and stand in neither line.
"""

from octavo.ids import SequenceId
from octavo.records import Fork
from worker.core.lineup import Lineup
from worker.core.sequence import Sequence
from worker.core.tables import Tables


class Branches:
    """The forks that are due."""

    def __init__(self, tables: Tables, lineup: Lineup) -> None:
        self._tables = tables
        self._lineup = lineup
        self._due: list[tuple[SequenceId, list[Sequence]]] = []

    def add(self, parent: SequenceId, children: list[Sequence]) -> None:
        """Fork the children from a sequence that has a table; it may end before that."""
        self._due.append((parent, children))

    def take(self) -> tuple[tuple[Fork, ...], list[Sequence]]:
        """The forks of those that have not ended meanwhile, and the children, which run from now on."""
        forks: list[Fork] = []
        children: list[Sequence] = []
        for parent, own in self._due:
            if born := [child for child in own if not child.ended]:
                forks.append(Fork(parent, tuple(child.id for child in born), reserve=1))
                children += born
                self._tables.fork(parent)
        for child in children:
            self._lineup.run(child)
        self._due = []
        return tuple(forks), children

    def children(self) -> set[Sequence]:
        """Those who wait to be forked."""
        return {child for _, own in self._due for child in own if not child.ended}
