"""How much of a prompt a worker need not compute: what it holds, and what it is computing for a prompt before it.

The prefix index learns of a block when it has been computed. A burst comes faster than that, so a gateway also goes by
what it has sent where: the blocks of a prompt that was sent to a worker and has not ended yet are there, or will be by
the time they are needed, since the worker computes no block twice at once. What other gateways have sent, they claim
beside the index for a few seconds.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.hashing import ChainRoot, block_hashes, hit_candidates
from octavo.ids import BlockHash
from octavo.records.fleet import WorkerInfo
from octavo.records.scope import Scope

Blocks = tuple[BlockHash, ...]
"""The hashes of a prompt's full blocks, in order."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The leading tokens of a prompt that a worker need not compute for it."""

    cached_tokens: int
    """Computed already."""
    coming_tokens: int = 0
    """Behind those: still to be computed, but for a prompt that was sent there before."""
    sharers: int = 0
    """Prompts that this gateway has there and that begin with all of it."""

    @property
    def tokens(self) -> int:
        """That it covers when the prompt's turn comes."""
        return self.cached_tokens + self.coming_tokens


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that is at a worker."""

    blocks: Blocks
    computed: bool


class PromptBlocks:
    """One prompt's blocks under the hash chain of whichever worker asks; each chain is computed once."""

    def __init__(self, prompt: Sequence[int], scope: Scope) -> None:
        self._prompt = prompt
        self._scope = scope
        self._chains: dict[ChainRoot, Blocks] = {}

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self._prompt)

    def of(self, worker: WorkerInfo) -> Blocks:
        """All full blocks."""
        root = worker.chain_root(self._scope)
        if root not in self._chains:
            size = worker.pool.block_size
            self._chains[root] = tuple(block_hashes(root.hash(), self._prompt, size, self._scope.seam(size)))
        return self._chains[root]

    def wanted(self, worker: WorkerInfo) -> Blocks:
        """The full blocks that may be found there: at least one token is left to compute."""
        return self.of(worker)[: hit_candidates(len(self._prompt), worker.pool.block_size)]

    def hit(self, worker: WorkerInfo, indexed_tokens: int, sent: Collection[Sent], claimed_tokens: int = 0) -> Hit:
        """What this prompt will find at a worker.

        Args:
            worker: where.
            indexed_tokens: what the index says that it holds.
            sent: what this gateway sent there.
            claimed_tokens: how far it will reach, by what any gateway sent there. Nobody says that it was computed.
        """
        block_size, wanted = worker.pool.block_size, self.wanted(worker)
        computed = reached = indexed_tokens // block_size
        for prompt in sent:
            if prompt.computed:
                computed = _reach(wanted, prompt.blocks, computed)
            reached = _reach(wanted, prompt.blocks, reached)
        reached = max(reached, computed, claimed_tokens // block_size)
        sharers = sum(_agree(wanted, prompt.blocks, reached) for prompt in sent) if reached else 0
        return Hit(computed * block_size, (reached - computed) * block_size, sharers)


def _agree(wanted: Blocks, other: Blocks, count: int) -> bool:
    """Whether the first `count` blocks, at least one and no more than are wanted, are the same."""
    return len(other) >= count and wanted[count - 1] == other[count - 1]


def _reach(wanted: Blocks, other: Blocks, known: int) -> int:
    """The larger of `known` and the leading blocks in common. Few prompts share the one block that is looked at."""
    if not (known < len(wanted) and known < len(other) and wanted[known] == other[known]):
        return known
    return shared_blocks(wanted, other)


def shared_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Leading blocks that two prompts have in common. Where two hashes are equal, so are all before them."""
    return bisect_left(range(min(len(one), len(other))), x=True, key=lambda at: one[at] != other[at])
