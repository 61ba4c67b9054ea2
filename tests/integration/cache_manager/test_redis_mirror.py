"""The copy of the prefix index in a real Redis follows the books, whatever happens to Redis."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, closing, suppress
from typing import Any

import pytest

from deploy.process import LOOPBACK
from octavo.hashing import block_hashes
from octavo.index_schema import WHOLE_MARK, index_member
from tests.support import books
from tests.support.manager_service import ManagerService, WorkerStandIn, manager_service, until
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.redis


@pytest.fixture
async def redis() -> AsyncGenerator[RedisServer]:
    async with redis_server() as server:
        yield server


@pytest.fixture
async def service(redis: RedisServer) -> AsyncGenerator[ManagerService]:
    async with manager_service(redis.url) as service:
        yield service


def prompt(number: int, blocks: int = 2) -> list[int]:
    """A prompt of so many full blocks of 4, and 2 tokens more; none shares a block with another number's."""
    return [number, *range(500, 500 + 4 * blocks + 1)]


def members(*prompts: list[int]) -> set[bytes]:
    """What the SET of a worker holds that has computed these prompts."""
    root = books.pool_spec().chain_root().hash()
    return {index_member(block) for tokens in prompts for block in block_hashes(root, tokens, 4)} | {WHOLE_MARK}


async def until_index_is(redis: RedisServer, worker: WorkerStandIn, wanted: set[bytes]) -> None:
    async def agrees() -> bool:
        return await redis.client.smembers(worker.index) == wanted

    await until(agrees)


async def until_key_is_gone(redis: RedisServer, key: str) -> None:
    async def gone() -> bool:
        return not await redis.client.exists(key)

    await until(gone)


async def until_logged(caplog: pytest.LogCaptureFixture, event: str) -> None:
    async def logged() -> bool:
        return event in caplog.messages

    await until(logged)


async def test_the_index_holds_the_hashes_of_the_full_blocks(redis: RedisServer, service: ManagerService) -> None:
    """The hashes are those that a gateway computes from the tokens (octavo.hashing)."""
    async with service.worker() as worker:
        await worker.compute(1, prompt(1, blocks=3))
        await until_index_is(redis, worker, members(prompt(1, blocks=3)))


async def test_an_evicted_block_leaves_the_index(redis: RedisServer, service: ManagerService) -> None:
    """S30: the tail of the old chain goes first."""
    async with service.worker(num_blocks=5) as worker:
        await worker.compute(1, prompt(1, blocks=3))
        await until_index_is(redis, worker, members(prompt(1, blocks=3)))
        await worker.exchange(finished=[1])
        await worker.compute(2, prompt(2, blocks=2))
        await until_index_is(redis, worker, members(prompt(1, blocks=2), prompt(2, blocks=2)))


async def test_the_index_follows_random_work(redis: RedisServer, service: ManagerService) -> None:
    random.seed(8)
    async with service.worker(num_blocks=12) as worker:
        for sequence in range(1, 100):
            await worker.compute(sequence, prompt(random.randrange(6), blocks=random.randrange(1, 9)))
            await worker.exchange(finished=[sequence])
        published = {index_member(block) for block in service.changes.truth(worker.index)} | {WHOLE_MARK}
        assert len(published) > 6
        await until_index_is(redis, worker, published)


async def test_each_worker_has_an_index_of_its_own(redis: RedisServer, service: ManagerService) -> None:
    async with service.worker("w1") as one, service.worker("w2") as two:
        await one.compute(1, prompt(1))
        await two.compute(1, prompt(2))
        await until_index_is(redis, one, members(prompt(1)))
        await until_index_is(redis, two, members(prompt(2)))


@pytest.mark.parametrize(
    "difference",
    [
        {"tokenizer_digest": b"u" * 32},
        {"model_digest": b"n" * 32},
        {"adapter_digest": b"a" * 32},
        {"dtype": "bfloat16"},
    ],
    ids=repr,
)
async def test_two_managers_that_share_a_redis_never_mix_two_revisions_of_a_model(
    redis: RedisServer, service: ManagerService, difference: dict[str, Any]
) -> None:
    """S8, S12, where no manager sees both nodes: the same prompt under the same name has no member in common."""
    async with (
        manager_service(redis.url) as other,
        service.worker("one") as one,
        other.worker("two", **difference) as two,
    ):
        await one.compute(1, prompt(1))
        await two.compute(1, prompt(1))
        await until_index_is(redis, one, members(prompt(1)))
        root = books.pool_spec(**difference).chain_root().hash()
        theirs = {index_member(block) for block in block_hashes(root, prompt(1), 4)}
        await until_index_is(redis, two, theirs | {WHOLE_MARK})
        assert members(prompt(1)) & theirs == set()


