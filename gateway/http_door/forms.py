"""The two forms of an answer, completion and chat: one event of a stream, and the whole.

A choice is one sample of one prompt; choices are numbered through all prompts of a request. The whole is made of the
same parts as the stream: what a stream tells, joined, is what the whole says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core.events import Delta
from gateway.http_door import replies
from octavo.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all events of an answer begin with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str


@dataclass(slots=True)
class Draft:
    """A choice that grows."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    reason: FinishReason = FinishReason.LENGTH
    prompt_ids: tuple[int, ...] = ()

    def add(self, delta: Delta) -> None:
        """What it gained."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Form(Protocol):
    """How an answer is told. A stream's parts are the entries of `choices` in its events."""

    prefix: str
    """Of the answer's id."""
    chunk: str
    """What an event of a stream is called."""

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> dict[str, Any] | None:
        """A choice's first part, before there is a token; None: there is none."""
        ...

    def grown(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        """What it gained; None: nothing that can be told yet."""
        ...

    def ended(self, choice: int, reason: FinishReason) -> dict[str, Any]:
        """Its last part."""
        ...

    def whole(self, head: Head, drafts: Mapping[int, Draft], usage: replies.Usage) -> replies.Reply:
        """The answer that comes at once."""
        ...


class TextForm:
    """Of `/v1/completions`."""

    prefix = "cmpl"
    chunk = "text_completion"

    def __init__(self, *, echoes: Sequence[str], samples: int, token_ids: bool) -> None:
        """Begin the choices of prompt i with `echoes[i]`; tell ids where they are wanted."""
        self._echoes = echoes
        self._samples = samples
        self._token_ids = token_ids

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> dict[str, Any] | None:
        """The echo of its prompt."""
        echo = self._echo(choice)
        if not (echo or self._token_ids):
            return None
        ids = {"prompt_token_ids": prompt_ids, "token_ids": ()} if self._token_ids else {}
        return {"index": choice, "text": echo, "logprobs": None, "finish_reason": None} | ids

    def grown(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        """Its new text."""
        if not (delta.text or self._token_ids):
            return None
        part: dict[str, Any] = {"index": choice, "text": delta.text, "logprobs": None, "finish_reason": None}
        if self._token_ids:
            part["token_ids"] = delta.token_ids
        return part

    def ended(self, choice: int, reason: FinishReason) -> dict[str, Any]:
        """Why it ended."""
        return {"index": choice, "text": "", "logprobs": None, "finish_reason": reason.value}

    def whole(self, head: Head, drafts: Mapping[int, Draft], usage: replies.Usage) -> replies.Reply:
        """All choices."""
        choices = [
            replies.TextChoice(
                index=choice,
                text=self._echo(choice) + draft.text,
                finish_reason=draft.reason.value,
                token_ids=draft.token_ids if self._token_ids else None,
                prompt_token_ids=list(draft.prompt_ids) if self._token_ids else None,
            )
            for choice, draft in sorted(drafts.items())
        ]
        return replies.TextCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self._samples] if self._echoes else ""


class ChatForm:
    """Of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    chunk = "chat.completion.chunk"

    def __init__(self, *, token_ids: bool) -> None:
        """Tell ids where they are wanted."""
        self._token_ids = token_ids

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> dict[str, Any] | None:
        """Whose turn it is."""
        part = _chat_part(choice, {"role": "assistant", "content": ""})
        if self._token_ids:
            part["prompt_token_ids"] = prompt_ids
        return part

    def grown(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        """Its new text."""
        if not (delta.text or self._token_ids):
            return None
        part = _chat_part(choice, {"content": delta.text})
        if self._token_ids:
            part["token_ids"] = delta.token_ids
        return part

    def ended(self, choice: int, reason: FinishReason) -> dict[str, Any]:
        """Why it ended."""
        return _chat_part(choice, {}, reason.value)

    def whole(self, head: Head, drafts: Mapping[int, Draft], usage: replies.Usage) -> replies.Reply:
        """All choices."""
        choices = [
            replies.ChatChoice(
                index=choice,
                message=replies.AssistantMessage(content=draft.text),
                finish_reason=draft.reason.value,
                token_ids=draft.token_ids if self._token_ids else None,
                prompt_token_ids=list(draft.prompt_ids) if self._token_ids else None,
            )
            for choice, draft in sorted(drafts.items())
        ]
        return replies.ChatCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)


def _chat_part(choice: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
