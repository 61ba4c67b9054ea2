"""Who may compute how much in a step, and the chunk that comes of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.records import Reservation
from worker.core.draws import draws_after, targets_of
from worker.core.sequence import Sequence
from worker.core.step import Chunk


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a step's budget."""

    sequence: Sequence
    count: int
    """Tokens that it may compute, once there is room for them."""

    @property
    def computes(self) -> int:
        """Tokens that it will compute: a prefix hit may have left fewer than were foreseen."""
        return min(self.count, self.sequence.remaining)

    def has_room(self, block_size: int) -> bool:
        """Whether it may compute them unasked. What is about to be forked may: the fork reserves its position."""
        return self.count <= self.sequence.room(block_size)

    def within_room(self, block_size: int) -> "Share":
        """As much of it as may be computed unasked."""
        return Share(self.sequence, min(self.count, self.sequence.room(block_size)))

    def reservation(self) -> Reservation:
        """The room to ask for, counted from what the manager knows."""
        return Reservation(self.sequence.id, self.sequence.computed + self.count - self.sequence.told)

    def chunk(self) -> Chunk:
        """The tokens; behind the last known one, a draw for the sample and for each that will be born of it."""
        sequence = self.sequence
        start, known = sequence.computed, len(sequence.tokens)
        end = start + self.computes
        return Chunk(
            sequence=sequence.id,
            start=start,
            tokens=tuple(sequence.tokens[start:end]),
            table=sequence.table,
            draws=draws_after(sequence) if end == known else (),
            targets=targets_of(sequence, start, end),
            top_logprobs=sequence.request.submission.prompt_logprobs or 0,
        )


def share_out(running: Iterable[Sequence], budget: int) -> list[Share]:
    """Shares of the running sequences, oldest first. Decodes are served before prefills, the oldest before others."""
    shares: list[Share] = []
    for sequence in sorted(running, key=lambda sequence: (sequence.remaining > 1, sequence.age)):
        if budget > 0:
            shares.append(Share(sequence, min(sequence.remaining, budget)))
            budget -= shares[-1].count
    return sorted(shares, key=lambda share: share.sequence.age)
