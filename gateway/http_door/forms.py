"""The two forms of an answer, completion and chat: the parts of a stream, and the whole.

A choice is one sample of one prompt; choices are numbered through all prompts of a request. What a stream's parts tell,
joined, is what the whole says. A part is an entry of `choices` in a stream's event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from gateway.core.events import Delta
from gateway.core.tool_calls import Piece as TextOrCall
from gateway.core.tool_calls import ToolCall, ToolCallParser, ToolForm
from gateway.http_door import replies
from gateway.http_door.logprobs import Piece, TextLogprobs, chat_logprobs, prompt_logprobs
from octavo.records.serve import FinishReason, TokenLogprobs

Part = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What an answer and all events of a stream begin with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is told besides text, where it was asked for."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the worker got it."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """From the second token on, where they were asked for."""


@dataclass(slots=True)
class Draft:
    """A choice that grows."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    reason: FinishReason = FinishReason.LENGTH

    def add(self, delta: Delta) -> None:
        """What it gained."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Form(Protocol):
    """How an answer is told."""

    prefix: str
    """Of the answer's id."""
    chunk: str
    """What an event of a stream is called."""
    awaits_prompt_logprobs: bool
    """Whether a stream's choices can only open when those are known."""

    def opening(self, choice: int, prompt: ReadPrompt) -> list[Part]:
        """A choice's first parts, before there is a token."""
        ...

    def grown(self, choice: int, delta: Delta) -> list[Part]:
        """What it gained, as far as that can be told yet."""
        ...

    def ended(self, choice: int, reason: FinishReason) -> list[Part]:
        """Its last parts."""
        ...

    def whole(
        self, head: Head, prompts: Mapping[int, ReadPrompt], drafts: Mapping[int, Draft], usage: replies.Usage
    ) -> replies.Reply:
        """The answer that comes at once."""
        ...


