"""What a client hears of its request: Started, PromptLogprobs, Deltas and one Finished per sample, then Usage."""

from dataclasses import dataclass
from typing import NamedTuple

from octavo.ids import WorkerId
from octavo.records.generate import IndexState
from octavo.records.serve import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was admitted and sent to a worker.

    If that worker is lost or leaves, the request goes on at another one, with the same tokens: `Usage` names the last.
    """

    request_id: str
    worker_id: WorkerId
    prompt_tokens: int
    predicted_cached_tokens: int
    """Of the prompt, what the prefix index lets one expect. It knows whole blocks only."""
    index_state: IndexState | None = None
    """What that expectation is worth. None from a gateway that does not tell."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as the worker gets it. Does not travel over gRPC, whose clients ask for it with Tokenize."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely the prompt was: before the first Delta, where that was asked for; of a long one over gRPC in parts."""

    tokens: tuple[TokenLogprobs, ...]
    """Of the prompt's second token and those behind it; the first has none. Of the next ones in each further part."""


class Delta(NamedTuple):
    """What one sample gained. The texts of a sample's deltas, joined, are its whole text.

    A tuple, since there is one a token, and a frozen dataclass takes twice as long to make.
    """

    sample: int
    text: str
    """May be empty: text that could still become part of a character or a stop string is held back."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last word on one sample."""

    sample: int
    reason: FinishReason
    cumulative_logprob: float | None = None
    """Of its tokens together, where logprobs or best_of were asked for; of a beam, its score (gateway.proto)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the request cost; the last event."""

    prompt_tokens: int
    """Counted once, whatever the number of samples."""
    cached_tokens: int
    """Of the prompt, not computed for this request, as the first worker that had it reported."""
    predicted_cached_tokens: int = 0
    """Of the prompt, what that worker was expected to hold: whole blocks."""
    output_tokens: int
    """Of all samples."""
    worker_id: WorkerId
    """Where the request ended."""
    carried_over: int = 0
    """How often it went on at another worker."""
    time_to_first_token_seconds: float
    """From the request's arrival at the gateway."""
    total_seconds: float


Event = Started | PromptLogprobs | Delta | Finished | Usage
