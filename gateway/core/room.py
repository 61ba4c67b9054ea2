"""Whether a worker has room for a prompt, beside what is there and what was let in for there. Pure.

A request that was let in looks its prompt up before it is sent, and a burst is let in within one turn. So the room that
a request was let in for is *taken* at once, and given back when its worker counts it, or when it goes another way. It
may be sent to another worker than the one that had room for it; then both are short of it for no longer than a look-up.

Outputs are not counted: few requests use all that they may, and a worker that runs short sends the newest back. What a
prompt has in common with what this gateway has sent or let in for there takes no room twice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.fleet import Fleet, Standing, WorkerProcess, process_of
from gateway.core.in_flight import PromptBlocks, Sent
from octavo.records.fleet import WorkerInfo


@dataclass(frozen=True, slots=True)
class _Taken:
    worker: WorkerProcess
    tokens: int


class Rooms:
    """Room at the workers of a fleet, and whom it was taken for. A request is known by its one PromptBlocks."""

    def __init__(self, fleet: Fleet) -> None:
        """Room as `fleet` sees it."""
        self._fleet = fleet
        self._taken: dict[PromptBlocks, _Taken] = {}

    @property
    def taken(self) -> int:
        """Requests for which room is taken."""
        return len(self._taken)

    def take(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> bool:
        """Take room for a prompt at whichever of `workers` has most of it to spare; False if none has enough."""
        assert prompt not in self._taken, "room is taken once"
        standings = self._fleet.standings([worker.worker_id for worker in workers])
        free = self._free(standings)
        for needed in (self._whole, self._unshared):  # hashing a prompt is dear, and seldom needed
            wanted = [needed(prompt, standing) for standing in standings]
            spare = [have - want for have, want in zip(free, wanted, strict=True)]
            best = max(range(len(spare)), key=spare.__getitem__, default=None)
            if best is not None and spare[best] >= 0:
                self._taken[prompt] = _Taken(process_of(standings[best].info), wanted[best])
                return True
        return False

    def give_back(self, prompt: PromptBlocks) -> None:
        """Whoever took room for this prompt needs it no longer; saying so again changes nothing."""
        self._taken.pop(prompt, None)

    def _free(self, standings: Sequence[Standing]) -> list[int]:
        """Positions at each worker that nobody holds, waits for or was let in for. May be less than none."""
        coming: Counter[WorkerProcess] = Counter()
        for taken in self._taken.values():
            coming[taken.worker] += taken.tokens
        return [_unclaimed(standing) - coming[process_of(standing.info)] for standing in standings]

    def _whole(self, prompt: PromptBlocks, standing: Standing) -> int:
        return prompt.tokens

    def _unshared(self, prompt: PromptBlocks, standing: Standing) -> int:
        """Tokens of a prompt that a worker must find room for: all but those it has in common with others there."""
        info, process = standing.info, process_of(standing.info)
        sent = self._fleet.hits(prompt, [info]).get(info.worker_id)
        let_in = [Sent(other.of(info), computed=False) for other, at in self._taken.items() if at.worker == process]
        return prompt.tokens - prompt.hit(info, 0 if sent is None else sent.tokens, let_in).tokens


def _unclaimed(standing: Standing) -> int:
    """Positions at a worker that nothing which is there holds or waits for."""
    pool, held_blocks = standing.info.pool, standing.info.load.held_blocks
    return (pool.num_blocks - held_blocks) * pool.block_size - standing.queued_tokens - standing.settling_tokens
