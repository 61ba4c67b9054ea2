"""What a worker can run at all: a submission is judged once, before it waits."""

from octavo.errors import InvalidRequest
from octavo.records.attend import MAX_RETAIN_SECONDS
from octavo.records.fleet import PoolSpec
from octavo.records.scope import Scope
from octavo.records.serve import Submission
from octavo.sampling import require_beam, require_top_logprobs
from worker.core.beams import continuations_wanted

_LAST_SAMPLE = (1 << 16) - 1
"""The highest number that the first sample of a submission may have."""


def require_runnable(submission: Submission, pool: PoolSpec, max_samples: int) -> None:
    """Raises InvalidRequest, naming the field and both numbers, for what could never run to its end here."""
    _require_tokens(submission.prompt, pool.vocab_size)
    _require_text(submission.scope)
    _require_within("max_tokens", submission.max_tokens, pool.capacity_tokens)
    _require_within("samples", submission.samples, max_samples)
    if not 0 <= submission.retain_seconds <= MAX_RETAIN_SECONDS:
        raise InvalidRequest(f"retain_seconds: {submission.retain_seconds}, wanted from 0 to {MAX_RETAIN_SECONDS}")
    if not 0 <= submission.first_sample <= _LAST_SAMPLE:
        raise InvalidRequest(f"first_sample: {submission.first_sample}, wanted from 0 to {_LAST_SAMPLE}")
    _require_carried(submission)
    _require_sampling(submission, pool.vocab_size, max_samples)
    if submission.longest_sequence > pool.capacity_tokens:
        raise InvalidRequest(
            f"prompt + max_tokens: {submission.output_begins} + {submission.max_tokens} = "
            f"{submission.longest_sequence} tokens, a sequence here can have {pool.capacity_tokens}"
        )


def _require_carried(submission: Submission) -> None:
    """What is carried on has a prompt before it, and something left to draw."""
    most = min(len(submission.prompt), submission.max_tokens) - 1
    if submission.carried_tokens > most:
        raise InvalidRequest(
            f"carried_tokens: {submission.carried_tokens}, at most {most} of {len(submission.prompt)} tokens "
            f"with max_tokens {submission.max_tokens}"
        )


def _require_sampling(submission: Submission, vocab_size: int, max_samples: int) -> None:
    if not 0 <= submission.min_tokens <= submission.max_tokens:
        raise InvalidRequest(
            f"min_tokens: {submission.min_tokens}, wanted from 0 to max_tokens ({submission.max_tokens})"
        )
    if submission.min_tokens and len(submission.stop_tokens) >= vocab_size:
        raise InvalidRequest(f"stop_tokens: all {vocab_size} with min_tokens {submission.min_tokens}: none could come")
    for field, tokens in (
        ("stop_tokens", submission.stop_tokens),
        ("sampling.logit_bias", [token for token, _ in submission.sampling.logit_bias]),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise InvalidRequest(f"{field}: token id {wrong}, wanted from 0 to {vocab_size - 1}")
    require_top_logprobs("logprobs", submission.logprobs)
    require_top_logprobs("prompt_logprobs", submission.prompt_logprobs)
    if submission.beam is not None:
        require_beam(
            submission.beam,
            samples=submission.samples,
            temperature=submission.sampling.temperature,
            logprobs=submission.logprobs,
            most=max_samples,
        )
        wanted = continuations_wanted(submission.beam, submission.stop_tokens)
        if wanted > vocab_size:
            raise InvalidRequest(
                f"beam.width: {submission.beam.width} with {len(submission.stop_tokens)} stop tokens looks at {wanted} "
                f"continuations, the vocabulary has {vocab_size}"
            )


def _require_within(field: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InvalidRequest(f"{field}: {value}, wanted from 1 to {most}")


def _require_text(scope: Scope) -> None:
    if scope.media:
        raise InvalidRequest(f"media: {len(scope.media)} of them, this worker takes none")


def _require_tokens(prompt: tuple[int, ...], vocab_size: int) -> None:
    if not prompt:
        raise InvalidRequest("prompt: 0 tokens, wanted at least 1")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at, token = next((at, token) for at, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"prompt: token id {token} at position {at}, wanted from 0 to {vocab_size - 1}")
