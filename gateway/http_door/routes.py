"""The HTTP API: paths, who may ask, and what answers. No decision is made here that the dispatcher makes."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gateway.core.account import Account
from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.dispatcher import Dispatcher
from gateway.http_door import replies
from gateway.http_door.answers import Stream, prompts_alone, whole
from gateway.http_door.connection import EventStream, while_connected
from gateway.http_door.entrance import TenantsRoute, guard, told
from gateway.http_door.errors import ErrorReply, problem_of_status
from gateway.http_door.forms import ChatForm, Form, Head, TextForm
from gateway.http_door.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from gateway.tenancy import Tenancy
from octavo.errors import UnknownModel

VERSION = version("octavo")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the door stands before."""

    dispatcher: Dispatcher
    tenancy: Tenancy
    metrics: Collector
    ready: Callable[[], bool]
    """Whether new requests are welcome."""


def build_app(gateway: Gateway, max_body_bytes: int) -> FastAPI:
    """The application; serve it with `gateway.http_door.server`. Bodies of more than `max_body_bytes` are refused."""
    app = FastAPI(
        title="Octavo",
        summary="Language models from a fleet that remembers what it has read, over OpenAI's API.",
        version=VERSION,
        docs_url=None,  # the pages fetch scripts from elsewhere
        redoc_url=None,
    )
    guard(app, gateway.tenancy, max_body_bytes)
    app.include_router(_for_tenants(gateway))
    app.include_router(_for_anybody(gateway))
    return app


# ---- for tenants -----------------------------------------------------------------------------------------------

_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request cannot be served as it is, or not now."},
    "5XX": {"model": ErrorReply, "description": "It could not be served."},
}


_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {EventStream.media_type: {}}, "description": "The whole, or with `stream` server-sent events."}
}


def _for_tenants(gateway: Gateway) -> APIRouter:
    router = APIRouter(
        route_class=TenantsRoute, responses=_REFUSALS, dependencies=[Security(HTTPBearer(auto_error=False))]
    )
    answering = _Answering(gateway.dispatcher)
    models = _Models(gateway.dispatcher)
    add = router.add_api_route
    metrics = _Metrics(gateway.metrics)
    add("/metrics", metrics.scrape, methods=["GET"], response_class=PlainTextResponse)
    add("/v1/models", models.all, methods=["GET"])
    add("/v1/models/{model:path}", models.one, methods=["GET"])
    words = _Words(gateway.dispatcher)
    add("/tokenize", words.tokens, methods=["POST"])
    add("/detokenize", words.text, methods=["POST"])
    for path, answer, reply in (
        ("/v1/completions", answering.completion, replies.TextCompletion),
        ("/v1/chat/completions", answering.chat, replies.ChatCompletion),
    ):
        add(path, answer, methods=["POST"], response_model=reply, responses=_STREAMED)
    return router


class _Metrics:
    """For Prometheus, which shows a key as others do."""

    def __init__(self, metrics: Collector) -> None:
        self._metrics = metrics

    async def scrape(self) -> Response:
        """All metrics of this gateway and its process."""
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST)


class _Models:
    """Those that some worker serves now."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._since = int(time.time())

    async def all(self) -> replies.ModelList:
        """The models that can be asked."""
        found = self._dispatcher.models()
        return replies.ModelList(
            data=[
                replies.Model(id=each.name, created=self._since, max_model_len=each.max_model_tokens) for each in found
            ]
        )

    async def one(self, model: str) -> replies.Model:
        """One of them, by its name."""
        found = (await self.all()).data
        for each in found:
            if each.id == model:
                return each
        raise UnknownModel(f"model: {model!r}; there are: {', '.join(each.id for each in found) or 'none'}")


class _Words:
    """Text to tokens and back, as vLLM has it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def tokens(self, asked: TokenizeRequest) -> replies.Tokens:
        """The token ids of a text or a conversation."""
        tokens = await self._dispatcher.tokens(asked.given(), asked.model)
        name = self._dispatcher.served(asked.model).name
        longest = next((each.max_model_tokens for each in self._dispatcher.models() if each.name == name), None)
        return replies.Tokens(tokens=list(tokens), count=len(tokens), max_model_len=longest)

    async def text(self, asked: DetokenizeRequest) -> replies.Text:
        """The text of token ids."""
        return replies.Text(prompt=await self._dispatcher.text(asked.tokens, asked.model, special_tokens=True))


