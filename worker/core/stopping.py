"""When a sample ends. A stop token is no part of the output: it is not told, not counted, and never written."""

from octavo.records.serve import FinishReason, Submission


def reason_to_stop(submission: Submission, outputs: int, token: int) -> FinishReason | None:
    """Why a sample ends with `token`, drawn after `outputs` tokens; None if it goes on."""
    if token in submission.stop_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if is_last(submission, outputs) else None


def is_last(submission: Submission, outputs: int) -> bool:
    """Whether the token drawn after `outputs` tokens is the last, whichever it is."""
    return outputs + 1 >= submission.max_tokens
