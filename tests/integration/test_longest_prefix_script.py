"""The scripts, in a real Redis: how many leading blocks a SET holds, and how many are claimed behind them."""

from collections.abc import AsyncGenerator, Iterable

import pytest

from octavo.index_schema import (
    CLAIM_SCRIPT,
    LONGEST_PREFIX_SCRIPT,
    MEMBER_BYTES,
    WHOLE_MARK,
    IndexAnswer,
    index_answer,
)
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


def joined(numbers: Iterable[int]) -> bytes:
    return b"".join(map(member, numbers))


async def look_up(redis: RedisServer, key: str, numbers: Iterable[int]) -> IndexAnswer | None:
    members = joined(numbers)
    words = (LONGEST_PREFIX_SCRIPT, 2, key, f"{key} claims", members, WHOLE_MARK)
    return index_answer(await redis.client.eval(*words), asked=len(members) // MEMBER_BYTES)


async def claim(
    redis: RedisServer, key: str, numbers: Iterable[int], milliseconds: int = 60_000, most: int = 9999
) -> None:
    await redis.client.eval(CLAIM_SCRIPT, 1, f"{key} claims", joined(numbers), milliseconds, most)


async def test_the_count_ends_at_the_first_miss_wherever_it_lies(redis: RedisServer) -> None:
    """S30: what comes after the hole is there, and is not counted."""
    await redis.client.sadd("index", WHOLE_MARK, *(member(number) for number in range(3000)))
    for held in BORDERS:
        prompt = [*range(held), 5000, *range(held, 2100)]
        assert await look_up(redis, "index", prompt) == IndexAnswer(held, True, held)


async def test_a_prompt_that_is_held_whole_counts_whole(redis: RedisServer) -> None:
    await redis.client.sadd("index", WHOLE_MARK, *(member(number) for number in range(3000)))
    for total in BORDERS:
        assert await look_up(redis, "index", range(total)) == IndexAnswer(total, True, total)


async def test_a_worker_without_an_index_holds_nothing_that_is_known(redis: RedisServer) -> None:
    assert await look_up(redis, "nowhere", [1, 2, 3]) == IndexAnswer(0, False, 0)


async def test_what_a_set_without_its_mark_holds_counts_but_may_be_too_little(redis: RedisServer) -> None:
    await redis.client.sadd("index", *(member(number) for number in range(40)))
    for held in (0, 1, 39, 40):
        assert await look_up(redis, "index", [*range(held), 5000]) == IndexAnswer(held, False, held)


async def test_claims_count_behind_what_is_held_up_to_their_first_gap(redis: RedisServer) -> None:
    await redis.client.sadd("index", WHOLE_MARK, *(member(number) for number in range(50)))
    for claimed in BORDERS[1:]:
        await claim(redis, "index", range(50, 50 + claimed))
        prompt = [*range(50 + claimed), 5000, *range(50 + claimed, 2200)]
        assert await look_up(redis, "index", prompt) == IndexAnswer(50, True, 50 + claimed)
        assert await look_up(redis, "index", range(50 + claimed)) == IndexAnswer(50, True, 50 + claimed)


async def test_a_claim_ends_by_itself_unless_it_is_made_again(redis: RedisServer) -> None:
    await claim(redis, "index", range(10), milliseconds=1)
    while await redis.client.exists("index claims"):  # the last one takes the key with it
        pass
    assert await look_up(redis, "index", range(10)) == IndexAnswer(0, False, 0)

    await claim(redis, "index", range(10), milliseconds=60_000)
    await redis.client.zadd("index claims", {member(3): 1.0})
    assert await look_up(redis, "index", range(10)) == IndexAnswer(0, False, 3), "that of 3 has ended"
    await claim(redis, "index", [3])
    assert await look_up(redis, "index", range(10)) == IndexAnswer(0, False, 10)


async def test_the_newest_claims_are_kept_and_those_that_have_ended_are_not(redis: RedisServer) -> None:
    await redis.client.zadd("index claims", {member(77): 1.0})
    await claim(redis, "index", range(100, 104), milliseconds=50_000, most=4)
    assert await redis.client.zcard("index claims") == 4
    await claim(redis, "index", range(4), milliseconds=60_000, most=4)
    assert {await redis.client.zscore("index claims", member(number)) for number in (77, *range(100, 104))} == {None}
    assert await look_up(redis, "index", range(10)) == IndexAnswer(0, False, 4)


async def test_another_value_where_claims_should_be_does_no_harm_and_is_replaced(redis: RedisServer) -> None:
    await redis.client.sadd("index", WHOLE_MARK, member(0))
    await redis.client.set("index claims", "not a sorted set")
    assert await look_up(redis, "index", range(5)) == IndexAnswer(1, True, 1)
    await claim(redis, "index", range(1, 3))
    assert await look_up(redis, "index", range(5)) == IndexAnswer(1, True, 3)
