"""Who may compute how much in a step, and the chunk that comes of it.

What the step after the one under way will need is known before that one has drawn: one position more for each that it
lets draw (`after`). Whether somebody stops there is not; then its reserve was for nothing, and goes with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.records.attend import Reservation
from worker.core import order
from worker.core.draws import draws_after, targets_of
from worker.core.sequence import Sequence
from worker.core.step import Chunk
from worker.core.stopping import is_last


@dataclass(frozen=True, slots=True)
class Prospect:
    """A sequence as it is, or as it will be after the step under way."""

    sequence: Sequence
    computed: int
    remaining: int
    """Known tokens to compute from there on."""


def now(sequence: Sequence) -> Prospect:
    """As it is."""
    return Prospect(sequence, sequence.computed, sequence.remaining)


def within_room(sequence: Sequence, block_size: int) -> Prospect:
    """As it is, as far as it has room."""
    room = sequence.writable(block_size) - sequence.computed
    return Prospect(sequence, sequence.computed, min(sequence.remaining, room))


def after(sequence: Sequence, chunk: Chunk) -> Prospect | None:
    """As it will be when the step with this chunk is over; None if it has ended then, or will or may fork first.

    If it guesses, as it will be if all guesses are right: that takes most room.
    """
    draws = len(chunk.draws) - chunk.drafts
    if (
        draws > 1
        or (draws and chunk.draws[0].continuations)
        or (draws == 1 and is_last(sequence.request.submission, sequence.outputs))
    ):
        return None
    return Prospect(sequence, chunk.end, len(sequence.tokens) + chunk.drafts + draws - chunk.end)


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a step's budget: `count` tokens from position `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position after the last of them."""
        return self.start + self.count

    def reservation(self) -> Reservation:
        """The room to ask for, counted from what the manager knows."""
        return Reservation(self.sequence.id, self.end - self.sequence.told)

    def chunk(self, drafts: tuple[int, ...] = ()) -> Chunk:
        """The tokens; behind the last known one, a draw for the sample and for each that will be born of it.

        Drafts stand behind the last known token, and are no part of the share.
        """
        sequence, start, end = self.sequence, self.start, self.end
        return Chunk(
            sequence=sequence.id,
            start=start,
            tokens=(*sequence.tokens[start:end], *drafts),
            table=tuple(sequence.table),
            draws=draws_after(sequence, drafts) if end == len(sequence.tokens) else (),
            drafts=len(drafts),
            targets=targets_of(sequence, start, end),
            top_logprobs=sequence.request.submission.prompt_logprobs or 0,
        )


def share_out(prospects: Iterable[Prospect], budget: int) -> list[Share]:
    """Who computes how much: decodes before prefills, and each kind in the order of service."""
    shares: list[Share] = []
    for prospect in sorted(prospects, key=lambda one: (one.remaining > 1, order.service(one.sequence))):
        if budget > 0:
            shares.append(Share(prospect.sequence, prospect.computed, min(prospect.remaining, budget)))
            budget -= shares[-1].count
    return sorted(shares, key=lambda share: order.service(share.sequence))
