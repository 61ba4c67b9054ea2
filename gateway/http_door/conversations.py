"""A conversation as OpenAI's API writes it: messages, tools and calls of them, and the `ChatPrompt` that they mean."""

from typing import Annotated, Any

from pydantic_core import to_json

from gateway.core.request import ChatMessage, ChatPrompt
from gateway.http_door.fields import UNCONSTRAINED, Fields, Ignored, Only, Unserved


class Function(Fields):
    """What the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: Annotated[Any, Only(False, why=UNCONSTRAINED)] = None


class Tool(Fields):
    """Something that the model may ask the client to do."""

    type: Annotated[Any, Only("function", why="functions are all that models here call")]
    function: Function


class CalledFunction(Fields):
    """What the model called, and with what."""

    name: str
    arguments: str


class MadeCall(Fields):
    """A call of an earlier turn."""

    id: str | None = None
    type: Annotated[Any, Only("function", why="functions are all that models here call")] = "function"
    function: CalledFunction
    index: Ignored = None


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
    name: str | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    refusal: Unserved = None
    audio: Unserved = None
    function_call: Unserved = None
    annotations: Annotated[Any, Only([], why="which this server does not serve")] = None

    def turn(self) -> ChatMessage:
        """What it means."""
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=_text(self.content),
            tool_calls=_json(self.tool_calls, exclude={"index"}),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


def chat_of(messages: list[Message], tools: list[Tool] | None) -> ChatPrompt:
    """What a conversation, and what the model may call in it, mean."""
    return ChatPrompt(tuple(message.turn() for message in messages), _json(tools))


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def _json(items: list[Tool] | list[MadeCall] | None, exclude: set[str] | None = None) -> str:
    """A JSON list, as a chat template gets it: without what was not said."""
    if not items:
        return ""
    return to_json([item.model_dump(exclude=exclude, exclude_none=True) for item in items]).decode()
