"""What an exchange under way asks for."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from octavo.ids import SequenceId
from octavo.records.attend import Attach, Reservation
from worker.core.sequence import Sequence
from worker.core.tables import Tables


@dataclass(frozen=True, slots=True)
class Asked:
    """One exchange's questions."""

    children: list[Sequence] = field(default_factory=list[Sequence])
    """To be forked."""
    attached: list[Sequence] = field(default_factory=list[Sequence])
    """To be attached."""
    reserves: tuple[Reservation, ...] = ()

    def attaches(self) -> tuple[Attach, ...]:
        """As the manager is asked."""
        return tuple(map(_attach, self.attached))

    def met(self, unmet: Container[SequenceId]) -> Iterator[SequenceId]:
        """Whose reserve was met."""
        return (wish.sequence for wish in self.reserves if wish.sequence not in unmet)

    def short(self, unmet: Container[SequenceId]) -> list[SequenceId]:
        """Whose reserve was not."""
        return [wish.sequence for wish in self.reserves if wish.sequence in unmet]


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the last grant could not meet."""

    sequences: list[Sequence]
    newcomers: list[Sequence]
    """Those who came with it."""

    def blocks(self, tables: Tables, block_size: int) -> int:
        """About how many are missing for those that still run."""
        return sum(max(1, one.growth(block_size)) for one in self.sequences if one in tables)


def _attach(sequence: Sequence) -> Attach:
    submission = sequence.request.submission
    tokens = tuple(sequence.tokens[: sequence.findable])
    return Attach(sequence.id, tokens, submission.scope, submission.tenant, submission.retain_seconds)
