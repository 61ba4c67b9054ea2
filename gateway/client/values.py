"""What a gateway answers, as values."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.routing import Cost
from octavo.errors import OctavoError
from octavo.ids import WorkerId
from octavo.records.fleet import WorkerInfo
from octavo.records.generate import IndexState
from octavo.records.insight import PromptExplanation
from octavo.records.serve import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, where they were asked for."""
    cumulative_logprob: float | None = None
    """Of its tokens together, where logprobs or best_of were asked for; of a beam, its score (gateway.proto)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request's outputs and its bill."""

    samples: tuple[Sample, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's second token and those behind it, where they were asked for."""

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.samples[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """One a sample."""
        return tuple(sample.text for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that some worker serves now."""

    name: str
    max_model_tokens: int
    """Longest sequence, prompt and output together, that the largest of its workers takes."""
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExplanation:
    """What a request would find at a worker, and cost there."""

    worker_id: WorkerId
    cache: PromptExplanation | None
    """What it has of the prompt, and why no more; None: its cache manager did not answer."""
    predicted_cached_tokens: int
    """What the gateway expects it to hold when the request's turn comes, in whole blocks."""
    cost: Cost | None
    """In tokens of work; None: it was not judged, since it is draining, too small, or one of many in a large fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the workers have of a prompt, and where its request would go."""

    prompt_tokens: int
    workers: tuple[WorkerExplanation, ...]
    """Those that serve the model and of whom a cache manager or the routing tells."""
    chosen: WorkerId | None
    """Where it would be sent, of equals one at random; None: nobody takes it now."""
    index_state: IndexState | None
    """Of the look-up that this was judged with; None where nothing was looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """What one gateway has in hand, and has done since its start."""

    running_requests: int
    waiting_requests: int
    requests: int
    refused: int
    predicted_cached_tokens: int
    """In whole blocks."""
    delivered_cached_tokens: int
    """To the token: of each prompt up to a block less one token more."""
    index_state: IndexState | None
    """Of the last look-up in the prefix index; None where this client does not know its name."""
    failed_lookups: int
    undelivered_cached_tokens: int
    """Predicted, and evicted or forgotten when the request's turn came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The fleet as one gateway sees it."""

    workers: tuple[WorkerInfo, ...]
    gateway: GatewayLoad


Ended = OctavoError | TimeoutError
"""What a request of a batch ended with instead of its usage."""


def completion_of(events: Iterable[Event]) -> Completion:
    """A request's events as one answer."""
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    ends: dict[int, Finished] = {}
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage | None = None
    for event in events:
        match event:
            case PromptLogprobs():
                prompt_logprobs += event.tokens
            case Delta():
                deltas[event.sample].append(event)
            case Finished():
                ends[event.sample] = event
            case Usage():
                usage = event
            case Started():
                pass
    assert usage is not None, "the gateway ended a request without its usage"
    samples = tuple(_sample(deltas[at], ends[at]) for at in sorted(ends))
    return Completion(samples=samples, usage=usage, prompt_logprobs=prompt_logprobs)


def completions_of(requests: int, outcomes: Iterable[tuple[int, Event | Ended]]) -> tuple[Completion | Ended, ...]:
    """What each request of a batch came to."""
    events: list[list[Event]] = [[] for _ in range(requests)]
    failed: dict[int, Ended] = {}
    for at, outcome in outcomes:
        if isinstance(outcome, Exception):
            failed[at] = outcome
        else:
            events[at].append(outcome)
    return tuple(failed.get(at) or completion_of(heard) for at, heard in enumerate(events))


def _sample(deltas: list[Delta], end: Finished) -> Sample:
    return Sample(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=end.reason,
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        cumulative_logprob=end.cumulative_logprob,
    )
