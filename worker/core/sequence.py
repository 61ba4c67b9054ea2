"""The scheduler's records: what a gateway asked for, and each token stream that answers it.

A sequence waits, runs (its table is in the manager's books) or has ended. Whenever it loses its table it goes back to
waiting under a new id, so an id never means two tables.
"""

from dataclasses import dataclass, field
from typing import NewType

from octavo.ids import NEVER_RESET, BlockHash, BlockId, CacheEpoch, SequenceId
from octavo.records.serve import Submission

GatewayKey = NewType("GatewayKey", int)
"""One Serve stream of this worker; drawn by the engine, never used twice."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What a gateway submitted, until its last sample has ended."""

    gateway: GatewayKey
    submission: Submission
    arrival: int
    """Place in the order of submissions: the lower, the older."""
    live: list["Sequence"] = field(default_factory=list["Sequence"])
    """Samples that exist and have not ended."""
    cached_tokens: int | None = None
    """Reused by the attach that its first computation stood on; None before that."""
    prefilled: bool = False
    """Whether the gateway was told that the prompt is computed."""
    judged: int = 1
    """Leading positions of the prompt whose logprobs were told, where they are asked for; the first has none."""

    @property
    def judges_prompt(self) -> bool:
        """Whether it must still be told how likely some of the prompt is."""
        submission = self.submission
        return submission.prompt_logprobs is not None and self.judged < submission.output_begins


@dataclass(frozen=True, slots=True)
class Wait:
    """Another sequence is computing what this one needs next."""

    leader: SequenceId
    until: int
    """Positions that the two have in common, whole blocks: when the leader has computed them, they can be reused."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample's token stream.

    [0, computed) lies in the pool, [computed, len(tokens)) is known and waits to be computed. At rest the second range
    is never empty: the newest token is written by the step that draws its successor.
    """

    request: Request
    sample: int
    id: SequenceId
    tokens: list[int]
    """The prompt, then the output."""
    unborn: int = 0
    """Samples that will be forked from this one when its prompt is computed."""
    computed: int = 0
    reused: int = 0
    """Of the computed positions, those found when it was attached or taken from its parent; may end inside a block."""
    told: int = 0
    """Of the computed positions, those that the manager knows of."""
    table: list[BlockId] = field(default_factory=list[BlockId])
    root: BlockHash | None = None
    """Of its hash chain, while it has a table; opaque."""
    forked: bool = False
    """Its last block is about to be, or was, shared with children, and nothing has been reserved for it since."""
    cache_epoch: CacheEpoch = NEVER_RESET
    """Under which it was attached, or its parent was."""
    sent_back: bool = False
    """It lost its table to a shortage, and is let in again only when there is room for all its tokens."""
    setbacks: int = 0
    """Times that this happened since it had last computed more than ever before."""
    furthest: int = 0
    """Most positions that it had computed when it was sent back."""
    passed: int = 0
    """Times that a younger one of its priority came in before it."""
    follows: Wait | None = None
    """What it waits for besides its turn, while it waits."""
    looked_up: tuple[int, int] = (0, 0)
    """While it waits: when it was last looked for among what is published, and how many tokens were found."""
    ended: bool = False

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first."""
        return self.request.arrival, self.sample

    @property
    def priority(self) -> int:
        """Higher is served sooner."""
        return self.request.submission.priority

    @property
    def remaining(self) -> int:
        """Known tokens still to compute: 1 in decode, usually more in prefill."""
        return len(self.tokens) - self.computed

    @property
    def width(self) -> int:
        """Places it takes among the running sequences: its own and those of its unborn samples."""
        return 1 + self.unborn

    @property
    def outputs(self) -> int:
        """Tokens drawn so far, here or at an earlier visit to a worker."""
        return len(self.tokens) - self.request.submission.output_begins

    @property
    def findable(self) -> int:
        """Leading tokens that are looked for among what is published; the last of them is computed in any case.

        Not those that are to be judged: that takes their logits.
        """
        return self.request.judged if self.request.judges_prompt else len(self.tokens)

    def shared_until(self, other: "Sequence", start: int, end: int, block_size: int) -> int:
        """How far another's blocks could serve this one: it could reuse positions up to there.

        Begins at `start` and goes on block by block, as long as the two agree in everything, to `end` at most; the last
        findable token is never shared, since it must be computed.
        """
        end = min(end, self.findable - 1)
        while start + block_size <= end and self._agrees_with(other, start + block_size):
            start += block_size
        return start

    def _agrees_with(self, other: "Sequence", length: int) -> bool:
        return (
            self.tokens[length - 1] == other.tokens[length - 1]  # differs soonest, mostly
            and self.tokens[:length] == other.tokens[:length]
            and self.request.submission.scope.agrees_with(other.request.submission.scope)
        )

    def writable(self, block_size: int) -> int:
        """End of the positions that it may write unasked: a last block is its sequence's own to the end."""
        return self.computed if self.forked else len(self.table) * block_size

    def growth(self, block_size: int) -> int:
        """Blocks to add before all known tokens have a place."""
        return max(0, blocks_for(len(self.tokens), block_size) - len(self.table))


def blocks_for(positions: int, block_size: int) -> int:
    """Blocks that positions [0, positions) lie in."""
    return -(-positions // block_size)