async def test_the_index_of_a_dropped_stream_is_dropped(redis: RedisServer, service: ManagerService) -> None:
    async with service.fleet() as fleet:
        async with service.worker() as worker:
            await worker.compute(1, prompt(1))
            await until_index_is(redis, worker, members(prompt(1)))
        await fleet.until(lambda update: update.gone == ("w",))
    await until_key_is_gone(redis, worker.index)


async def test_a_new_epoch_begins_with_an_empty_index(redis: RedisServer, service: ManagerService) -> None:
    async with service.worker() as earlier:
        await earlier.compute(1, prompt(1))
        await until_index_is(redis, earlier, members(prompt(1)))
        async with service.worker() as later:
            assert later.index != earlier.index
            await until_key_is_gone(redis, earlier.index)
            await later.compute(1, prompt(2))
            await until_index_is(redis, later, members(prompt(2)))


async def test_a_worker_that_comes_again_has_its_index_again(redis: RedisServer, service: ManagerService) -> None:
    """S44: under its new epoch, whichever manager it comes to; what stood under the old one is dropped at once."""
    lost = WorkerStandIn(service.stub)
    await lost.register(books.pool_spec())
    await lost.compute(1, prompt(1))
    await until_index_is(redis, lost, members(prompt(1)))
    async with manager_service(redis.url) as other, other.worker(inventory=lost.mirror.inventory(), last=lost) as again:
        await until_index_is(redis, again, members(prompt(1)))
        await until_key_is_gone(redis, lost.index)
        lost.drop()


async def test_lost_and_strange_changes_are_made_good(redis: RedisServer, service: ManagerService) -> None:
    """S44: of every 100 changes one is dropped, and one comes that nobody made. No block is credited that is absent."""
    dice = random.Random(44)
    async with service.worker(num_blocks=12) as worker:
        for sequence in range(1, 301):
            await worker.compute(sequence, prompt(dice.randrange(6), blocks=dice.randrange(1, 9)))
            await worker.exchange(finished=[sequence])
            if sequence % 100 == 0:
                await redis.client.spop(worker.index)
            if sequence % 100 == 50:
                await redis.client.sadd(worker.index, dice.randbytes(16))
        await worker.compute(999, prompt(77))  # the next change, at which a wrong size is seen
        truth = {index_member(block) for block in service.changes.truth(worker.index)} | {WHOLE_MARK}
        await until_index_is(redis, worker, truth)


