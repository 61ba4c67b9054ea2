"""What a step is to draw for a sequence, and which of its tokens are to be judged."""

from worker.core.beams import continuations_wanted
from worker.core.sequence import Sequence
from worker.core.step import Draw


def draws_after(sequence: Sequence, drafts: tuple[int, ...] = ()) -> tuple[Draw, ...]:
    """Behind its last known token: a draw for its sample, and one for each that will be born of it; one for a beam.

    Behind each of the drafts one more, as it will be if those before it turn out right.
    """
    searches = sequence.request.submission.beam is not None
    samples = range(sequence.sample, sequence.sample + (1 if searches else sequence.width))
    return tuple(_draw(sequence, sample, drafts[:guessed]) for guessed in range(len(drafts) + 1) for sample in samples)


def _draw(sequence: Sequence, sample: int, guessed: tuple[int, ...]) -> Draw:
    submission = sequence.request.submission
    beam = submission.beam
    early = sequence.outputs + len(guessed) < submission.min_tokens
    return Draw(
        submission.sampling,
        sample,
        position=len(sequence.tokens) + len(guessed),
        history=(*sequence.tokens, *guessed) if submission.sampling.penalises else (),
        output_begins=submission.output_begins,
        forbidden=tuple(submission.stop_tokens) if early else (),
        logprobs=submission.logprobs,
        continuations=0 if beam is None else continuations_wanted(beam, submission.stop_tokens),
    )


def targets_of(sequence: Sequence, start: int, end: int) -> tuple[int, ...]:
    """The prompt's tokens at the positions (start, end], where it was not told yet how likely all of them are."""
    request = sequence.request
    if not request.judges_prompt:
        return ()
    return tuple(sequence.tokens[start + 1 : min(end + 1, request.submission.output_begins)])
