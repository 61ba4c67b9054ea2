"""A prefix index in memory, for one process: answers as a whole one in Redis does (tests/contract)."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from gateway.claims import ClaimCounts
from gateway.core.in_flight import PromptBlocks
from gateway.prefix_lookup import Hits
from octavo.ids import BlockHash, Epoch, WorkerId
from octavo.index_schema import CLAIM_SECONDS
from octavo.records.fleet import WorkerInfo
from octavo.records.generate import IndexState


class MemoryLookup:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = IndexState.EXACT
        self.failures = 0
        self.claim_counts = ClaimCounts()
        self._clock = clock
        self._published: dict[tuple[WorkerId, Epoch], set[BlockHash]] = {}
        self._claims: dict[tuple[WorkerId, Epoch], dict[BlockHash, float]] = {}
        """When each claim ends."""

    def publish(self, worker: WorkerId, epoch: Epoch, hashes: Iterable[BlockHash]) -> None:
        self._published.setdefault((worker, epoch), set()).update(hashes)

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        hits = Hits()
        for worker in workers:
            wanted, books, size = prompt.wanted(worker), (worker.worker_id, worker.epoch), worker.pool.block_size
            held = _leading(wanted, self._published.get(books, ()))
            claimed = held + _leading(wanted[held:], self._live_claims(books))
            if held:
                hits.tokens[worker.worker_id] = held * size
            if claimed > held:
                hits.claimed[worker.worker_id] = claimed * size
        return hits

    def claim(self, worker: WorkerInfo, blocks: Sequence[BlockHash]) -> None:
        self.claim_counts.blocks += len(blocks)
        books = (worker.worker_id, worker.epoch)
        self._claims[books] = self._live_claims(books) | dict.fromkeys(blocks, self._clock() + CLAIM_SECONDS)

    def _live_claims(self, books: tuple[WorkerId, Epoch]) -> dict[BlockHash, float]:
        return {block: ends for block, ends in self._claims.get(books, {}).items() if ends > self._clock()}


def _leading(wanted: Sequence[BlockHash], known: Iterable[BlockHash]) -> int:
    """How many of the wanted blocks are known, up to the first that is not."""
    known = set(known)
    return sum(1 for _ in takewhile(known.__contains__, wanted))
