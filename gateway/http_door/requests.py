"""What clients may ask for over HTTP, and the `Generation` that it means.

The fields are OpenAI's, and those that vLLM added and load generators send. Each field of OpenAI's is served, or taken
where it changes nothing, or refused by its name (docs/adr/0030-the-http-door.md).
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BeforeValidator, Field, model_validator

from gateway.core.request import Generation, Prompt, TextPrompt, TokenPrompt
from gateway.http_door.conversations import Message, Tool, chat_of
from gateway.http_door.fields import (
    UNCONSTRAINED,
    Fields,
    Float32,
    Ignored,
    Int32,
    Only,
    Seed,
    Strings,
    TokenId,
    TokenIdKey,
    Unserved,
)
from gateway.http_door.forms import Extras
from octavo.records.sampling import BeamSearch
from octavo.sampling import MAX_TOP_LOGPROBS

COMPLETION_MAX_TOKENS = 16
"""Of a completion whose client names no number: OpenAI's own."""

_SEEDS = 1 << 64

T = TypeVar("T")


# ---- what completions and chats have in common -----------------------------------------------------------------


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
    """Absent: 1, as with OpenAI; 0 for a search. 0 is greedy."""
    top_p: Float32 | None = None
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    logit_bias: dict[TokenIdKey, Float32] | None = None
    """Token id to what is added to its logit, -100 to 100."""
    seed: Seed | None = None
    stop: Strings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None

    top_k: Int32 | None = None
    """0 and -1 keep all."""
    min_p: Float32 | None = None
    repetition_penalty: Float32 | None = None
    ignore_eos: bool | None = None
    """Go on to `max_tokens`."""
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    best_of: Int32 | None = None
    """Choices to make, of which the `n` likeliest are told, at the end."""
    use_beam_search: bool | None = None
    """Search with `best_of` or `n` beams instead of drawing."""
    length_penalty: Float32 | None = None
    """Of that search."""
    early_stopping: bool | Literal["never"] | None = None
    """Of that search: true ends it with the first texts, "never" only when no beam could do better at `max_tokens`."""
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    """Tell `token_ids` and `prompt_token_ids`."""
    cache_salt: str | None = None
    """Prompts of different salts never share what is remembered."""
    priority: Int32 | None = None
    """Among the tenant's own requests; the higher is served sooner."""
    retain_seconds: Int32 | None = None
    """How long what was computed should stay."""
    stream_interval: Int32 | None = None
    """Tokens of a choice that a stream tells together, but for its first and its last."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] | None = None
    """For the whole answer."""

    @model_validator(mode="after")
    def _goes_together(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: given without stream")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: given with stream, which does not tell them")
        for field in ("length_penalty", "early_stopping"):
            if getattr(self, field) is not None and not self.use_beam_search:
                raise ValueError(f"{field}: given without use_beam_search")
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

    def _generation(
        self, prompt: Prompt, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> Generation:
        beam = self._beam()
        asked = Generation(
            prompt=prompt,
            model=self.model,
            max_tokens=max_tokens,
            samples=self.samples,
            temperature=_or(self.temperature, 1.0 if beam is None else 0.0),
            top_k=0 if self.top_k == -1 else _or(self.top_k, 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=_biases(self.logit_bias or {}),
            seed=None if self.seed is None else self.seed % _SEEDS,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=_or(self.min_tokens, 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            best_of=self.best_of if beam is None else None,
            beam=beam,
            cache_salt=self.cache_salt or "",
            priority=_or(self.priority, 0),
            retain_seconds=_or(self.retain_seconds, 0),
            stream_interval=self.stream_interval,
        )
        return asked if self.stream else asked.read_whole()

    def _beam(self) -> BeamSearch | None:
        if not self.use_beam_search:
            return None
        return BeamSearch(
            width=_or(self.best_of, self.samples),
            length_penalty=_or(self.length_penalty, 1.0),
            early_stopping=self.early_stopping is True,
            exhaustive=self.early_stopping == "never",
        )


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _biases(by_text: dict[str, float]) -> dict[int, float]:
    return {int(token): bias for token, bias in by_text.items()}


# ---- completions -----------------------------------------------------------------------------------------------


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
        Field(min_length=1),
    ]
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Each choice's text, and its logprobs, begin with its prompt; with `max_tokens` 0 that is all of it."""
    logprobs: Int32 | None = None
    """Of each token, and so many of the likeliest in its place."""
    suffix: Annotated[Any, Only("", why="this server writes no text before given text")] = None

    @property
    def extras(self) -> Extras:
        """What to tell besides text."""
        return Extras(
            logprobs=self.logprobs is not None,
            prompt_logprobs=self.prompt_logprobs is not None,
            token_ids=bool(self.return_token_ids),
        )

    @property
    def wants_prompt_alone(self) -> bool:
        """Whether nothing is to be told but the prompt, as what scores texts asks it."""
        return bool(self.echo) and self.max_tokens == 0

    def generations(self) -> list[Generation]:
        """One a prompt. Where the prompt alone is wanted, of one token that is not told: workers make at least one."""
        echoed = self.logprobs if self.echo else None
        return [
            self._generation(
                TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt)),
                max_tokens=1 if self.wants_prompt_alone else _or(self.max_tokens, COMPLETION_MAX_TOKENS),
                logprobs=self.logprobs,
                prompt_logprobs=echoed if self.prompt_logprobs is None else self.prompt_logprobs,
            )
            for prompt in self.prompt
        ]


