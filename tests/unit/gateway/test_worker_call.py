"""What a request hears of its worker: all that was said since it last listened."""

import asyncio

import pytest

from gateway.core.interval import Interval
from gateway.waker import WAKES, Waker
from gateway.worker_client import WorkerCall
from octavo.errors import WorkerLost
from octavo.records.serve import FinishReason, Prefilled, SampleFinished, Submission, Tokens


def a_call(interval: int = 1, samples: int = 1, waker: Waker | None = None) -> WorkerCall:
    """Of request 1, whose stream is not needed here."""
    stream: object = None
    call = WorkerCall(stream, Interval(interval), waker or Waker())  # type: ignore[arg-type]
    call.expect(1, Submission(request=0, prompt=(5,), max_tokens=9, samples=samples))
    return call


def drew(token: int, sample: int = 0) -> Tokens:
    return Tokens(1, sample, (token,))


async def a_few_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_piles_up_before_the_reader_comes_is_heard_at_once_and_in_order() -> None:
    call = a_call()
    call.put(Prefilled(1, 16))
    end = SampleFinished(1, 0, FinishReason.LENGTH)
    for token in (5, 6, 7):
        call.put(drew(token))
    call.put(end)
    assert await call.hear() == [Prefilled(1, 16), drew(5), drew(6), drew(7), end]


async def test_a_reader_is_not_woken_for_what_it_has_taken_already() -> None:
    call = a_call()
    call.put(drew(5))
    await a_few_turns()
    call.put(drew(6))  # its turn to be told comes when the reader has taken it along
    assert await call.hear() == [drew(5), drew(6)]
    hearing = asyncio.create_task(call.hear())
    await a_few_turns()
    assert not hearing.done()
    call.put(drew(7))
    assert await hearing == [drew(7)]


async def test_tokens_that_are_not_due_wake_nobody_and_go_along_with_what_does() -> None:
    call = a_call(interval=3)
    call.put(drew(5))
    assert await call.hear() == [drew(5)]
    hearing = asyncio.create_task(call.hear())
    call.put(drew(6))
    await a_few_turns()
    assert not hearing.done()
    end = SampleFinished(1, 0, FinishReason.LENGTH)
    call.put(end)
    assert await hearing == [drew(6), end]


async def test_a_lost_worker_is_told_behind_what_it_said() -> None:
    call = a_call(interval=3)
    call.put(drew(5))
    await call.hear()
    call.put(drew(6))
    call.fail(WorkerLost("gone"))
    assert await call.hear() == [drew(6)]
    with pytest.raises(WorkerLost):
        await call.hear()


async def test_where_steps_come_sooner_than_they_can_be_told_whoever_waits_hears_several_together() -> None:
    waker, steps = Waker(), 50
    calls = [a_call(waker=waker) for _ in range(10 * WAKES)]
    heard: dict[WorkerCall, list[tuple[int, ...]]] = {call: [] for call in calls}

    async def read(call: WorkerCall) -> None:
        while True:
            heard[call].append(tuple(token for said in await call.hear() for token in said.tokens))

    reading = [asyncio.create_task(read(call)) for call in calls]
    await a_few_turns()
    for step in range(steps):  # one is read in a turn
        for call in calls:
            call.put(drew(step))
        await asyncio.sleep(0)
    assert sum(map(len, heard.values())) <= WAKES * steps
    for _ in range(2 * len(calls) // WAKES):
        await asyncio.sleep(0)
    for told in heard.values():
        assert [token for message in told for token in message] == list(range(steps))
    for task in reading:
        task.cancel()
