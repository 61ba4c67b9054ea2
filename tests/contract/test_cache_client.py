"""What an engine may expect of its cache manager, be it in this process or behind gRPC."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from octavo.block_record import record_bytes
from octavo.errors import Draining, InvalidRequest, OctavoError, StaleEpoch, UnknownSequence
from octavo.ids import Epoch, Incarnation, SequenceId, WorkerId
from octavo.records.attend import Exchange, Grant, HeldSequence, Inventory, Registered, Registration, TableChange
from tests.support import books
from tests.support.fakes import LedgerClient
from tests.support.worker_service import attend, manager_process
from worker.cache_client import AttendClient, CacheClient

TOKENS = list(range(10))
REGISTRATION = Registration(
    worker_id=WorkerId("w"), incarnation=Incarnation(7), address="127.0.0.1:1", pool=books.pool_spec()
)


@asynccontextmanager
async def in_process() -> AsyncGenerator[CacheClient]:
    client = LedgerClient()
    yield client
    await client.close()


@asynccontextmanager
async def over_grpc() -> AsyncGenerator[CacheClient]:
    async with manager_process() as manager:
        client = attend(manager)
        yield client
        await client.close()


@pytest.fixture(params=[in_process, over_grpc])
async def client(request) -> AsyncGenerator[CacheClient]:
    async with request.param() as client:
        yield client


class Attending:
    """A registered worker's exchanges, numbered."""

    def __init__(self, client: CacheClient, registered: Registered) -> None:
        self.client = client
        self.registered = registered
        self.step = 0

    @classmethod
    async def begin(cls, client: CacheClient) -> "Attending":
        return cls(client, await client.register(REGISTRATION))

    async def exchange(self, **parts) -> Grant:
        self.step += 1
        return await self.client.exchange(self.of_epoch(books.exchange(step=self.step, **parts)))

    def of_epoch(self, exchange: Exchange) -> Exchange:
        return exchange._replace(epoch=self.registered.epoch)


async def test_a_registration_gives_an_epoch_and_a_lease(client):
    registered = await client.register(REGISTRATION)
    assert registered.epoch > 0
    assert registered.lease_seconds > 0


async def test_an_exchange_is_answered_for_its_own_epoch_and_step(client):
    worker = await Attending.begin(client)
    grant = await worker.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    assert (grant.epoch, grant.step) == (worker.registered.epoch, 1)
    assert grant.attached == ((SequenceId(1), 0),)
    assert grant.tables == (TableChange(SequenceId(1), 0, (0, 1, 2)),)
    assert grant.free_blocks == 13


async def test_what_was_committed_is_found_by_the_next_prompt(client):
    worker = await Attending.begin(client)
    await worker.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    grant = await worker.exchange(commits={1: TOKENS}, finished=[1], attaches={2: TOKENS})
    assert grant.attached == ((SequenceId(2), 8),)


async def test_a_shortage_is_an_answer(client):
    worker = await Attending.begin(client)
    grant = await worker.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    grant = await worker.exchange(commits={1: TOKENS}, reserves=[(1, 1000)])
    assert grant.unmet == (SequenceId(1),)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"finished": [9]}, UnknownSequence),
        ({"commits": {1: TOKENS}}, UnknownSequence),
        ({"attaches": {1: []}}, InvalidRequest),
        ({"attaches": {1: [1000]}}, InvalidRequest),
    ],
)
async def test_what_is_wrong_is_raised_as_the_manager_raised_it(client, parts, error):
    worker = await Attending.begin(client)
    with pytest.raises(error):
        await worker.exchange(**parts)


async def test_an_exchange_of_an_earlier_registration_is_stale(client):
    old = await Attending.begin(client)
    new = await Attending.begin(client)
    assert new.registered.epoch > old.registered.epoch
    with pytest.raises(StaleEpoch):
        await client.exchange(old.of_epoch(books.exchange(step=1)))


async def test_a_new_registration_starts_with_empty_books(client):
    old = await Attending.begin(client)
    await old.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    new = await Attending.begin(client)
    grant = await new.exchange(attaches={1: TOKENS})
    assert (grant.attached, grant.free_blocks) == (((SequenceId(1), 0),), 16)


async def test_a_registration_with_an_inventory_goes_on_with_what_it_tells(client):
    old = await Attending.begin(client)
    await old.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    grant = await old.exchange(commits={1: TOKENS})
    held = HeldSequence(
        sequence=SequenceId(1), root=REGISTRATION.pool.chain_root().hash(), tokens=TOKENS, table=(0, 1, 2), room=12
    )
    told = [Inventory(published=grant.published), Inventory(sequences=(held,))]
    again = Attending(client, await client.register(REGISTRATION, told))
    assert again.registered.epoch > old.registered.epoch
    grant = await again.exchange(finished=[1], attaches={2: TOKENS})
    assert (grant.attached, grant.free_blocks) == (((SequenceId(2), 8),), 14)


async def test_an_inventory_that_contradicts_itself_is_refused(client):
    with pytest.raises(
        InvalidRequest, match=rf"^inventory\.published: 3 bytes, wanted a multiple of {record_bytes(4)}$"
    ):
        await client.register(REGISTRATION, [Inventory(published=b"123")])
    await Attending.begin(client)


@pytest.mark.parametrize("epochs", [(0, 0), (2, 1)])
async def test_a_refusal_is_heard_by_a_worker_that_has_much_more_to_tell(client, epochs):
    """It is refused for the first part of its inventory, or before."""
    registration = replace(REGISTRATION, first_epoch=Epoch(epochs[0]), last_epoch=Epoch(epochs[1]))
    much = Inventory(published=bytes(record_bytes(4) * 10_000))
    with pytest.raises(InvalidRequest):
        await client.register(registration, [Inventory(published=b"123"), *[much] * 20])


async def test_an_exchange_without_a_registration_is_refused(client):
    with pytest.raises((ConnectionError, StaleEpoch)):
        await client.exchange(books.exchange()._replace(epoch=Epoch(1)))


async def test_a_pool_that_cannot_be_is_refused(client):
    with pytest.raises(OctavoError):
        await client.register(replace(REGISTRATION, pool=books.pool_spec(num_blocks=1 << 30)))


# ---- what only a network can do --------------------------------------------------------------------------------


async def test_a_manager_that_is_not_there_is_a_lost_connection():
    client = AttendClient("127.0.0.1:1", deadline_seconds=10)
    with pytest.raises(ConnectionError, match="the cache manager is lost"):
        await client.register(REGISTRATION)
    await client.close()


async def test_a_manager_that_goes_is_a_lost_connection_and_its_successor_is_found():
    async with manager_process() as manager:
        client = attend(manager)
        worker = await Attending.begin(client)
        await manager.kill()
        with pytest.raises(ConnectionError):
            await worker.exchange()
        await manager.start()
        await (await Attending.begin(client)).exchange(attaches={1: TOKENS})
        await client.close()


async def test_a_manager_that_leaves_says_so():
    async with manager_process() as manager:
        client = attend(manager)
        worker = await Attending.begin(client)
        manager.manager.close()
        with pytest.raises(Draining):
            await worker.exchange()
        await client.close()


async def test_an_expired_worker_hears_that_its_epoch_is_over():
    async with manager_process() as manager:
        client = attend(manager)
        worker = await Attending.begin(client)
        manager.expire()
        with pytest.raises(StaleEpoch):
            await worker.exchange()
        again = await Attending.begin(client)
        await again.exchange(attaches={1: TOKENS})
        await client.close()
