"""When a sample ends. A stop token is no part of the output: it is not told, not counted, and never written."""

from octavo.records import FinishReason, Submission


def reason_to_stop(submission: Submission, outputs: int, token: int) -> FinishReason | None:
    """Why a sample ends with `token`, drawn after `outputs` tokens; None if it goes on."""
    if token in submission.stop_tokens:
        return FinishReason.STOP
    if outputs + 1 >= submission.max_tokens:
        return FinishReason.LENGTH
    return None
