"""What clients get over HTTP when all went well: OpenAI's objects, and a few fields of vLLM's.

The models here build the answers that come whole, and describe them in the OpenAPI description. A stream's events, of
which there is one a token, are plain dictionaries (`gateway.http_door.forms`).
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

_Extra: Any = Field(default=None, exclude_if=lambda value: value is None)
"""No field of OpenAI's: there where it was asked for."""

TextFinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Not computed for this request."""


class Usage(BaseModel):
    """What a request cost."""

    prompt_tokens: int
    """Each prompt counted once, whatever `n`."""
    completion_tokens: int
    """Of all choices, those included that `best_of` did not tell."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# ---- completions -----------------------------------------------------------------------------------------------


class TextLogprobs(BaseModel):
    """Of a choice's tokens, the echoed prompt's included."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each begins in the choice's text."""


class TextChoice(BaseModel):
    """One text."""

    index: int
    text: str
    finish_reason: TextFinishReason
    logprobs: TextLogprobs | None
    token_ids: list[int] | None = _Extra
    prompt_token_ids: list[int] | None = _Extra
    prompt_logprobs: list[dict[str, Any] | None] | None = _Extra


class TextCompletion(BaseModel):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[TextChoice]
    usage: Usage


# ---- chats -----------------------------------------------------------------------------------------------------


class CalledFunction(BaseModel):
    """What the model calls, and with what."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it: to be looked at before it is used."""


class ToolCall(BaseModel):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = _Extra


class TopLogprob(BaseModel):
    """A token that may stand there."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that stands there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a choice's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    """One turn."""

    index: int
    message: AssistantMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = _Extra
    prompt_token_ids: list[int] | None = _Extra


class ChatCompletion(BaseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = _Extra


Reply = TextCompletion | ChatCompletion


# ---- what else there is ----------------------------------------------------------------------------------------


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When this gateway started, in seconds since 1970."""
    owned_by: Literal["octavo"] = "octavo"
    max_model_len: int
    """Tokens of prompt and answer together."""


class ModelList(BaseModel):
    """All models that can be asked."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(BaseModel):
    """Of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    """Tokens of prompt and answer together; null while no worker serves the model."""


class Text(BaseModel):
    """Of token ids."""

    prompt: str


class Health(BaseModel):
    """New requests are welcome."""

    status: Literal["ok"]