class _Answering:
    """Completions and chats."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def completion(self, asked: CompletionRequest, request: Request) -> Response:
        """Text after text; with `stream`, server-sent events."""
        tokenizer = self._dispatcher.served(asked.model).tokenizer
        form = TextForm(
            echoes=_texts(asked, tokenizer.decode) if asked.echo else (),
            samples=asked.samples,
            extras=asked.extras,
            piece=tokenizer.piece,
        )
        events = self._events(asked.generations(), asked.timeout_seconds, request.state.account)
        return await self._answer(request, asked, prompts_alone(events) if asked.wants_prompt_alone else events, form)

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        """The assistant's next turn; with `stream`, server-sent events."""
        tokenizer = self._dispatcher.served(asked.model).tokenizer
        tool_form = tokenizer.tool_form if asked.may_call else None
        form = ChatForm(tool_form=tool_form, extras=asked.extras, piece=tokenizer.piece)
        events = self._events([asked.generation()], asked.timeout_seconds, request.state.account)
        return await self._answer(request, asked, events, form)

    async def _answer(
        self, request: Request, asked: GenerationFields, events: AsyncGenerator[tuple[int, Event]], form: Form
    ) -> Response:
        model = self._dispatcher.served(asked.model).name
        head = Head(id=f"{form.prefix}-{request.state.request_id}", created=int(time.time()), model=model)
        if not asked.stream:
            async with aclosing(events):
                reply = await while_connected(request, whole(events, form, head, asked.samples))
            return Response(reply.model_dump_json(), media_type="application/json")
        first = await _first(request, events)
        stream = Stream(form, head, asked.samples, usage=asked.tells_usage, usage_so_far=asked.tells_usage_so_far)
        return EventStream(stream.of(_behind(first, events)), events)

    async def _events(
        self, generations: Sequence[Generation], seconds: float | None, account: Account
    ) -> AsyncGenerator[tuple[int, Event]]:
        """(number of the prompt, event) as they come; the first failure ends all."""
        if len(generations) == 1:  # nearly always, and one queue less
            async with aclosing(self._dispatcher.generate(generations[0], seconds, account)) as alone:
                async for event in alone:
                    yield 0, event
            return
        async with aclosing(self._dispatcher.generate_each(generations, seconds, account)) as together:
            async for prompt, event in together:
                if isinstance(event, Exception):
                    raise event
                yield prompt, event


def _texts(asked: CompletionRequest, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Of the prompts."""
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in asked.prompt]


async def _first(request: Request, events: AsyncGenerator[tuple[int, Event]]) -> tuple[int, Event]:
    """A stream begins when a worker has the request: until then a refusal still has a status of its own."""
    try:
        return await while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise


async def _behind(
    first: tuple[int, Event], events: AsyncGenerator[tuple[int, Event]]
) -> AsyncGenerator[tuple[int, Event]]:
    yield first
    async for event in events:
        yield event


# ---- for operators ---------------------------------------------------------------------------------------------


def _for_anybody(gateway: Gateway) -> APIRouter:
    """What load balancers ask, who have no key."""
    router = APIRouter()

    async def health() -> Response:
        """200 while new requests are welcome, else 503."""
        if gateway.ready():
            return JSONResponse({"status": "ok"})
        return told(problem_of_status(HTTPStatus.SERVICE_UNAVAILABLE, "no new requests are taken now"))

    async def which_version() -> dict[str, str]:
        """The server's version."""
        return {"version": VERSION}

    unready: dict[int | str, dict[str, Any]] = {503: {"model": ErrorReply, "description": "Not ready, or draining."}}
    router.add_api_route("/health", health, methods=["GET"], responses=unready, response_model=replies.Health)
    router.add_api_route("/version", which_version, methods=["GET"])
    return router
