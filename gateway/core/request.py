"""What a client may ask for, as values, and the rules that need nothing but the request itself.

Every rule names the field as the schema spells it and shows both numbers. What depends on the fleet (whether a
prompt fits a pool) is judged by `gateway.core.admission`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gateway.core.tool_calls import objects_in
from octavo.errors import InvalidRequest
from octavo.records import MAX_RETAIN_SECONDS


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
    """Output tokens a sample; None: DEFAULT_MAX_TOKENS, or what the model and the pool leave."""
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
    retain_seconds: int = 0
    """After its end, how long what was computed should stay, as far as the tenant's quota reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a request that do not depend on the fleet."""

    max_samples: int = 64
    max_prompt_bytes: int = 4 << 20
    max_stop_strings: int = 16
    max_stop_bytes: int = 1024
    """Of one stop string."""


def check_request(request: Generation, limits: Limits) -> None:
    """Refuse a request that no fleet could serve.

    Raises:
        InvalidRequest: naming the field, what it holds and what would do.
    """
    _check_prompt(request.prompt, limits)
    _check_counts(request, limits)
    _check_sampling(request)
    _check_stop(request.stop, limits)


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InvalidRequest: naming the first of them.
    """
    if ids and max(ids) >= vocab_size:
        at, token = next((at, token) for at, token in enumerate(ids) if token >= vocab_size)
        raise InvalidRequest(f"prompt.tokens.ids[{at}]: {token}, vocabulary has {vocab_size}")


def _check_prompt(prompt: Prompt | None, limits: Limits) -> None:
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


def _check_bytes(field: str, size: int, limits: Limits) -> None:
    if size == 0:
        raise InvalidRequest(f"{field}: empty, wanted at least one token")
    if size > limits.max_prompt_bytes:
        raise InvalidRequest(f"{field}: {size} bytes, at most {limits.max_prompt_bytes}")


def _check_counts(request: Generation, limits: Limits) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens: {request.max_tokens}, wanted at least 1")
    if not 1 <= request.samples <= limits.max_samples:
        raise InvalidRequest(f"n: {request.samples}, wanted 1 to {limits.max_samples}")
    if not 0 <= request.retain_seconds <= MAX_RETAIN_SECONDS:
        raise InvalidRequest(f"retain_seconds: {request.retain_seconds}, wanted 0 to {MAX_RETAIN_SECONDS}")


def _check_sampling(request: Generation) -> None:
    if not 0 <= request.temperature < inf:  # false for NaN as well
        raise InvalidRequest(f"temperature: {request.temperature:.9g}, wanted at least 0 and finite")
    if request.top_k < 0:
        raise InvalidRequest(f"top_k: {request.top_k}, wanted at least 0")
    if not 0 < request.top_p <= 1:
        raise InvalidRequest(f"top_p: {request.top_p:.9g}, wanted in (0, 1]")


def _check_stop(stop: tuple[str, ...], limits: Limits) -> None:
    if len(stop) > limits.max_stop_strings:
        raise InvalidRequest(f"stop: {len(stop)} strings, at most {limits.max_stop_strings}")
    for at, string in enumerate(stop):
        size = len(string.encode())
        if not 1 <= size <= limits.max_stop_bytes:
            raise InvalidRequest(f"stop[{at}]: {size} bytes, wanted 1 to {limits.max_stop_bytes}")
