"""What a step is to draw for a sequence, and which of its tokens are to be judged."""

from worker.core.sequence import Sequence
from worker.core.step import Draw


def draws_after(sequence: Sequence) -> tuple[Draw, ...]:
    """Behind its last known token: a draw for its sample, and one for each that will be born of it."""
    submission = sequence.request.submission
    sampling, begins = submission.sampling, submission.output_begins
    history = tuple(sequence.tokens) if sampling.penalises else ()
    forbidden = tuple(submission.stop_tokens) if sequence.outputs < submission.min_tokens else ()
    position, logprobs = len(sequence.tokens), submission.logprobs
    return tuple(
        Draw(sampling, sample, position, history, begins, forbidden, logprobs)
        for sample in range(sequence.sample, sequence.sample + sequence.width)
    )


def targets_of(sequence: Sequence, start: int, end: int) -> tuple[int, ...]:
    """The prompt's tokens at the positions (start, end], where it was not told yet how likely all of them are."""
    request = sequence.request
    if not request.judges_prompt:
        return ()
    return tuple(sequence.tokens[start + 1 : min(end + 1, request.submission.output_begins)])
