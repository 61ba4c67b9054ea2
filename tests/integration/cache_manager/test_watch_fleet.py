"""The fleet as gateways are told of it, over real gRPC on loopback."""

from collections.abc import AsyncGenerator

import pytest

from octavo.errors import Draining
from octavo.records.fleet import FleetUpdate, WorkerLoad
from octavo.v1 import cache_manager_pb2 as v1
from tests.support import books
from tests.support.manager_service import FleetWatch, ManagerService, manager_service


@pytest.fixture
async def service() -> AsyncGenerator[ManagerService]:
    async with manager_service() as service:
        yield service


async def test_a_new_subscriber_is_told_everyone_who_is_there(service: ManagerService) -> None:
    async with service.worker("w1") as one, service.worker("w2", num_blocks=8) as two:
        watch = FleetWatch(service.stub.WatchFleet(v1.WatchFleetRequest()))
        update = await watch.next()
        watch.close()
    assert update.snapshot
    assert {worker.worker_id: worker.epoch for worker in update.workers} == {"w1": one.epoch, "w2": two.epoch}
    assert update.workers[1].pool == books.pool_spec(num_blocks=8)


async def test_an_empty_fleet_is_told_as_such(service: ManagerService) -> None:
    watch = FleetWatch(service.stub.WatchFleet(v1.WatchFleetRequest()))
    assert await watch.next() == FleetUpdate(snapshot=True)
    watch.close()


async def test_a_worker_that_joins_is_told_with_its_address_and_pool(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as worker:
        (joined,) = (await fleet.next()).workers
    assert (joined.worker_id, joined.epoch, joined.address) == ("w", worker.epoch, "127.0.0.1:1")
    assert joined.pool == books.pool_spec()


async def test_loads_arrive_with_the_blocks_that_the_books_count(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as worker:
        await worker.compute(1, list(range(10)))
        await worker.exchange(finished=[1], load=WorkerLoad(held_blocks=9, queued_prefill_tokens=512, output_tokens=3))
        update = await fleet.until(lambda update: any(each.load.output_tokens == 3 for each in update.workers))
    load = update.workers[0].load
    assert (load.held_blocks, load.cached_blocks, load.queued_prefill_tokens) == (0, 2, 512)


async def test_draining_is_told_at_once(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as worker:
        await fleet.next()
        await worker.exchange(draining=True)
        await fleet.until(lambda update: any(each.draining for each in update.workers))


async def test_a_registration_that_supersedes_another_is_told_as_a_new_epoch(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as earlier:
        assert (await fleet.next()).workers[0].epoch == earlier.epoch
        async with service.worker() as later:
            update = await fleet.next()
            assert ([worker.epoch for worker in update.workers], update.gone) == ([later.epoch], ())


async def test_subscribers_are_told_when_the_manager_leaves(service: ManagerService) -> None:
    async with service.fleet() as fleet:
        service.manager.close()
        with pytest.raises(Draining, match="this cache manager leaves"):
            await fleet.next()