async def test_a_manager_that_stops_drops_its_indexes(redis: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(manager_service(redis.url))
        worker = WorkerStandIn(service.stub)
        await worker.register(books.pool_spec())
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        service.manager.close()
    assert not await redis.client.exists(worker.index)


async def test_an_index_lives_only_while_it_is_renewed(redis: RedisServer) -> None:
    async with manager_service(redis.url, ttl_seconds=30) as service, service.worker() as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        assert 0 < await redis.client.pttl(worker.index) <= 30_000


async def test_an_index_that_is_turned_over_whole_keeps_its_time_to_live(
    redis: RedisServer, service: ManagerService
) -> None:
    async with service.worker(num_blocks=3) as worker:
        for number in range(1, 10):
            await worker.compute(number, prompt(number))
            await worker.exchange(finished=[number])
        await until_index_is(redis, worker, members(prompt(9)))
        assert await redis.client.pttl(worker.index) > 0


async def test_the_time_to_live_is_renewed_while_the_worker_says_nothing(redis: RedisServer) -> None:
    async with manager_service(redis.url, ttl_seconds=0.3) as service, service.worker() as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        await redis.client.persist(worker.index)

        async def mortal() -> bool:
            return await redis.client.pttl(worker.index) > 0

        await until(mortal)


async def test_exchanges_go_on_without_redis_and_its_return_completes_the_index(
    redis: RedisServer, service: ManagerService, caplog: pytest.LogCaptureFixture
) -> None:
    """S43, the manager's half: the index is killed and comes back empty. Its loss is said once, and its return."""
    caplog.set_level(logging.INFO, "octavo")
    async with service.worker(num_blocks=64) as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        await redis.stop()
        for number in range(2, 8):
            await worker.compute(number, prompt(number))
        await until_logged(caplog, "index_mirror_lost")
        await worker.compute(8, prompt(8))
        await redis.start()
        await until_index_is(redis, worker, members(*map(prompt, range(1, 9))))
        await until_logged(caplog, "index_mirror_found")
    assert caplog.messages.count("index_mirror_lost") == caplog.messages.count("index_mirror_found") == 1


async def test_a_manager_may_start_before_redis(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    await redis.stop()
    async with manager_service(redis.url) as service, service.worker() as worker:
        await until_logged(caplog, "index_mirror_lost")
        await worker.compute(1, prompt(1))
        await redis.start()
        await until_index_is(redis, worker, members(prompt(1)))


async def test_what_answers_in_redis_place_is_not_believed_and_ends_nothing(
    redis: RedisServer, service: ManagerService
) -> None:
    """S47: a server that finds everything right, and counts nothing."""
    unlinked = 0

    async def copied_twice() -> bool:
        return unlinked > 1

    async def word(reader: asyncio.StreamReader) -> bytes:
        return (await reader.readexactly(int((await reader.readline())[1:]) + 2)).strip()

    async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal unlinked
        with closing(writer), suppress(EOFError, OSError):
            while unlinked < 2 and (head := await reader.readline()):
                words = [await word(reader) for _ in range(int(head[1:]))]
                writer.write(b"%1\r\n+proto\r\n:3\r\n" if words[0] == b"HELLO" else b"+OK\r\n")
                unlinked += words[0] == b"UNLINK"

    async with service.worker() as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        await redis.stop()
        async with await asyncio.start_server(agree, LOOPBACK, redis.port):
            await worker.compute(2, prompt(2))
            await until(copied_twice)
        await redis.start()
        await until_index_is(redis, worker, members(prompt(1), prompt(2)))


async def test_a_restart_between_two_batches_is_noticed(redis: RedisServer, service: ManagerService) -> None:
    """The client reconnects by itself and sees no error; only the size of the SET tells."""
    async with service.worker() as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        await redis.stop()
        await redis.start()
        await worker.compute(2, prompt(2))
        await until_index_is(redis, worker, members(prompt(1), prompt(2)))


async def test_an_index_that_was_wiped_while_nothing_happens_comes_back(redis: RedisServer) -> None:
    async with manager_service(redis.url, ttl_seconds=0.3) as service, service.worker() as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        await redis.client.flushall()
        await until_index_is(redis, worker, members(prompt(1)))


async def test_a_key_that_holds_something_else_costs_that_key_only(
    redis: RedisServer, service: ManagerService, caplog: pytest.LogCaptureFixture
) -> None:
    """S47: one corrupt value."""
    async with service.worker("w1") as one, service.worker("w2") as two:
        await one.compute(1, prompt(1))
        await two.compute(1, prompt(1))
        await until_index_is(redis, one, members(prompt(1)))
        await until_index_is(redis, two, members(prompt(1)))
        await redis.client.set(one.index, "nonsense")
        await one.compute(2, prompt(2))
        await until_logged(caplog, "index_copy_damaged")
        await until_index_is(redis, one, members(prompt(1), prompt(2)))
        assert await redis.client.smembers(two.index) == members(prompt(1))
    assert "index_mirror_lost" not in caplog.messages


async def test_a_frozen_redis_holds_no_exchange_up(
    redis: RedisServer, service: ManagerService, caplog: pytest.LogCaptureFixture
) -> None:
    """S47: paused, without a reset."""
    async with service.worker(num_blocks=64) as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        redis.process.freeze()
        for number in range(2, 8):
            await worker.compute(number, prompt(number))
        await until_logged(caplog, "index_mirror_lost")
        redis.process.thaw()
        await until_index_is(redis, worker, members(*map(prompt, range(1, 8))))


async def test_a_full_redis_is_filled_again_when_there_is_room(
    redis: RedisServer, service: ManagerService, caplog: pytest.LogCaptureFixture
) -> None:
    """S47: full memory."""
    async with service.worker() as worker:
        await worker.compute(1, prompt(1))
        await until_index_is(redis, worker, members(prompt(1)))
        await redis.client.config_set("maxmemory", "1")
        await worker.compute(2, prompt(2))
        await until_logged(caplog, "index_mirror_lost")
        await redis.client.config_set("maxmemory", "0")
        await until_index_is(redis, worker, members(prompt(1), prompt(2)))


async def test_more_changes_than_are_kept_are_made_up_from_the_books(redis: RedisServer) -> None:
    await redis.stop()
    async with manager_service(redis.url, max_pending=4) as service, service.worker(num_blocks=64) as worker:
        for number in range(1, 9):
            await worker.compute(number, prompt(number))
        await redis.start()
        await until_index_is(redis, worker, members(*map(prompt, range(1, 9))))
