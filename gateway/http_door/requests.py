"""What clients may ask for over HTTP, and the `Generation` that it means.

The fields are OpenAI's, and those that vLLM added and load generators send. Each field of OpenAI's is served, or taken
where it changes nothing, or refused by its name (docs/adr/0030-the-http-door.md).
"""

from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, model_validator

from gateway.core.request import ChatMessage, ChatPrompt, Generation, Prompt, TextPrompt, TokenPrompt
from gateway.http_door.fields import Fields, Float32, Ignored, Int32, Only, Seed, Strings, TokenId, Unserved

COMPLETION_MAX_TOKENS = 16
"""Of a completion whose client names no number: OpenAI's own."""

MAX_PROMPTS = 1024
"""Of one request. How many choices they may have together is the gateway's setting."""

UNCONSTRAINED = "which needs constrained decoding; this server has none yet"

_SEEDS = 1 << 64


class StreamOptions(Fields):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    """One more event with what the request cost."""
    continuous_usage_stats: bool | None = None
    """What it has cost so far, with every event."""
    include_obfuscation: Ignored = None


class GenerationFields(Fields):
    """What completions and chats have in common."""

    model: str = ""
    """Empty: the only one there is."""
    max_tokens: Int32 | None = None
    n: Int32 | None = None
    temperature: Float32 | None = None
    """Absent: 1, as with OpenAI. 0 is greedy."""
    top_p: Float32 | None = None
    seed: Seed | None = None
    stop: Strings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Any, Only(0, why="which this server does not serve")] = None
    frequency_penalty: Annotated[Any, Only(0, why="which this server does not serve")] = None
    logit_bias: Annotated[Any, Only({}, why="which this server does not serve")] = None
    user: Ignored = None

    top_k: Int32 | None = None
    """0 and -1 keep all."""
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """Each choice comes with `token_ids`, the first event or the whole with `prompt_token_ids`."""
    cache_salt: str | None = None
    """Prompts of different salts never share what is remembered."""
    retain_seconds: Int32 | None = None
    """How long what was computed should stay."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] | None = None
    """For the whole answer."""

    @model_validator(mode="after")
    def _streams_what_it_tells_of_streams(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: given without stream")
        return self

    @property
    def samples(self) -> int:
        """Choices a prompt."""
        return 1 if self.n is None else self.n

    @property
    def tells_usage(self) -> bool:
        """At the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def tells_usage_so_far(self) -> bool:
        """With every event of a stream."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _generation(self, prompt: Prompt, max_tokens: int | None) -> Generation:
        return Generation(
            prompt=prompt,
            model=self.model,
            max_tokens=max_tokens,
            samples=self.samples,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % _SEEDS,
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            retain_seconds=self.retain_seconds or 0,
        )


def _as_batch(value: object) -> object:
    """One prompt is a batch of one."""
    if isinstance(value, str):
        return [value]
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [items] if items and isinstance(items[0], int) else cast("object", value)


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`: text after text."""

    prompt: Annotated[
        list[str | list[TokenId]],
        BeforeValidator(_as_batch, json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]]),
        Field(min_length=1, max_length=MAX_PROMPTS),
    ]
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Each choice's text begins with its prompt."""
    best_of: Annotated[Any, Only(1, why="which this server does not serve")] = None
    logprobs: Unserved = None
    suffix: Annotated[Any, Only("", why="this server writes no text before given text")] = None

    def generations(self) -> list[Generation]:
        """One a prompt."""
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return [self._generation(_prompt(prompt), max_tokens) for prompt in self.prompt]


def _prompt(prompt: str | list[int]) -> Prompt:
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt))


# ---- chats ---------------------------------------------------------------------------------------------------


class ResponseFormat(Fields):
    """What the answer's text must look like."""

    type: Annotated[Any, Only("text", why=UNCONSTRAINED)]
    json_schema: Ignored = None


class TextPart(Fields):
    """A piece of a message."""

    type: Annotated[Any, Only("text", why="this server reads text only")]
    text: str


class Message(Fields):
    """One turn of a conversation, as a client sends it or as it came back from here."""

    role: str
    """Which there are is the model's affair; `developer` is read as `system`."""
    content: str | list[TextPart] | None = None
    """Of several parts, each is a line."""
    refusal: Unserved = None
    audio: Unserved = None
    function_call: Unserved = None
    annotations: Annotated[Any, Only([], why="which this server does not serve")] = None


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`: the assistant's next turn."""

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    """The newer name of `max_tokens`."""
    response_format: ResponseFormat | None = None
    logprobs: Annotated[Any, Only(False, why="which this server does not serve")] = None
    top_logprobs: Annotated[Any, Only(0, why="which this server does not serve")] = None
    tools: Annotated[Any, Only([], why="which this server does not serve")] = None
    tool_choice: Annotated[Any, Only("none", "auto", why="which this server does not serve")] = None
    parallel_tool_calls: Ignored = None
    reasoning_effort: Annotated[Any, Only("none", why="which this model cannot vary")] = None
    verbosity: Annotated[Any, Only("medium", why="which this model cannot vary")] = None
    modalities: Annotated[Any, Only(["text"], why="this server writes text only")] = None
    audio: Unserved = None
    functions: Unserved = None
    function_call: Unserved = None
    moderation: Unserved = None
    web_search_options: Unserved = None
    store: Annotated[Any, Only(False, why="this server keeps no answers")] = None
    service_tier: Annotated[Any, Only("auto", "default", why="there is one tier here; see priority")] = None
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None

    def generation(self) -> Generation:
        """What it means."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._generation(ChatPrompt(tuple(map(_turn, self.messages))), max_tokens)


def _turn(message: Message) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role, _text(message.content))


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""
