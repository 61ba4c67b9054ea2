"""Gateway <-> worker: submissions, and what one step produced."""

import struct
from collections import deque
from collections.abc import Iterable, Sequence

from octavo.errors import InvalidRequest, OctavoError
from octavo.records.sampling import BeamSearch, SamplingParams
from octavo.records.serve import (
    FinishReason,
    Prefilled,
    PromptLogprobs,
    Refusal,
    SampleFinished,
    StepReport,
    Submission,
    TokenLogprobs,
    Tokens,
)
from octavo.sampling import require_biases, require_knobs
from octavo.status import error_named
from octavo.v1 import types_pb2 as types_v1
from octavo.v1 import worker_pb2 as worker_v1
from octavo.wire.flat import pack, pack_floats, runs_of, unpack, unpack_floats
from octavo.wire.scope import media_to_wire, scope_from_wire, tenant_from_wire

_BIAS = struct.Struct("<If")
"""A token id and what is added to its logit."""
_REASON_TO_WIRE = {
    FinishReason.STOP: worker_v1.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_v1.FINISH_REASON_LENGTH,
}
_REASON_FROM_WIRE = {value: reason for reason, value in _REASON_TO_WIRE.items()}


def sampling_to_wire(sampling: SamplingParams) -> types_v1.SamplingParams:
    return types_v1.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=b"".join(_BIAS.pack(token, bias) for token, bias in sampling.logit_bias),
    )


