"""A request's outputs as they grow: a worker's reports in, a client's events out.

Invariant: every sample has exactly one Finished, and nothing after it. Tokens that a worker made before it heard
that a stop string was found are dropped and not counted. Who made the tokens makes no difference: a sample may begin
at one worker and end at another.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.core.events import Delta, Finished, PromptLogprobs
from gateway.core.stops import StopScanner
from octavo.records import serve as records
from octavo.records.serve import FinishReason, Prefilled, SampleFinished, TokenLogprobs, Tokens

Said = Tokens | Prefilled | records.PromptLogprobs | SampleFinished
"""What a worker says of one request."""

Told = Delta | PromptLogprobs | Finished
"""What a client is told of it."""


class Detokenizer(Protocol):
    """Token ids of one sample in, text out, never half a character."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens settle."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come."""
        ...


class _Sample:
    """One output: its text so far, and whether it has ended."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self.tokens: list[int] = []
        """Those that were taken."""
        self.finished = False
        self.cumulative_logprob: float | None = None
        """Of the tokens taken, where their logprobs are told."""

    def push(self, tokens: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """(text, tokens taken): with stop strings one token at a time, so that none after one is taken."""
        if not self._scanner.watches:
            self.tokens += tokens
            return self._detokenizer.push(tokens), tokens
        text: list[str] = []
        for taken, token in enumerate(tokens, start=1):
            text.append(self._scanner.push(self._detokenizer.push((token,))))
            if self._scanner.stopped:
                tokens = tokens[:taken]
                break
        self.tokens += tokens
        return "".join(text), tokens

    def flush(self) -> str:
        text = self._scanner.push(self._detokenizer.flush())
        return text if self._scanner.stopped else text + self._scanner.flush()

    @property
    def stopped(self) -> bool:
        return self._scanner.stopped


class Transcript:
    """All samples of one request."""

    def __init__(self, samples: int, detokenizer: Callable[[], Detokenizer], stops: tuple[str, ...]) -> None:
        """Expect `samples` outputs, each with a detokenizer of its own."""
        self._samples = [_Sample(detokenizer(), stops) for _ in range(samples)]
        self._unfinished = samples
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._cached_tokens: int | None = None
        self.output_tokens = 0
        """Of all samples."""

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return self._unfinished == 0

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, as the first worker that computed it reported: what a later one finds is its own affair."""
        return self._cached_tokens or 0

    @property
    def drawn(self) -> list[Sequence[int] | None]:
        """Of each sample its tokens so far; None where it has ended."""
        return [None if sample.finished else sample.tokens for sample in self._samples]

    def moved(self) -> None:
        """The request goes on at another worker: what this one has said in part, the next one says whole."""
        self._prompt_logprobs.clear()

    def add(self, said: Sequence[Said]) -> list[Told]:
        """What is to be told of all this, in order; one Delta for all that a sample gained."""
        if len(said) == 1 and isinstance(said[0], Tokens):  # a reader that keeps up
            return self._grow(said[0])
        told = [event for part in said for event in self._read(part)]
        for grown in _by_sample([part for part in said if isinstance(part, Tokens)]):
            told += self._grow(grown)
        for part in said:
            if isinstance(part, SampleFinished):
                told += self._end(part.sample, part.reason, part.cumulative_logprob)
        return told

    def _read(self, part: Said) -> list[Told]:
        """What is to be told of the prompt, once it is computed."""
        if isinstance(part, records.PromptLogprobs):
            self._prompt_logprobs[part.start - 1 :] = part.tokens  # anew, if another worker began anew
        elif isinstance(part, Prefilled) and self._cached_tokens is None:  # later, another worker computed it again
            self._cached_tokens = part.cached_tokens
            if self._prompt_logprobs:
                return [PromptLogprobs(tuple(self._prompt_logprobs))]
        return []

    def _grow(self, new: Tokens) -> list[Told]:
        sample = self._samples[new.sample]
        if sample.finished:
            return []
        text, taken = sample.push(new.tokens)
        self.output_tokens += len(taken)
        logprobs = new.logprobs
        if logprobs:
            logprobs = logprobs[: len(taken)]
            sample.cumulative_logprob = sum((token.logprob for token in logprobs), sample.cumulative_logprob or 0.0)
        told: list[Told] = [Delta(new.sample, text, taken, logprobs)]
        if sample.stopped:
            self._finish(sample)
            told.append(Finished(new.sample, FinishReason.STOP, sample.cumulative_logprob))
        return told

    def _finish(self, sample: _Sample) -> None:
        sample.finished = True
        self._unfinished -= 1

    def _end(self, at: int, reason: FinishReason, cumulative_logprob: float | None) -> list[Told]:
        sample = self._samples[at]
        if sample.finished:
            return []
        self._finish(sample)
        rest = sample.flush()
        known = sample.cumulative_logprob if cumulative_logprob is None else cumulative_logprob
        end = Finished(at, FinishReason.STOP if sample.stopped else reason, known)
        return [Delta(at, rest, ()), end] if rest else [end]


def _by_sample(runs: Sequence[Tokens]) -> Sequence[Tokens]:
    """One run for each sample that gained something."""
    grown: defaultdict[int, list[Tokens]] = defaultdict(list)
    for new in runs:
        grown[new.sample].append(new)
    return [
        Tokens(
            request=parts[0].request,
            sample=sample,
            tokens=tuple(token for part in parts for token in part.tokens),
            logprobs=tuple(token for part in parts for token in part.logprobs),
        )
        for sample, parts in grown.items()
    ]
