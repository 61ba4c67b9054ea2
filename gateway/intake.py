"""What a client asked for -> a job that is fit to run, or the reason why it is not.

Everything that can be refused without waiting is refused here, before the request has taken anything. Whether it fits
a pool can be told only while there is one: where nobody serves the model just now, that is judged when somebody does.
"""

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.bounds import Bounds
from gateway.catalogue import Catalogue, ServedModel
from gateway.core.account import Account
from gateway.core.admission import default_budget, output_budget
from gateway.core.public_part import public_tokens
from gateway.core.request import (
    ChatPrompt,
    Generation,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_batch,
    check_ids,
    check_prompt,
    check_request,
    check_vocabulary,
)
from gateway.core.turns import Answer, TurnMemory
from octavo.errors import InvalidRequest
from octavo.hashing import digest_of
from octavo.records.fleet import PoolSpec
from octavo.records.sampling import SamplingParams
from octavo.records.scope import Scope
from octavo.records.serve import Submission

_SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that is fit to run, once it is measured."""

    request_id: str
    request: Generation
    """As the client sent it."""
    model: ServedModel
    submission: Submission
    """As a worker will get it; the stream to the worker numbers it."""
    stream_interval: int
    """Tokens that are told together."""
    arrived: float
    deadline: float
    text: str | None = None
    """Of the prompt; None where it came as token ids."""
    realm: bytes = b""
    """Within which its text and its answers are remembered."""
    measured: bool = False
    """Against the workers that there are."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.submission.prompt)

    @property
    def tokens(self) -> int:
        """That it may take, prompt and outputs together."""
        return self.prompt_tokens + self.submission.sequences * self.submission.max_tokens


