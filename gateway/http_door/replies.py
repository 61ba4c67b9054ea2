"""What clients get over HTTP when all went well: OpenAI's objects.

The models here build the answers that come whole, and describe them in the OpenAPI description. A stream's events, of
which there is one a token, are plain dictionaries (`gateway.http_door.streams`).
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

_Extra: Any = Field(default=None, exclude_if=lambda value: value is None)
"""No field of OpenAI's: there where it was asked for."""

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Not computed for this request."""


class Usage(BaseModel):
    """What a request cost."""

    prompt_tokens: int
    """Each prompt counted once, whatever `n`."""
    completion_tokens: int
    """Of all choices."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextChoice(BaseModel):
    """One text."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: None = None
    token_ids: list[int] | None = _Extra
    prompt_token_ids: list[int] | None = _Extra


class TextCompletion(BaseModel):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[TextChoice]
    usage: Usage


class AssistantMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(BaseModel):
    """One turn."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: None = None
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


Reply = TextCompletion | ChatCompletion


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


class Health(BaseModel):
    """New requests are welcome."""

    status: Literal["ok"]
