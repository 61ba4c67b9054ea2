"""The look-up script, in a real Redis: how many leading blocks a SET holds."""

from collections.abc import AsyncGenerator

import pytest

from octavo.index_schema import LONGEST_PREFIX_SCRIPT, WHOLE_MARK, index_count
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.redis

BORDERS = [0, 1, 7, 8, 9, 39, 40, 41, 167, 168, 169, 679, 680, 681, 1703, 1704, 1705, 2000]
"""The script probes 8, 32, 128, 512, then 1,024 at a time: those sums, and one to either side."""


@pytest.fixture
async def redis() -> AsyncGenerator[RedisServer]:
    async with redis_server() as server:
        yield server


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def look_up(redis: RedisServer, key: str, numbers: list[int]) -> int:
    return await redis.client.eval(LONGEST_PREFIX_SCRIPT, 1, key, b"".join(map(member, numbers)), WHOLE_MARK)  # pyright: ignore


async def test_the_count_ends_at_the_first_miss_wherever_it_lies(redis: RedisServer) -> None:
    """S30: what comes after the hole is there, and is not counted."""
    await redis.client.sadd("index", WHOLE_MARK, *(member(number) for number in range(3000)))
    for held in BORDERS:
        prompt = [*range(held), 5000, *range(held, 2100)]
        assert await look_up(redis, "index", prompt) == held


async def test_a_prompt_that_is_held_whole_counts_whole(redis: RedisServer) -> None:
    await redis.client.sadd("index", WHOLE_MARK, *(member(number) for number in range(3000)))
    for total in BORDERS:
        assert await look_up(redis, "index", list(range(total))) == total


async def test_a_worker_without_an_index_holds_nothing_that_is_known(redis: RedisServer) -> None:
    assert index_count(await look_up(redis, "nowhere", [1, 2, 3])) == (0, False)


async def test_what_a_set_without_its_mark_holds_counts_but_may_be_too_little(redis: RedisServer) -> None:
    await redis.client.sadd("index", *(member(number) for number in range(40)))
    assert [index_count(await look_up(redis, "index", [*range(held), 5000])) for held in (0, 1, 39, 40)] == [
        (0, False),
        (1, False),
        (39, False),
        (40, False),
    ]
