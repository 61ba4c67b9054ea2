"""What one forward pass over a batch is asked to do, and what comes out: plain values, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.ids import BlockId, SequenceId
from octavo.records import BlockCopy, SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample. Its randomness is a function of (seed, sample, position) and of nothing else."""

    sampling: SamplingParams
    sample: int
    """Which of the request's n outputs."""
    position: int
    """Index in the sequence that the drawn token will have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive new tokens of one sequence: a part of its prefill, or the one token of a decode step."""

    sequence: SequenceId
    start: int
    """Position of the first token; [0, start) lies in the pool already."""
    tokens: tuple[int, ...]
    table: Sequence[BlockId]
    """Blocks of [0, start + len(tokens)) at least."""
    draws: tuple[Draw, ...] = ()
    """What to draw from the logits of the last token; none in the middle of a prefill, n after its end."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged batch. The copies are made, in order, before anything is written."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The drawn tokens: one tuple a chunk, one token a draw, in the plan's order."""

    tokens: tuple[tuple[int, ...], ...]
