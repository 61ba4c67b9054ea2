"""What the exchange under way asks for, and what of it the grant has not met."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from octavo.ids import SequenceId
from octavo.records import Attach, Reservation
from worker.core.sequence import Sequence
from worker.core.shares import Share
from worker.core.tables import Tables


@dataclass(frozen=True, slots=True)
class Asked:
    """One plan."""

    shares: list[Share] = field(default_factory=list[Share])
    """Of the step that is to come, also of those who need nothing for theirs."""
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

    def shortage(self, unmet: Container[SequenceId], block_size: int) -> int:
        """About how many blocks are missing for the unmet reserves of those that still run."""
        short = (share.sequence for share in self.shares if share.sequence.id in unmet)
        return sum(max(1, sequence.growth(block_size)) for sequence in short if not sequence.ended)

    def granted(self, tables: Tables) -> list[Share]:
        """The shares of those who have a table."""
        return [share for share in self.shares if share.sequence in tables]

    def all_found_a_place(self, tables: Tables) -> bool:
        """Whether everyone attached has a table, or follows somebody who computes what it needs."""
        return all(sequence in tables or sequence.follows is not None for sequence in self.attached)


def _attach(sequence: Sequence) -> Attach:
    submission = sequence.request.submission
    tokens = tuple(sequence.tokens[: sequence.findable])
    return Attach(sequence.id, tokens, submission.scope, submission.tenant, submission.retain_seconds)
