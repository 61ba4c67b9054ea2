"""Gateway <-> worker: submissions, and what one step produced."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from octavo.errors import OctavoError
from octavo.ids import NOBODY, TenantTag
from octavo.records.sampling import GREEDY, BeamSearch, SamplingParams
from octavo.records.scope import PLAIN, Scope


class TokenLogprobs(NamedTuple):
    """How likely a token was, and which were the likeliest in its place: natural logarithms of probabilities.

    Under the model's own distribution, that of its logits as they are.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logarithm), the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as a worker sees it: token ids only."""

    request: int
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int = 1
    sampling: SamplingParams = GREEDY
    stop_tokens: frozenset[int] = frozenset()
    scope: Scope = PLAIN
    tenant: TenantTag = NOBODY
    retain_seconds: int = 0
    """See Attach."""
    priority: int = 0
    """Higher is served sooner, an i32."""
    first_sample: int = 0
    """Number of the first of `samples`, the others follow: 0 unless an earlier visit to a worker ended some."""
    carried_tokens: int = 0
    """Of the end of `prompt`, what an earlier visit drew: output as to `max_tokens` and everything else."""
    min_tokens: int = 0
    """Output tokens before which no stop token is drawn."""
    logprobs: int | None = None
    """None: not wanted. Else how many of the likeliest are listed with each output token."""
    prompt_logprobs: int | None = None
    """Likewise for the prompt's tokens from the second on."""
    beam: BeamSearch | None = None
    """`samples` are then the best that it finds."""

    @property
    def output_begins(self) -> int:
        """Position of the first token of output, wherever it was drawn."""
        return len(self.prompt) - self.carried_tokens

    @property
    def sequences(self) -> int:
        """That run for it side by side: its samples, or the beams of its search."""
        return self.samples if self.beam is None else self.beam.width

    @property
    def longest_sequence(self) -> int:
        """Positions that prompt and output may come to."""
        return self.output_begins + self.max_tokens


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"


class Tokens(NamedTuple):
    """New tokens of one sample. A tuple: every step makes one for each of its samples."""

    request: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, where they were asked for."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive tokens of a prompt. Every position is told once, in order, from the second on."""

    request: int
    start: int
    """Position of the first."""
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt has been computed, all but the `cached_tokens` of it that were found in published blocks."""

    request: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The last word on one sample."""

    request: int
    sample: int
    reason: FinishReason
    cumulative_logprob: float | None = None
    """Of a beam: its score before the length penalty."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that ends with an error."""

    request: int
    error: OctavoError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Everything one step produced for one gateway."""

    tokens: tuple[Tokens, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    finished: tuple[SampleFinished, ...] = ()
    refused: tuple[Refusal, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
