"""The clients ask again what was refused for the moment, and nothing else. The gateway here says what the test says."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.client import AsyncClient, Client
from gateway.core.retries import NEVER, Retries
from octavo.errors import Draining, InvalidRequest, NoWorker, OctavoError, PoolExhausted, QueueFull, WorkerLost
from octavo.service import SERVER_OPTIONS
from octavo.status import StatusInterceptor
from octavo.v1 import gateway_pb2 as v1
from octavo.v1 import gateway_pb2_grpc as v1_grpc

AT_ONCE = Retries(attempts=3, first_seconds=0.0)
MUCH_LATER = Retries(attempts=3, first_seconds=1e9, longest_seconds=1e9)


class Moody(v1_grpc.InferenceServicer):
    """Refuses as often as it was told to, then answers."""

    def __init__(self, *refusals: Exception, begun: bool = False) -> None:
        self._refusals = list(refusals)
        self._begun = begun
        self.calls = 0

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[v1.GenerateReply]:  # noqa: N802
        self.calls += 1
        if self._begun:
            yield v1.GenerateReply(started=v1.Started(request_id="1", index_state=1))
        if self._refusals:
            raise self._refusals.pop(0)
        yield v1.GenerateReply(delta=v1.Delta(text="well"))
        yield v1.GenerateReply(finished=v1.Finished(reason=1))
        yield v1.GenerateReply(usage=v1.Usage(worker_id="a"))

    async def Tokenize(self, request: Any, context: Any) -> v1.TokenizeReply:  # noqa: N802
        self.calls += 1
        if self._refusals:
            raise self._refusals.pop(0)
        return v1.TokenizeReply(ids=[5])


@asynccontextmanager
async def served(servicer: Moody) -> AsyncGenerator[str]:
    server = grpc.aio.server(interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    v1_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


Ask = Callable[[str, Retries], Awaitable[str]]
TIMEOUT_SECONDS = 30.0


async def complete(address: str, retries: Retries) -> str:
    async with AsyncClient(address, retries=retries) as client:
        return (await client.complete("x", timeout_seconds=TIMEOUT_SECONDS)).text


async def tokenize(address: str, retries: Retries) -> str:
    async with AsyncClient(address, retries=retries) as client:
        return str(await client.tokenize("x", timeout_seconds=TIMEOUT_SECONDS))


async def complete_plainly(address: str, retries: Retries) -> str:
    def ask() -> str:
        with Client(address, retries=retries) as client:
            return client.complete("x", timeout_seconds=TIMEOUT_SECONDS).text

    return await asyncio.to_thread(ask)


async def tokenize_plainly(address: str, retries: Retries) -> str:
    def ask() -> str:
        with Client(address, retries=retries) as client:
            return str(client.tokenize("x", timeout_seconds=TIMEOUT_SECONDS))

    return await asyncio.to_thread(ask)


STREAMS = [complete, complete_plainly]
each_way = pytest.mark.parametrize("ask", [*STREAMS, tokenize, tokenize_plainly])


@each_way
@pytest.mark.parametrize("refusal", [QueueFull, PoolExhausted, NoWorker, Draining, WorkerLost])
async def test_what_was_refused_for_the_moment_is_asked_again(ask: Ask, refusal: type[OctavoError]) -> None:
    moody = Moody(refusal("not now", retry_after_seconds=0.0), refusal("nor now", retry_after_seconds=0.01))
    async with served(moody) as address:
        assert await ask(address, AT_ONCE) in ("well", "(5,)")
    assert moody.calls == 3


@each_way
async def test_after_the_last_attempt_the_refusal_is_the_answer(ask: Ask) -> None:
    moody = Moody(*[QueueFull(f"number {at}", retry_after_seconds=0.0) for at in range(9)])
    async with served(moody) as address:
        with pytest.raises(QueueFull, match="number 2"):
            await ask(address, AT_ONCE)
    assert moody.calls == 3


@each_way
async def test_what_the_caller_must_change_is_not_asked_again(ask: Ask) -> None:
    moody = Moody(InvalidRequest("n: 0"))
    async with served(moody) as address:
        with pytest.raises(InvalidRequest):
            await ask(address, AT_ONCE)
    assert moody.calls == 1


@each_way
async def test_a_client_may_be_told_never_to_ask_again(ask: Ask) -> None:
    moody = Moody(QueueFull("full"))
    async with served(moody) as address:
        with pytest.raises(QueueFull):
            await ask(address, NEVER)
    assert moody.calls == 1


@pytest.mark.parametrize("ask", STREAMS)
async def test_an_answer_that_has_begun_is_not_asked_for_again(ask: Ask) -> None:
    moody = Moody(WorkerLost("gone"), begun=True)
    async with served(moody) as address:
        with pytest.raises(WorkerLost):
            await ask(address, AT_ONCE)
    assert moody.calls == 1


@each_way
async def test_nobody_waits_beyond_the_deadline_for_another_attempt(ask: Ask) -> None:
    """The pause that is due is longer than the time that is left: the refusal comes at once."""
    moody = Moody(QueueFull("full"))
    async with served(moody) as address:
        with pytest.raises(QueueFull):
            await ask(address, MUCH_LATER)
    assert moody.calls == 1


@each_way
async def test_nobody_comes_back_before_the_refusal_said(ask: Ask) -> None:
    """That is after the deadline here: the refusal comes at once, and tells when to come."""
    moody = Moody(QueueFull("full", retry_after_seconds=1e4))
    async with served(moody) as address:
        with pytest.raises(QueueFull) as refusal:
            await ask(address, AT_ONCE)
    assert moody.calls == 1
    assert refusal.value.retry_after_seconds == 1e4


@each_way
async def test_a_gateway_that_is_not_there_is_a_connection_error_after_the_last_attempt(ask: Ask) -> None:
    with pytest.raises(ConnectionError, match=r"gateway 127\.0\.0\.1:9"):
        await ask("127.0.0.1:9", AT_ONCE)
