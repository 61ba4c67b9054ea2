"""S9: a reset while workers attend, over real gRPC and with a real Redis."""

from collections.abc import AsyncGenerator

import pytest

from octavo.errors import InvalidRequest, UnknownWorker
from octavo.hashing import block_hashes
from octavo.ids import NEVER_RESET, CacheEpoch, SequenceId
from octavo.index_schema import WHOLE_MARK, index_member
from octavo.records.insight import CacheReset
from octavo.status import translated
from octavo.v1 import cache_manager_pb2 as v1
from octavo.wire.insight import reset_from_wire
from tests.support.books import pool_spec, tokens_of
from tests.support.manager_service import ManagerService, WorkerStandIn, manager_service, until
from tests.support.redis_server import redis_server

SPEC = pool_spec()
PROMPT = tokens_of(0, 10)
"""Two blocks of four, and a token to compute."""


@pytest.fixture
async def service() -> AsyncGenerator[ManagerService]:
    async with manager_service() as service:
        yield service


async def reset(service: ManagerService, worker: str = "") -> CacheReset:
    with translated():
        reply = await service.stub.ResetPrefixCache(v1.ResetPrefixCacheRequest(worker_id=worker), timeout=10)
    return reset_from_wire(reply)


async def test_it_is_answered_at_once_and_whoever_runs_goes_on(service: ManagerService) -> None:
    """The long request ends right, the same prefix misses, and blocks are free when they are released."""
    async with service.worker() as worker:
        await worker.compute(1, PROMPT)
        done = await reset(service)
        assert (done.workers, done.blocks) == (1, 2)
        assert done.cache_epoch > NEVER_RESET

        grant = await worker.exchange(reserves=[(1, 6)])
        assert grant.cache_epoch == done.cache_epoch
        await worker.exchange(commits={1: [7] * 6})
        assert await worker.compute(2, PROMPT) == 0
        audit = await service.audit("w")
        assert (audit.held_blocks, audit.cached_blocks) == (4 + 3, 0)
        await worker.exchange(finished=[1])
        audit = await service.audit("w")
        assert (audit.held_blocks, audit.cached_blocks, audit.free_blocks) == (3, 0, 13)
        assert await worker.compute(3, PROMPT) == 8


async def test_all_workers_or_one_are_reset_and_newcomers_have_the_latest_number(service: ManagerService) -> None:
    async with service.worker("w1") as one, service.worker("w2") as two:
        for worker in (one, two):
            await worker.compute(1, PROMPT)
        first = await reset(service, "w1")
        assert (first.workers, await one.compute(2, PROMPT), await two.compute(2, PROMPT)) == (1, 0, 8)
        second = await reset(service)
        assert second.workers == 2
        assert second.cache_epoch > first.cache_epoch
        assert (await one.compute(3, PROMPT), await two.compute(3, PROMPT)) == (0, 0)
        newcomer = WorkerStandIn(service.stub, "w3")
        assert (await newcomer.register(SPEC)).cache_epoch == second.cache_epoch
        newcomer.drop()


async def test_a_worker_that_is_not_there_cannot_be_reset_and_nothing_happens(service: ManagerService) -> None:
    async with service.worker() as worker:
        await worker.compute(1, PROMPT)
        with pytest.raises(UnknownWorker, match="worker x is not in the fleet of 1"):
            await reset(service, "x")
        assert await worker.compute(2, PROMPT) == 8


async def test_gateways_are_told_at_once(service: ManagerService) -> None:
    async with service.worker(), service.fleet() as fleet:
        done = await reset(service)
        update = await fleet.next()
        assert [info.cache_epoch for info in update.workers] == [done.cache_epoch]


@pytest.mark.redis
async def test_redis_forgets_too_and_holds_what_is_computed_after_it() -> None:
    async with redis_server() as redis, manager_service(redis.url) as service, service.worker() as worker:

        async def until_redis_holds(tokens: list[int], cache_epoch: CacheEpoch) -> None:
            root = SPEC.chain_root(cache_epoch=cache_epoch).hash()
            wanted = {WHOLE_MARK, *map(index_member, block_hashes(root, tokens, SPEC.block_size))}

            async def holds() -> bool:
                return await redis.client.smembers(worker.index) == wanted

            await until(holds)

        await worker.compute(1, PROMPT)
        await until_redis_holds(PROMPT, NEVER_RESET)
        done = await reset(service)
        await until_redis_holds([], done.cache_epoch)
        await worker.exchange(reserves=[(1, 6)])
        await worker.exchange(commits={1: [7] * 6})
        await worker.compute(2, PROMPT)
        await until_redis_holds(PROMPT, done.cache_epoch)


# ---- workers that come again ---------------------------------------------------------------------------------


async def test_another_manager_goes_on_with_the_number_and_what_was_forgotten_stays_so(
    service: ManagerService,
) -> None:
    worker = WorkerStandIn(service.stub)
    await worker.register(SPEC)
    await worker.compute(1, PROMPT)
    done = await reset(service)
    await worker.compute(2, [*PROMPT, 1])
    async with manager_service() as other:
        again = WorkerStandIn(other.stub)
        again.mirror = worker.mirror
        registered = await again.register(SPEC, worker.mirror.inventory(), cache_epoch=done.cache_epoch)
        assert registered.cache_epoch == done.cache_epoch
        await again.exchange(reserves=[(1, 6)])
        await again.exchange(commits={1: [7] * 6})
        audit = await other.audit("w")
        assert (audit.held_blocks, audit.violation) == (4 + 3, "")
        assert await again.compute(3, PROMPT) == 8
        tables = again.mirror.sequences
        assert tables[SequenceId(3)].table[:2] == tables[SequenceId(2)].table[:2]
        await again.exchange(finished=[1, 2, 3])
        audit = await other.audit("w")
        assert (audit.cached_blocks, audit.free_blocks) == (2, 14)
        again.drop()
    worker.drop()


@pytest.mark.parametrize("whom", ["", "w"])
async def test_a_worker_that_was_away_is_reset_when_it_comes_back(service: ManagerService, whom: str) -> None:
    """It comes with what it had, and has not heard of the reset."""
    worker = WorkerStandIn(service.stub)
    await worker.register(SPEC)
    await worker.compute(1, PROMPT)
    done = await reset(service, whom)
    again = WorkerStandIn(service.stub)
    again.mirror = worker.mirror
    registered = await again.register(
        SPEC, worker.mirror.inventory(), first_epoch=worker.epoch, last_epoch=worker.epoch
    )
    assert registered.cache_epoch == done.cache_epoch
    assert await again.compute(2, PROMPT) == 0
    assert again.mirror.sequences.keys() == {1, 2}
    assert len(again.mirror.records) == 2
    again.drop()
    worker.drop()


async def test_a_number_that_leaves_no_room_for_a_reset_is_refused(service: ManagerService) -> None:
    worker = WorkerStandIn(service.stub)
    with pytest.raises(InvalidRequest, match=r"register\.cache_epoch: 18446744073709551615, at most"):
        await worker.register(SPEC, cache_epoch=CacheEpoch(2**64 - 1))