def sampling_from_wire(message: types_v1.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest for parameters that no distribution has."""
    if len(message.logit_bias) % _BIAS.size:
        raise InvalidRequest(f"sampling.logit_bias: {len(message.logit_bias)} bytes, wanted a multiple of {_BIAS.size}")
    sampling = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(_BIAS.iter_unpack(message.logit_bias)),
    )
    require_knobs(sampling, "sampling.")
    require_biases(sampling.logit_bias, "sampling.")
    return sampling


def beam_to_wire(beam: BeamSearch | None) -> types_v1.BeamSearch | None:
    if beam is None:
        return None
    return types_v1.BeamSearch(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        exhaustive=beam.exhaustive,
    )


def beam_from_wire(message: types_v1.BeamSearch) -> BeamSearch:
    """Its ranges are judged with the rest of the request."""
    return BeamSearch(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=message.early_stopping,
        exhaustive=message.exhaustive,
    )


def submission_to_wire(submission: Submission) -> worker_v1.Submit:
    return worker_v1.Submit(
        request=submission.request,
        prompt=pack(submission.prompt),
        max_tokens=submission.max_tokens,
        samples=submission.samples,
        sampling=sampling_to_wire(submission.sampling),
        stop_tokens=pack(sorted(submission.stop_tokens)),
        salt=submission.scope.salt,
        tenant=submission.tenant,
        retain_seconds=submission.retain_seconds,
        media=media_to_wire(submission.scope),
        public_tokens=submission.scope.public_tokens,
        priority=submission.priority,
        first_sample=submission.first_sample,
        carried_tokens=submission.carried_tokens,
        min_tokens=submission.min_tokens,
        logprobs=submission.logprobs,
        prompt_logprobs=submission.prompt_logprobs,
        beam=beam_to_wire(submission.beam),
    )


def submission_from_wire(message: worker_v1.Submit) -> Submission:
    return Submission(
        request=message.request,
        prompt=tuple(unpack("submit.prompt", message.prompt)),
        max_tokens=message.max_tokens,
        samples=message.samples,
        sampling=sampling_from_wire(message.sampling),
        stop_tokens=frozenset(unpack("submit.stop_tokens", message.stop_tokens)),
        scope=scope_from_wire("submit", message),
        tenant=tenant_from_wire("submit", message),
        retain_seconds=message.retain_seconds,
        priority=message.priority,
        first_sample=message.first_sample,
        carried_tokens=message.carried_tokens,
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        beam=beam_from_wire(message.beam) if message.HasField("beam") else None,
    )


def finish_reason_to_wire(reason: FinishReason) -> "worker_v1.FinishReason.ValueType":
    return _REASON_TO_WIRE[reason]


def finish_reason_from_wire(value: "worker_v1.FinishReason.ValueType") -> FinishReason:
    if value not in _REASON_FROM_WIRE:
        raise InvalidRequest(f"finish reason: {value}, wanted one of {sorted(_REASON_FROM_WIRE)}")
    return _REASON_FROM_WIRE[value]


def report_to_wire(report: StepReport) -> worker_v1.ServeReply:
    return worker_v1.ServeReply(
        tokens=pack(
            value for new in report.tokens for value in (new.request, new.sample, len(new.tokens), *new.tokens)
        ),
        prefilled=[
            worker_v1.Prefilled(request=done.request, cached_tokens=done.cached_tokens) for done in report.prefilled
        ],
        finished=[
            worker_v1.SampleFinished(
                request=end.request,
                sample=end.sample,
                reason=finish_reason_to_wire(end.reason),
                cumulative_logprob=end.cumulative_logprob,
            )
            for end in report.finished
        ],
        refused=[
            worker_v1.Refused(request=refusal.request, reason=type(refusal.error).__name__, message=str(refusal.error))
            for refusal in report.refused
        ],
        logprobs=[
            worker_v1.SampleLogprobRun(request=new.request, sample=new.sample, tokens=_logprobs_to_wire(new.logprobs))
            for new in report.tokens
            if new.logprobs
        ],
        prompt_logprobs=[
            worker_v1.PromptLogprobRun(request=part.request, start=part.start, tokens=_logprobs_to_wire(part.tokens))
            for part in report.prompt_logprobs
        ],
    )


def report_from_wire(message: worker_v1.ServeReply) -> StepReport:
    words = unpack("serve.tokens", message.tokens)
    values = words.tolist()  # a list's slices become tuples sooner
    runs = tuple(
        Tokens(values[at], values[at + 1], tuple(values[start:end]))
        for at, start, end in runs_of("serve.tokens", words, head=2)
    )
    return StepReport(
        tokens=_with_logprobs(runs, message.logprobs) if message.logprobs else runs,
        prefilled=tuple(Prefilled(done.request, done.cached_tokens) for done in message.prefilled),
        finished=tuple(
            SampleFinished(
                end.request,
                end.sample,
                finish_reason_from_wire(end.reason),
                end.cumulative_logprob if end.HasField("cumulative_logprob") else None,
            )
            for end in message.finished
        ),
        refused=tuple(Refusal(refusal.request, _refusal_error(refusal)) for refusal in message.refused),
        prompt_logprobs=tuple(
            PromptLogprobs(part.request, part.start, _logprobs_from_wire("serve.prompt_logprobs", part.tokens))
            for part in message.prompt_logprobs
        ),
    )


def _with_logprobs(runs: tuple[Tokens, ...], parts: Iterable[worker_v1.SampleLogprobRun]) -> tuple[Tokens, ...]:
    """The runs with those of their logprobs that were told, which come in the same order."""
    left = deque(parts)
    told: list[Tokens] = []
    for run in runs:
        if left and (left[0].request, left[0].sample) == (run.request, run.sample):
            logprobs = _logprobs_from_wire("serve.logprobs", left.popleft().tokens)
            if len(logprobs) != len(run.tokens):
                raise InvalidRequest(f"serve.logprobs: {len(logprobs)} of them for {len(run.tokens)} tokens")
            run = Tokens(run.request, run.sample, run.tokens, logprobs)
        told.append(run)
    if left:
        raise InvalidRequest(f"serve.logprobs: {len(left)} runs too many for {len(runs)} of tokens")
    return tuple(told)


def _logprobs_to_wire(logprobs: Sequence[TokenLogprobs]) -> worker_v1.LogprobRun:
    likeliest = [pair for token in logprobs for pair in token.top]
    return worker_v1.LogprobRun(
        chosen=pack_floats(token.logprob for token in logprobs),
        top=len(logprobs[0].top) if logprobs else 0,
        top_ids=pack(token for token, _ in likeliest),
        top_logprobs=pack_floats(logprob for _, logprob in likeliest),
    )


def _logprobs_from_wire(field: str, message: worker_v1.LogprobRun) -> tuple[TokenLogprobs, ...]:
    chosen = unpack_floats(f"{field}.chosen", message.chosen)
    ids = unpack(f"{field}.top_ids", message.top_ids)
    top_logprobs = unpack_floats(f"{field}.top_logprobs", message.top_logprobs)
    top, wanted = message.top, len(chosen) * message.top
    if not len(ids) == len(top_logprobs) == wanted:
        raise InvalidRequest(
            f"{field}: {len(ids)} top_ids and {len(top_logprobs)} top_logprobs, wanted {wanted} of each"
        )
    likeliest = tuple(zip(ids, top_logprobs, strict=True))
    return tuple(TokenLogprobs(value, likeliest[at * top : (at + 1) * top]) for at, value in enumerate(chosen))


def _refusal_error(message: worker_v1.Refused) -> OctavoError:
    return error_named(message.reason, message.message)