# ---- chats -----------------------------------------------------------------------------------------------------


class ResponseFormat(Fields):
    """What the answer's text must look like."""

    type: Annotated[Any, Only("text", why=UNCONSTRAINED)]
    json_schema: Ignored = None


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`: the assistant's next turn."""

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens are told in the place of each."""
    tools: list[Tool] | None = None
    """Given to the model's chat template; calls are told where the template shows how the model writes them."""
    tool_choice: Annotated[Any, Only("none", "auto", why=UNCONSTRAINED)] = None
    parallel_tool_calls: Annotated[Any, Only(True, why=UNCONSTRAINED)] = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[Any, Only("none", why="which this model cannot vary")] = None
    verbosity: Annotated[Any, Only("medium", why="which this model cannot vary")] = None
    modalities: Annotated[Any, Only(["text"], why="this server writes text only")] = None
    audio: Unserved = None
    functions: Unserved = None
    function_call: Unserved = None
    moderation: Unserved = None
    web_search_options: Unserved = None
    store: Annotated[Any, Only(False, why="this server keeps no answers")] = None
    service_tier: Annotated[Any, Only("auto", "default", why="this server has one tier; see priority")] = None
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None

    @model_validator(mode="after")
    def _lists_what_it_tells(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: given without logprobs")
        return self

    @property
    def may_call(self) -> bool:
        """Whether the model is told of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def extras(self) -> Extras:
        """What to tell besides text."""
        return Extras(
            logprobs=bool(self.logprobs),
            prompt_logprobs=self.prompt_logprobs is not None,
            token_ids=bool(self.return_token_ids),
        )

    def generation(self) -> Generation:
        """What it means."""
        asked = self._generation(
            chat_of(self.messages, self.tools if self.may_call else None),
            max_tokens=self.max_tokens,
            logprobs=_or(self.top_logprobs, 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
        if self.max_completion_tokens is None:
            return asked
        return replace(asked, max_tokens=self.max_completion_tokens, max_tokens_field="max_completion_tokens")


# ---- text and tokens -------------------------------------------------------------------------------------------


class TokenizeRequest(Fields):
    """`POST /tokenize`: the token ids of a text, or of a conversation with its chat template around it."""

    model: str = ""
    """Empty: the only one there is."""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: Annotated[Any, Only(True, why="this server adds those that the model wants")] = None
    add_generation_prompt: Annotated[Any, Only(True, why="this server asks for the assistant's turn")] = None

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: wanted prompt or messages, and one of them alone")
        return self

    def given(self) -> Prompt:
        """What it means."""
        if self.messages is not None:
            return chat_of(self.messages, self.tools)
        return TextPrompt(self.prompt or "")


class DetokenizeRequest(Fields):
    """`POST /detokenize`: the text of token ids, special tokens by their names."""

    model: str = ""
    """Empty: the only one there is."""
    tokens: list[TokenId]
