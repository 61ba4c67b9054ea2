"""Those who wait for news go on, a few in each turn of the event loop."""

import asyncio

from gateway.waker import WAKES, Waker


class Sleeping:
    """Counts its turns."""

    def __init__(self) -> None:
        self.turns = 0

    def go_on(self) -> None:
        self.turns += 1


async def one_turn() -> None:
    await asyncio.sleep(0)


async def test_a_few_are_woken_in_the_next_turn_and_the_others_behind_them_in_order() -> None:
    waker = Waker()
    sleeping = [Sleeping() for _ in range(2 * WAKES + 1)]
    for sleeper in sleeping:
        waker.wake(sleeper)
    assert not any(sleeper.turns for sleeper in sleeping)
    for turn in (1, 2, 3):
        await one_turn()
        awake = min(turn * WAKES, len(sleeping))
        assert [sleeper.turns for sleeper in sleeping] == [1] * awake + [0] * (len(sleeping) - awake)


async def test_who_is_woken_twice_before_its_turn_has_one_turn() -> None:
    waker = Waker()
    first, others = Sleeping(), [Sleeping() for _ in range(WAKES)]
    waker.wake(first)
    waker.wake(first)
    for sleeper in others:
        waker.wake(sleeper)
    for _ in range(2):
        await one_turn()
    assert [sleeper.turns for sleeper in (first, *others)] == [1] * (1 + WAKES)


async def test_it_wakes_again_after_all_were_woken() -> None:
    waker, sleeper = Waker(), Sleeping()
    for turns in (1, 2):
        waker.wake(sleeper)
        await one_turn()
        assert sleeper.turns == turns