class Intake:
    """Checks and tokenises requests."""

    def __init__(self, catalogue: Catalogue, turns: TurnMemory, bounds: Bounds) -> None:
        """Refuse what breaks the limits of `bounds`, which also has what a request gets that does not say."""
        self._catalogue = catalogue
        self._turns = turns
        self._bounds = bounds
        self._limits = bounds.limits
        self._random = random.Random()

    async def job(self, request: Generation, account: Account, arrived: float, seconds_left: float | None) -> Job:
        """The job that a request asks for.

        Raises:
            InvalidRequest: the request cannot be served as it is.
            UnknownModel: there is no such model.
        """
        check_request(request, self._limits)
        model = self._catalogue.named(request.model)
        realm = digest_of(model.name.encode(), model.tokenizer_digest, account.salt(request.cache_salt))
        text = await _text_of(request.prompt, model)
        prompt = await _tokens_of(request.prompt, text, model, () if text is None else self._turns.recall(realm, text))
        patience = self._bounds.max_request_seconds if seconds_left is None else seconds_left
        pools = self._pools_of(model)
        return Job(
            request_id=uuid.uuid4().hex,
            request=request,
            model=model,
            submission=Submission(
                request=0,
                prompt=prompt,
                max_tokens=_measured(prompt, request, pools),
                samples=request.made_samples,
                sampling=self._sampling_of(request),
                stop_tokens=_stop_tokens(request, model),
                scope=_scope_of(prompt, account.salt(request.cache_salt), model),
                tenant=account.tag,
                retain_seconds=request.retain_seconds,
                priority=request.priority,
                min_tokens=request.min_tokens,
                logprobs=_ranked_by(request),
                prompt_logprobs=request.prompt_logprobs,
                beam=request.beam,
            ),
            stream_interval=request.stream_interval or self._bounds.stream_interval,
            arrived=arrived,
            deadline=arrived + patience,
            text=text,
            realm=realm,
            measured=bool(pools),
        )

    def measured(self, job: Job) -> Job:
        """The job as the workers that there are can take it; as it is if it was measured before, or nobody is there.

        Raises:
            InvalidRequest: none of them ever can.
        """
        if job.measured:
            return job
        pools = self._pools_of(job.model)
        max_tokens = _measured(job.submission.prompt, job.request, pools)
        return replace(job, submission=replace(job.submission, max_tokens=max_tokens), measured=bool(pools))

    def _pools_of(self, model: ServedModel) -> list[PoolSpec]:
        return [worker.pool for worker in self._catalogue.taking(model)]

    def remember(self, job: Job, text: str, tokens: Sequence[int]) -> None:
        """An answer of a job with a text, as its client was told: it may come again, in the prompt of the next turn."""
        assert job.text is not None, "what came as token ids comes again as token ids"
        count, characters = job.model.tokenizer.covered(job.submission.prompt, tokens, text)
        if count:
            self._turns.remember(job.realm, job.text + text[:characters], len(job.text), tokens[:count])

    async def tokens(self, prompt: Prompt | None, model: str) -> tuple[int, ...]:
        """The token ids of a prompt.

        Raises:
            InvalidRequest: it is absent, empty, too long or malformed.
            UnknownModel: there is no such model.
        """
        check_prompt(prompt, self._limits)
        served = self._catalogue.named(model)
        return await _tokens_of(prompt, await _text_of(prompt, served), served)

    async def text(self, ids: Sequence[int], model: str, *, special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            InvalidRequest: there are none, or too many, or one that the model does not have.
            UnknownModel: there is no such model.
        """
        served = self._catalogue.named(model)
        largest = max((pool.vocab_size for pool in self._pools_of(served)), default=0)  # some models are padded
        check_ids(ids, max(served.tokenizer.vocab_size, largest), self._limits)
        return await asyncio.to_thread(served.tokenizer.decode, ids, special_tokens=special_tokens)

    def check_batch(self, requests: int) -> None:
        """Raises InvalidRequest where a batch has so many requests that it is refused as a whole, or none."""
        check_batch(requests, self._limits)

    def _sampling_of(self, request: Generation) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=self._random.getrandbits(_SEED_BITS) if request.seed is None else request.seed,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=tuple(sorted(request.logit_bias.items())),
        )


def _measured(prompt: Sequence[int], request: Generation, pools: Sequence[PoolSpec]) -> int:
    """Output tokens a sample may have, by the pools that there are. Raises InvalidRequest where none can ever do."""
    if not pools:
        return default_budget(request.min_tokens) if request.max_tokens is None else request.max_tokens
    check_vocabulary(prompt, request, min(pool.vocab_size for pool in pools))
    return output_budget(
        len(prompt), request.max_tokens, pools, field=request.max_tokens_field, min_tokens=request.min_tokens
    )


def _scope_of(prompt: Sequence[int], salt: bytes, model: ServedModel) -> Scope:
    return Scope(salt=salt, public_tokens=public_tokens(prompt, model.public_prefixes)) if salt else Scope()


def _stop_tokens(request: Generation, model: ServedModel) -> frozenset[int]:
    own = frozenset(request.stop_token_ids)
    return own if request.ignore_eos else own | model.stop_tokens


def _ranked_by(request: Generation) -> int | None:
    """The logprobs that a worker must tell: the best of several samples are chosen by them."""
    return 0 if request.logprobs is None and request.made_samples > request.samples else request.logprobs


async def _text_of(prompt: Prompt | None, model: ServedModel) -> str | None:
    """What is to be tokenised; None for token ids."""
    match prompt:
        case TextPrompt(text):
            return text
        case ChatPrompt():
            return await asyncio.to_thread(model.tokenizer.render, prompt)
        case TokenPrompt():
            return None
        case None:
            raise AssertionError("check_request lets no request without a prompt pass")


async def _tokens_of(
    prompt: Prompt | None, text: str | None, model: ServedModel, answers: Sequence[Answer] = ()
) -> tuple[int, ...]:
    """At least one token id. Text goes through a thread: megabytes of it take seconds."""
    if isinstance(prompt, TokenPrompt):
        return prompt.ids
    assert text is not None, "only token ids have no text"
    special = isinstance(prompt, TextPrompt)  # a chat's are in its template
    tokens = await asyncio.to_thread(model.tokenizer.encode, text, answers, add_special_tokens=special)
    if not tokens:  # the text was all of a kind that the tokenizer drops
        raise InvalidRequest("prompt: 0 tokens, wanted at least 1")
    return tokens
