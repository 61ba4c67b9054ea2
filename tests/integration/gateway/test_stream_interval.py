"""How many tokens of a stream come together: what the request says, or what the gateway is set to."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest

from gateway.bounds import Bounds
from gateway.core.events import Delta, Event, Finished, Started
from gateway.core.interval import WHOLE_INTERVAL
from gateway.core.request import Generation, TokenPrompt
from octavo.records.serve import FinishReason, Prefilled, SampleFinished, StepReport, Tokens
from tests.support.fake_fleet import FakeFleet, FakeWorker, fake_fleet
from tests.support.gateway_service import gateway, words_pool

REQUEST = 1
"""The first on its stream."""


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    """One worker, which computes nothing by itself: the test speaks for it."""
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        running.workers[0].gate.clear()
        yield running


def asked(**fields: object) -> Generation:
    return Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=100, **fields)


def drew(*tokens: int) -> StepReport:
    return StepReport(tokens=(Tokens(REQUEST, 0, tokens),))


ENDED = StepReport(finished=(SampleFinished(REQUEST, 0, FinishReason.LENGTH),))


async def begin(worker: FakeWorker, events: AsyncIterator[Event]) -> None:
    """The request is at the worker, which has computed its prompt."""
    first = asyncio.ensure_future(anext(events))
    await worker.until(lambda worker: bool(worker.running))
    worker.say(StepReport(prefilled=(Prefilled(REQUEST, 0),)))
    assert isinstance(await first, Started)


async def heard(events: AsyncIterator[Event]) -> tuple[int, ...]:
    event = await anext(events)
    assert isinstance(event, Delta)
    return event.token_ids


@pytest.mark.parametrize(
    ("request_", "bounds"),
    [(asked(stream_interval=3), Bounds()), (asked(), Bounds(stream_interval=3))],
    ids=["by the request", "by the gateway"],
)
async def test_the_first_token_comes_at_once_and_then_so_many_together_and_the_rest_at_the_end(
    request_: Generation, bounds: Bounds, fleet: FakeFleet, tmp_path: Path
) -> None:
    [worker] = fleet.workers
    async with gateway(fleet, tmp_path, bounds) as front, aclosing(front.client.generate(request_)) as events:
        await begin(worker, events)
        worker.say(drew(5))
        assert await heard(events) == (5,)
        for token in (6, 7, 8):
            worker.say(drew(token))
        assert await heard(events) == (6, 7, 8)
        for token in (9, 10):
            worker.say(drew(token))
        worker.say(ENDED)
        assert await heard(events) == (9, 10)
        assert isinstance(await anext(events), Finished)


async def test_a_worker_that_is_lost_before_its_tokens_were_due_takes_none_along(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    first = fleet.workers[0]
    async with gateway(fleet, tmp_path) as front, aclosing(front.client.generate(asked(stream_interval=50))) as events:
        await begin(first, events)
        first.say(drew(5))
        assert await heard(events) == (5,)
        for token in (6, 7, 5):
            first.say(drew(token))
        second = await fleet.add("b", words_pool())
        await front.until_fleet(lambda workers: len(workers) == 2)
        await first.die()
        told = [token async for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert second.submissions
    assert [5, *told] == [(5, 6, 7)[at % 3] for at in range(100)]


async def test_over_http_an_event_has_as_many_tokens_as_the_stream_asked_for(fleet: FakeFleet, tmp_path: Path) -> None:
    [worker] = fleet.workers
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "stream": True, "stream_interval": 2, "return_token_ids": True}
    async with (
        gateway(fleet, tmp_path) as front,
        httpx2.AsyncClient(base_url=front.http) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        assert await next_ids(lines) == []  # with the prompt's
        await worker.until(lambda worker: bool(worker.running))
        worker.say(drew(5))
        assert await next_ids(lines) == [5]
        for token in (6, 7):
            worker.say(drew(token))
        assert await next_ids(lines) == [6, 7]


async def next_ids(lines: AsyncIterator[str]) -> list[int]:
    """Token ids of the next event."""
    async for line in lines:
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    raise AssertionError("the stream has ended")


def test_an_answer_that_is_awaited_whole_is_told_in_few_parts_unless_it_has_stop_strings() -> None:
    assert asked().read_whole().stream_interval == WHOLE_INTERVAL
    assert asked(stream_interval=2).read_whole().stream_interval == 2
    assert asked(stop=("x",)).read_whole().stream_interval is None
