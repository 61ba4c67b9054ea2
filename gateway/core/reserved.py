"""What one gateway has at one worker: its requests there, and their sums, kept as requests come and go.

Whoever routes asks for the sums of every worker at every request, so they are never counted anew. They are kept by how
far the worker's reports contain a request: not, for it was sent after the last one; perhaps, for that report may have
left before the request arrived; for certain, from the second report on. A report moves all requests on together.

Invariant (`check`): the sums are those of the requests that are here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NewType

from gateway.core.in_flight import Blocks, Sent
from octavo.ids import BlockHash

ReservationId = NewType("ReservationId", int)


@dataclass(slots=True)
class Reservation:
    """One request at a worker. All counts are tokens."""

    prompt_tokens: int
    prefill_tokens: int
    """Of the prompt, what no hit covers."""
    output_tokens: int
    blocks: Blocks
    made_at_report: int
    computed: bool = False
    """The prompt waits no longer."""

    @property
    def new_positions(self) -> int:
        """That it may come to hold, but for its hits."""
        return self.prefill_tokens + self.output_tokens


@dataclass(slots=True)
class Sums:
    """Of some requests. All but `prompts` are tokens."""

    prompts: int = 0
    """That wait, or are being computed."""
    prompt_tokens: int = 0
    """Of those."""
    prefill_tokens: int = 0
    """Of those, what no hit covers."""
    settling_tokens: int = 0
    """What no hit covered of prompts that were computed."""
    new_positions: int = 0

    def count(self, one: Reservation, times: int = 1) -> None:
        """Count a request in, or, -1 times, out."""
        self.new_positions += times * one.new_positions
        if one.computed:
            self.settling_tokens += times * one.prefill_tokens
        else:
            self.prompts += times
            self.prompt_tokens += times * one.prompt_tokens
            self.prefill_tokens += times * one.prefill_tokens

    def absorb(self, other: "Sums") -> None:
        """Count what those others are in as well."""
        self.prompts += other.prompts
        self.prompt_tokens += other.prompt_tokens
        self.prefill_tokens += other.prefill_tokens
        self.settling_tokens += other.settling_tokens
        self.new_positions += other.new_positions


class Reserved:
    """The requests of this gateway at one worker process."""

    def __init__(self) -> None:
        self._requests: dict[ReservationId, Reservation] = {}
        self._beginnings: dict[BlockHash, dict[ReservationId, Sent]] = {}
        """The prompts by their first block."""
        self._reports = 0
        self.unseen = Sums()
        """Of the requests that no report contains."""
        self.perhaps = Sums()
        """Of those that the last report may contain."""
        self.contained = Sums()
        """Of those that the last report contains."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ReservationId]:
        return iter(self._requests)

    def alike(self, blocks: Blocks) -> Collection[Sent]:
        """The prompts that have a block in common with one of these blocks: those that have the first one."""
        return self._beginnings.get(blocks[0], {}).values() if blocks else ()

    def reported(self) -> None:
        """The worker has reported once more."""
        self._reports += 1
        self.contained.absorb(self.perhaps)
        self.perhaps, self.unseen = self.unseen, Sums()

    def add(
        self, reservation: ReservationId, *, prompt_tokens: int, prefill_tokens: int, output_tokens: int, blocks: Blocks
    ) -> None:
        """A request has been sent."""
        one = Reservation(prompt_tokens, prefill_tokens, output_tokens, blocks, made_at_report=self._reports)
        self._requests[reservation] = one
        self.unseen.count(one)
        if blocks:
            self._beginnings.setdefault(blocks[0], {})[reservation] = Sent(blocks, computed=False)

    def compute(self, reservation: ReservationId) -> Reservation | None:
        """The prompt of a request has been computed. None if it was before, or the request is not here."""
        one = self._requests.get(reservation)
        if one is None or one.computed:
            return None
        sums = self._sums_with(one)
        sums.count(one, -1)
        one.computed = True
        sums.count(one)
        if one.blocks:
            self._beginnings[one.blocks[0]][reservation] = Sent(one.blocks, computed=True)
        return one

    def end(self, reservation: ReservationId) -> Reservation | None:
        """A request has ended. None if it is not here."""
        one = self._requests.pop(reservation, None)
        if one is None:
            return None
        self._sums_with(one).count(one, -1)
        if one.blocks:
            alike = self._beginnings[one.blocks[0]]
            del alike[reservation]
            if not alike:
                del self._beginnings[one.blocks[0]]
        return one

    def may_be_reported(self, one: Reservation) -> bool:
        """Whether the last report may contain a request."""
        return self._reports > one.made_at_report

    def check(self) -> None:
        """Assert that the sums and the prompts are those of the requests, counted anew."""
        anew = Reserved()
        anew._reports = self._reports
        for reservation, one in self._requests.items():
            anew._sums_with(one).count(one)
            if one.blocks:
                anew._beginnings.setdefault(one.blocks[0], {})[reservation] = Sent(one.blocks, one.computed)
        for name in ("unseen", "perhaps", "contained", "_beginnings"):
            assert getattr(self, name) == getattr(anew, name), (name, getattr(self, name), getattr(anew, name))

    def _sums_with(self, one: Reservation) -> Sums:
        match self._reports - one.made_at_report:
            case 0:
                return self.unseen
            case 1:
                return self.perhaps
            case _:
                return self.contained
