"""What a client may ask for, as values, and the rules that need nothing but the request itself.

Every rule names the field as the schema spells it and shows both numbers. What depends on the fleet (whether a
prompt fits a pool) is judged by `gateway.core.admission`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.core.interval import MAX_INTERVAL, WHOLE_INTERVAL
from gateway.core.tool_calls import objects_in
from octavo.errors import InvalidRequest
from octavo.records.attend import MAX_RETAIN_SECONDS
from octavo.records.sampling import BeamSearch
from octavo.sampling import require_beam, require_biases, require_knobs, require_top_logprobs

MAX_SALT_BYTES = 1024
"""Of a client's `cache_salt`, which is hashed."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is taken as it is; the tokenizer adds its special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; which roles there are is the chat template's affair."""

    role: str
    content: str
    tool_calls: str = ""
    """The calls in this turn: a JSON list, as OpenAI writes it."""
    tool_call_id: str = ""
    """The call that this turn answers."""
    name: str = ""
    """Of whoever speaks, or of the tool."""

    @property
    def size(self) -> int:
        """Bytes of text."""
        texts = (self.role, self.content, self.tool_calls, self.tool_call_id, self.name)
        return sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be put through the model's chat template."""

    messages: tuple[ChatMessage, ...]
    tools: str = ""
    """What the model may call: a JSON list, as OpenAI writes it."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request for text, as a client sends it."""

    prompt: Prompt | None
    model: str = ""
    """Empty: the only one there is."""
    max_tokens: int | None = None
    """Output tokens a sample; None: DEFAULT_MAX_TOKENS, or `min_tokens` if that is more, as far as they fit."""
    max_tokens_field: str = "max_tokens"
    """What the client called them: a refusal names what was sent."""
    samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    """None: drawn by the gateway."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample and are not part of its text."""
    ignore_eos: bool = False
    cache_salt: str = ""
    """Prompts of different salts never share blocks."""
    priority: int = 0
    """Among the tenant's own requests; the higher is served sooner."""
    retain_seconds: int = 0
    """After its end, how long what was computed should stay, as far as the tenant's quota reaches."""
    min_p: float = 0.0
    """Keeps what has at least this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that prompt and output hold less likely, as transformers does."""
    presence_penalty: float = 0.0
    """-2 to 2: taken from the logit of each token that the output holds."""
    frequency_penalty: float = 0.0
    """-2 to 2: likewise, as often as it stands there."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Token id to what is added to its logit, -100 to 100."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample besides the model's own end, and are not part of its text."""
    min_tokens: int = 0
    """Output tokens before which no token ends a sample. Stop strings still do."""
    logprobs: int | None = None
    """None: not wanted. Else that of each output token, and so many of the likeliest in its place."""
    prompt_logprobs: int | None = None
    """Likewise of the prompt's tokens from the second on."""
    best_of: int | None = None
    """Samples to make, of which the likeliest a token are told, at the end; None: as many as `samples`."""
    beam: BeamSearch | None = None
    """Search instead of drawing; the best `samples` are told, at the end."""
    stream_interval: int | None = None
    """Tokens of a sample that are told together, but for its first and its last; None: as the gateway is set. A stop
    string is looked for as often."""

    @property
    def made_samples(self) -> int:
        """Those that a worker makes; `samples` of them are told."""
        return self.samples if self.best_of is None else self.best_of

    def read_whole(self) -> "Generation":
        """The same for a reader who waits for all of it: told in few parts, unless stop strings are looked for."""
        if self.stream_interval is not None or self.stop:
            return self
        return replace(self, stream_interval=WHOLE_INTERVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a request that do not depend on the fleet."""

    max_samples: int = 64
    max_prompt_bytes: int = 4 << 20
    max_batch_requests: int = 256
    max_stop_strings: int = 16
    max_stop_bytes: int = 1024
    """Of one stop string."""
    max_stop_tokens: int = 64


def check_request(request: Generation, limits: Limits) -> None:
    """Refuse a request that no fleet could serve.

    Raises:
        InvalidRequest: naming the field, what it holds and what would do.
    """
    check_prompt(request.prompt, limits)
    _check_counts(request, limits)
    _check_sampling(request, limits)
    _check_stop(request, limits)


def check_batch(requests: int, limits: Limits) -> None:
    """Refuse a batch of no requests, or too many.

    Raises:
        InvalidRequest: with both numbers.
    """
    if not 1 <= requests <= limits.max_batch_requests:
        raise InvalidRequest(f"requests: {requests}, wanted 1 to {limits.max_batch_requests}")


def check_ids(ids: Sequence[int], vocab_size: int, limits: Limits) -> None:
    """Refuse token ids that are too many to be a prompt, none, or not the model's.

    Raises:
        InvalidRequest: with both numbers.
    """
    _check_bytes("ids", 4 * len(ids), limits)
    _check_known("ids", ids, vocab_size)


def check_vocabulary(prompt: Sequence[int], request: Generation, vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InvalidRequest: naming the first of them.
    """
    fields = (
        ("prompt.tokens.ids", prompt),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", tuple(request.logit_bias)),
    )
    for name, ids in fields:
        _check_known(name, ids, vocab_size)


def check_prompt(prompt: Prompt | None, limits: Limits) -> None:
    """Refuse a prompt that is absent, empty, too long or malformed.

    Raises:
        InvalidRequest: naming the field, what it holds and what would do.
    """
    match prompt:
        case None:
            raise InvalidRequest("prompt: absent, wanted text, chat or tokens")
        case TextPrompt(text):
            _check_bytes("prompt.text", len(text.encode()), limits)
        case ChatPrompt():
            _check_chat(prompt, limits)
        case TokenPrompt(ids):
            _check_bytes("prompt.tokens.ids", 4 * len(ids), limits)


def _check_chat(chat: ChatPrompt, limits: Limits) -> None:
    if not chat.messages:
        raise InvalidRequest("prompt.chat.messages: 0 messages, wanted at least 1")
    for at, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(f"prompt.chat.messages[{at}].role: empty")
    _check_bytes("prompt.chat", len(chat.tools.encode()) + sum(message.size for message in chat.messages), limits)
    objects_in("prompt.chat.tools", chat.tools)
    for at, message in enumerate(chat.messages):
        objects_in(f"prompt.chat.messages[{at}].tool_calls", message.tool_calls)


def _check_known(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        at, token = next((at, token) for at, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"{field}[{at}]: {token}, vocabulary has {vocab_size}")


def _check_bytes(field: str, size: int, limits: Limits) -> None:
    if size == 0:
        raise InvalidRequest(f"{field}: empty, wanted at least one token")
    if size > limits.max_prompt_bytes:
        raise InvalidRequest(f"{field}: {size} bytes, at most {limits.max_prompt_bytes}")


def _check_counts(request: Generation, limits: Limits) -> None:
    most = request.max_tokens
    if most is not None and most < 1:
        raise InvalidRequest(f"{request.max_tokens_field}: {most}, wanted at least 1")
    if not 1 <= request.samples <= limits.max_samples:
        raise InvalidRequest(f"n: {request.samples}, wanted 1 to {limits.max_samples}")
    if not request.samples <= request.made_samples <= limits.max_samples:
        raise InvalidRequest(f"best_of: {request.best_of}, wanted n ({request.samples}) to {limits.max_samples}")
    if request.min_tokens < 0:
        raise InvalidRequest(f"min_tokens: {request.min_tokens}, wanted at least 0")
    if most is not None and request.min_tokens > most:
        raise InvalidRequest(f"min_tokens: {request.min_tokens}, wanted at most {request.max_tokens_field} ({most})")
    salt_bytes = len(request.cache_salt.encode())
    if salt_bytes > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt: {salt_bytes} bytes, at most {MAX_SALT_BYTES}")
    if not -(1 << 31) <= request.priority < 1 << 31:
        raise InvalidRequest(f"priority: {request.priority}, wanted -2^31 to 2^31 - 1")
    if not 0 <= request.retain_seconds <= MAX_RETAIN_SECONDS:
        raise InvalidRequest(f"retain_seconds: {request.retain_seconds}, wanted 0 to {MAX_RETAIN_SECONDS}")
    if request.stream_interval is not None and not 1 <= request.stream_interval <= MAX_INTERVAL:
        raise InvalidRequest(f"stream_interval: {request.stream_interval}, wanted 1 to {MAX_INTERVAL}")


def _check_sampling(request: Generation, limits: Limits) -> None:
    require_knobs(request)
    require_biases(request.logit_bias.items())
    require_top_logprobs("logprobs", request.logprobs)
    require_top_logprobs("prompt_logprobs", request.prompt_logprobs)
    if request.beam is not None:
        if request.best_of is not None:
            raise InvalidRequest(f"best_of: {request.best_of} with beam, wanted none: the search tells its best")
        require_beam(
            request.beam,
            samples=request.samples,
            temperature=request.temperature,
            logprobs=request.logprobs,
            most=limits.max_samples,
        )


def _check_stop(request: Generation, limits: Limits) -> None:
    if len(request.stop_token_ids) > limits.max_stop_tokens:
        raise InvalidRequest(f"stop_token_ids: {len(request.stop_token_ids)} ids, at most {limits.max_stop_tokens}")
    if len(request.stop) > limits.max_stop_strings:
        raise InvalidRequest(f"stop: {len(request.stop)} strings, at most {limits.max_stop_strings}")
    for at, string in enumerate(request.stop):
        size = len(string.encode())
        if not 1 <= size <= limits.max_stop_bytes:
            raise InvalidRequest(f"stop[{at}]: {size} bytes, wanted 1 to {limits.max_stop_bytes}")
