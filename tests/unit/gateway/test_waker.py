"""Those who wait for news go on, a few in each turn of the event loop."""

import asyncio

from gateway.waker import WAKES, Waker


async def one_turn() -> None:
    await asyncio.sleep(0)


async def test_a_few_are_woken_in_the_next_turn_and_the_others_behind_them_in_order() -> None:
    waker = Waker()
    waiting = [asyncio.Event() for _ in range(2 * WAKES + 1)]
    for event in waiting:
        waker.wake(event)
    assert not any(event.is_set() for event in waiting)
    for turn in (1, 2, 3):
        await one_turn()
        awake = min(turn * WAKES, len(waiting))
        assert [event.is_set() for event in waiting] == [True] * awake + [False] * (len(waiting) - awake)


async def test_who_is_woken_twice_before_its_turn_has_one_turn() -> None:
    waker = Waker()
    first, others = asyncio.Event(), [asyncio.Event() for _ in range(WAKES)]
    waker.wake(first)
    waker.wake(first)
    for event in others:
        waker.wake(event)
    await one_turn()
    assert first.is_set()
    first.clear()
    await one_turn()
    assert all(event.is_set() for event in others)
    assert not first.is_set()


async def test_it_wakes_again_after_all_were_woken() -> None:
    waker, event = Waker(), asyncio.Event()
    for _ in range(2):
        event.clear()
        waker.wake(event)
        await one_turn()
        assert event.is_set()
