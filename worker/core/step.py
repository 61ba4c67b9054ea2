"""What one forward pass over a batch is asked to do, and what comes out: plain values, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.ids import BlockId, SequenceId
from octavo.records.attend import BlockCopy
from octavo.records.sampling import SamplingParams
from octavo.records.serve import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample. Its randomness is a function of (seed, sample, position) and of nothing else."""

    sampling: SamplingParams
    sample: int
    """Which of the request's n outputs."""
    position: int
    """Index in the sequence that the drawn token will have."""
    history: tuple[int, ...] = ()
    """The tokens before it, where penalties are about them."""
    output_begins: int = 0
    """Where in the history the prompt ends."""
    forbidden: tuple[int, ...] = ()
    """Tokens that must not come here."""
    logprobs: int | None = None
    """None: not wanted. Else how many of the likeliest are told with the drawn token's."""
    continuations: int = 0
    """If not 0, nothing is drawn: so many of the best continuations are told."""

    @property
    def shaped(self) -> bool:
        """Whether it is drawn from other logits than the model's."""
        return bool(self.history or self.forbidden or self.sampling.logit_bias)


class Continuation(NamedTuple):
    """A token that may come next."""

    token: int
    logprob: float
    """Logarithm of its probability, shaped as the request asks."""


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
    drafts: int = 0
    """How many of the last tokens are guesses. Then there is a draw behind each of them and one before, in order."""
    targets: tuple[int, ...] = ()
    """Tokens to judge: how likely the first of them is after the chunk's first token, the second after the second."""
    top_logprobs: int = 0
    """How many of the likeliest are told with each of them."""

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
    """What a step drew and judged, in the plan's order: one tuple a chunk."""

    tokens: tuple[tuple[int, ...], ...]
    """One a draw; none where continuations are told."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict[int, tuple[TokenLogprobs, ...]])
    """By the place of a chunk whose draws want them: one a draw."""
    judged: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict[int, tuple[TokenLogprobs, ...]])
    """By the place of a chunk with targets: one a target."""
    continuations: dict[int, tuple[Continuation, ...]] = field(default_factory=dict[int, tuple[Continuation, ...]])
    """By the place of a chunk whose draw wants them: best first."""
