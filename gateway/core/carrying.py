"""Carry-over: what of a request is still to be made when the worker that made the rest is gone. Pure.

The client's stream lives at the gateway, and so do its tokens. Whatever a worker had of a request can be computed
again from them: each sample that has not ended goes on from the prompt and its own tokens so far. Draws depend on
(seed, sample, position) only, so the next worker draws what the lost one would have drawn.

`Losses` bounds it: a request that takes every worker with it must not take them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.core.fleet import WorkerProcess
from octavo.records.serve import Submission

FIRST_PAUSE_SECONDS = 0.5
"""Until a worker may be asked again by a request that it has lost or refused; each further time doubles them."""


def remaining(submission: Submission, drawn: Sequence[Sequence[int] | None]) -> tuple[Submission, ...]:
    """What to submit so that a request goes on where it is.

    Samples side by side that have the same tokens share a submission: they are forked from one computation, as they
    were when the request began. All others share what they have in common through the prefix cache.

    Args:
        submission: the whole request.
        drawn: of each sample the tokens that the client has, fewer than `max_tokens`; None where it has ended.
    """
    assert len(drawn) == submission.samples, (len(drawn), submission.samples)
    parts: list[Submission] = []
    if any(tokens is None or tokens for tokens in drawn):  # so the client has heard of the prompt, too
        submission = replace(submission, prompt_logprobs=None)
    for sample, tokens in enumerate(drawn):
        if tokens is None:
            continue
        carried = (*submission.prompt, *tokens)
        last = parts[-1] if parts else None
        if last is not None and last.first_sample + last.samples == sample and last.prompt == carried:
            parts[-1] = replace(last, samples=last.samples + 1)
        else:
            parts.append(
                replace(submission, prompt=carried, samples=1, first_sample=sample, carried_tokens=len(tokens))
            )
    return tuple(parts)


@dataclass(slots=True)
class _Loss:
    times: int
    pause_ends: float


class Losses:
    """The workers that one request has lost, and those that would not have it. Time is an argument.

    Each is asked again after a pause: it may be well, and only the way to it was cut, or its own way to the managers.
    One that really leaves is out of the fleet by then.

    Invariant: at most `most` workers are lost in a row without a token in between; then it is hopeless.
    """

    def __init__(self, most: int) -> None:
        """Give up after `most` losses in a row."""
        self._most = most
        self._in_row = 0
        self._lost: dict[WorkerProcess, _Loss] = {}

    def progressed(self) -> None:
        """The request has got a token."""
        self._in_row = 0

    def lost(self, worker: WorkerProcess, now: float) -> None:
        """A worker is gone, or the way to it."""
        self._in_row += 1
        self._pause(worker, now)

    def refused(self, worker: WorkerProcess, now: float) -> None:
        """A worker takes nothing new, or hands over what it had; nothing speaks against the request."""
        self._pause(worker, now)

    def _pause(self, worker: WorkerProcess, now: float) -> None:
        times = self._lost[worker].times if worker in self._lost else 0
        self._lost[worker] = _Loss(times + 1, now + FIRST_PAUSE_SECONDS * 2**times)

    @property
    def hopeless(self) -> bool:
        """Whether to give up."""
        return self._in_row >= self._most

    def avoided(self, now: float) -> frozenset[WorkerProcess]:
        """The workers that are not to be asked now."""
        return frozenset(worker for worker, loss in self._lost.items() if now < loss.pause_ends)

    def next_chance(self, now: float) -> float | None:
        """When another of them may be asked again; None if there is none to wait for."""
        return min((loss.pause_ends for loss in self._lost.values() if now < loss.pause_ends), default=None)