class TextForm:
    """Of `/v1/completions`."""

    prefix = "cmpl"
    chunk = "text_completion"

    def __init__(self, *, echoes: Sequence[str], samples: int, extras: Extras, piece: Piece) -> None:
        """Begin the choices of prompt i with `echoes[i]`, if there are any; `piece` writes tokens."""
        self._echoes = echoes
        self._samples = samples
        self._extras = extras
        self._piece = piece
        self._logprobs: dict[int, TextLogprobs] = {}
        self.awaits_prompt_logprobs = extras.logprobs and bool(echoes)

    def opening(self, choice: int, prompt: ReadPrompt) -> list[Part]:
        """The echo of its prompt."""
        part = _text_part(choice, self._echo(choice))
        if self._extras.logprobs:
            self._logprobs[choice] = TextLogprobs(self._piece)
            if self._echoes:
                part["logprobs"] = self._logprobs[choice].told(prompt.ids, [None, *prompt.logprobs])
        if self._extras.token_ids:
            part |= {"prompt_token_ids": prompt.ids, "token_ids": ()}
        return [part] if self._echoes or self._extras.token_ids else []

    def grown(self, choice: int, delta: Delta) -> list[Part]:
        """Its new text."""
        if not (delta.text or (delta.token_ids and (self._extras.logprobs or self._extras.token_ids))):
            return []
        part = _text_part(choice, delta.text)
        if self._extras.logprobs:
            part["logprobs"] = self._logprobs[choice].told(delta.token_ids, delta.logprobs)
        if self._extras.token_ids:
            part["token_ids"] = delta.token_ids
        return [part]

    def ended(self, choice: int, reason: FinishReason) -> list[Part]:
        """Why it ended."""
        return [_text_part(choice, "", reason.value)]

    def whole(
        self, head: Head, prompts: Mapping[int, ReadPrompt], drafts: Mapping[int, Draft], usage: replies.Usage
    ) -> replies.Reply:
        """All choices."""
        choices = [self._choice(at, prompts[at // self._samples], draft) for at, draft in sorted(drafts.items())]
        return replies.TextCompletion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)

    def _choice(self, choice: int, prompt: ReadPrompt, draft: Draft) -> replies.TextChoice:
        ids, logprobs = draft.token_ids, [*draft.logprobs]
        told = TextLogprobs(self._piece)
        if self._echoes:
            ids, logprobs = [*prompt.ids, *ids], [None, *prompt.logprobs, *logprobs]
        return replies.TextChoice(
            index=choice,
            text=self._echo(choice) + draft.text,
            finish_reason=draft.reason.value,
            logprobs=replies.TextLogprobs(**told.told(ids, logprobs)) if self._extras.logprobs else None,
            **_ids(self._extras, prompt, draft),
            **_prompt_logprobs(self._extras, self._piece, prompt),
        )

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self._samples] if self._echoes else ""


class ChatForm:
    """Of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    chunk = "chat.completion.chunk"
    awaits_prompt_logprobs = False

    def __init__(self, *, tool_form: ToolForm | None, extras: Extras, piece: Piece) -> None:
        """Look for calls of that form in what the model writes; None: do not look."""
        self._tool_form = tool_form
        self._extras = extras
        self._piece = piece
        self._parsers: dict[int, ToolCallParser] = {}

    def opening(self, choice: int, prompt: ReadPrompt) -> list[Part]:
        """Whose turn it is."""
        if self._tool_form is not None:
            self._parsers[choice] = ToolCallParser(self._tool_form)
        part = _chat_part(choice, {"role": "assistant", "content": ""})
        if self._extras.token_ids:
            part["prompt_token_ids"] = prompt.ids
        return [part]

    def grown(self, choice: int, delta: Delta) -> list[Part]:
        """Its new text, and the calls that are whole now."""
        parser = self._parsers.get(choice)
        pieces: list[TextOrCall] = [delta.text] if parser is None else parser.push(delta.text)
        parts = self._told(choice, pieces, parser)
        if delta.token_ids and (self._extras.logprobs or self._extras.token_ids):
            parts = parts or [_chat_part(choice, {})]
            if self._extras.logprobs:
                parts[0]["logprobs"] = chat_logprobs(self._piece, delta.token_ids, delta.logprobs)
            if self._extras.token_ids:
                parts[0]["token_ids"] = delta.token_ids
        return parts

    def ended(self, choice: int, reason: FinishReason) -> list[Part]:
        """What was held back, and why it ended."""
        parser = self._parsers.get(choice)
        parts = [] if parser is None else self._told(choice, parser.flush(), parser)
        return [*parts, _chat_part(choice, {}, _reason(reason, 0 if parser is None else parser.calls))]

    def _told(self, choice: int, pieces: Sequence[TextOrCall], parser: ToolCallParser | None) -> list[Part]:
        parts: list[Part] = []
        call = 0 if parser is None else parser.calls - sum(isinstance(piece, ToolCall) for piece in pieces)
        for piece in pieces:
            if isinstance(piece, ToolCall):
                parts.append(_chat_part(choice, {"tool_calls": [{"index": call, **_call(piece)}]}))
                call += 1
            elif piece:
                parts.append(_chat_part(choice, {"content": piece}))
        return parts

    def whole(
        self, head: Head, prompts: Mapping[int, ReadPrompt], drafts: Mapping[int, Draft], usage: replies.Usage
    ) -> replies.Reply:
        """All choices."""
        choices = [self._choice(at, prompts[0], draft) for at, draft in sorted(drafts.items())]
        return replies.ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            **_prompt_logprobs(self._extras, self._piece, prompts[0]),
        )

    def _choice(self, choice: int, prompt: ReadPrompt, draft: Draft) -> replies.ChatChoice:
        text, calls = self._parsed(draft.text)
        logprobs = chat_logprobs(self._piece, draft.token_ids, draft.logprobs) if self._extras.logprobs else None
        return replies.ChatChoice(
            index=choice,
            message=replies.AssistantMessage(
                content=None if calls and not text else text,
                tool_calls=[replies.ToolCall(**_call(call)) for call in calls] or None,
            ),
            finish_reason=_reason(draft.reason, len(calls)),
            logprobs=None if logprobs is None else replies.ChatLogprobs(**logprobs),
            **_ids(self._extras, prompt, draft),
        )

    def _parsed(self, text: str) -> tuple[str, list[ToolCall]]:
        """(text, calls)."""
        if self._tool_form is None:
            return text, []
        parser = ToolCallParser(self._tool_form)
        pieces = [*parser.push(text), *parser.flush()]
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def _text_part(choice: int, text: str, reason: str | None = None) -> Part:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}


def _chat_part(choice: int, delta: dict[str, Any], reason: str | None = None) -> Part:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}


def _reason(reason: FinishReason, calls: int) -> replies.ChatFinishReason:
    """A turn that ends by itself with calls in it waits for what they give."""
    return "tool_calls" if calls and reason is FinishReason.STOP else reason.value


def _ids(extras: Extras, prompt: ReadPrompt, draft: Draft) -> dict[str, Any]:
    return {"token_ids": draft.token_ids, "prompt_token_ids": prompt.ids} if extras.token_ids else {}


def _prompt_logprobs(extras: Extras, piece: Piece, prompt: ReadPrompt) -> dict[str, Any]:
    return {"prompt_logprobs": prompt_logprobs(piece, prompt.ids, prompt.logprobs)} if extras.prompt_logprobs else {}
