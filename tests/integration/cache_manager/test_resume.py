"""Workers that come again with what they hold, over real gRPC on loopback."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from octavo.errors import InvalidRequest, StaleEpoch, Superseded, UnknownWorker
from octavo.ids import Incarnation, SequenceId
from octavo.records.attend import Inventory
from octavo.records.insight import PoolAudit
from octavo.v1 import cache_manager_pb2 as v1
from octavo.wire.attend import registration_to_wire
from tests.support.books import pool_spec, tokens_of
from tests.support.manager_service import ManagerService, WorkerStandIn, manager_service

SPEC = pool_spec()


@pytest.fixture
async def service() -> AsyncGenerator[ManagerService]:
    async with manager_service() as service:
        yield service


def balance(audit: PoolAudit) -> tuple[int, ...]:
    assert audit.violation == ""
    return audit.free_blocks, audit.cached_blocks, audit.held_blocks, audit.sequences


async def busy_worker(service: ManagerService) -> WorkerStandIn:
    """One that has something of everything."""
    worker = WorkerStandIn(service.stub)
    await worker.register(SPEC)
    await worker.compute(1, tokens_of(0, 10))
    await worker.compute(2, tokens_of(100, 9))
    await worker.exchange(forks=[(1, (3,), 1)], finished=[2])
    return worker


@pytest.mark.parametrize("parts", [1, 4])
async def test_another_manager_goes_on_with_the_books_of_a_lost_one(service: ManagerService, parts: int) -> None:
    worker = await busy_worker(service)
    before = await service.audit("w")
    async with manager_service() as other:
        again = WorkerStandIn(other.stub)
        registered = await again.register(
            SPEC, worker.mirror.inventory(parts), first_epoch=worker.epoch, last_epoch=worker.epoch
        )
        assert registered.epoch > worker.epoch
        assert balance(await other.audit("w")) == balance(before)
        again.mirror = worker.mirror
        await again.exchange(commits={3: [7]}, reserves=[(1, 1)])
        assert await again.compute(9, [*tokens_of(100, 8), 5, 6]) == 8
        again.drop()
    worker.drop()


async def test_the_same_manager_takes_a_worker_up_again_whose_stream_broke(service: ManagerService) -> None:
    """The old lease may still live: it is superseded, and nothing of its books is left beside the new ones."""
    worker = await busy_worker(service)
    before = await service.audit("w")
    again = WorkerStandIn(service.stub)
    await again.register(SPEC, worker.mirror.inventory(2), first_epoch=worker.epoch, last_epoch=worker.epoch)
    with pytest.raises(StaleEpoch, match="superseded"):
        await worker.hear()
    assert balance(await service.audit("w")) == balance(before)
    again.drop()


async def test_what_an_adapter_has_computed_is_attached_to_nothing_of_the_next_one(service: ManagerService) -> None:
    """S8: even where a worker with another adapter under the same name tells of the old one's blocks as its own."""
    prompt = tokens_of(0, 10)
    async with service.worker(adapter_digest=b"1" * 32) as old:
        assert [await old.compute(1, prompt), await old.compute(2, prompt)] == [0, 8]
        told = old.mirror.inventory()
        async with service.worker(adapter_digest=b"2" * 32, inventory=told, last=old) as new:
            new.mirror = old.mirror
            assert [await new.compute(3, prompt), await new.compute(4, prompt)] == [0, 8]


async def test_an_inventory_that_contradicts_itself_is_refused_and_leaves_nothing(service: ManagerService) -> None:
    worker = WorkerStandIn(service.stub)
    with pytest.raises(InvalidRequest, match=r"inventory.published: 3 bytes, wanted a multiple of 68"):
        await worker.register(SPEC, [Inventory(b"123")])
    with pytest.raises(UnknownWorker):
        await service.audit("w")
    again = WorkerStandIn(service.stub)
    await again.register(SPEC)
    assert balance(await service.audit("w")) == (SPEC.num_blocks, 0, 0, 0)
    again.drop()


async def test_a_worker_that_dies_in_its_inventory_leaves_nothing(service: ManagerService) -> None:
    async with service.fleet() as watch:
        dying = WorkerStandIn(service.stub, "dying")
        await dying.write(v1.AttendRequest(register=registration_to_wire(dying.registration(SPEC, inventory_parts=2))))
        await dying.write(v1.AttendRequest(inventory=v1.Inventory()))
        dying.drop()
        async with service.worker():
            assert [info.worker_id for info in (await watch.next()).workers] == ["w"]
    with pytest.raises(UnknownWorker):
        await service.audit("dying")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (v1.AttendRequest(exchange=v1.Exchange(epoch=1)), "exchange"),
        (v1.AttendRequest(register=v1.Register()), "register"),
        (v1.AttendRequest(), "an empty message"),
    ],
)
async def test_nothing_else_may_come_before_the_whole_inventory(
    service: ManagerService, message: v1.AttendRequest, said: str
) -> None:
    worker = WorkerStandIn(service.stub)
    await worker.write(v1.AttendRequest(register=registration_to_wire(worker.registration(SPEC, inventory_parts=2))))
    await worker.write(v1.AttendRequest(inventory=v1.Inventory()))
    with pytest.raises(InvalidRequest, match=f"attend: {said}, wanted part 2 of 2 of the inventory"):
        await worker.say(message)


async def test_an_inventory_nobody_announced_is_refused(service: ManagerService) -> None:
    async with service.worker() as worker:
        with pytest.raises(InvalidRequest, match="attend: inventory after the registration, wanted an exchange"):
            await worker.say(v1.AttendRequest(inventory=v1.Inventory()))


async def test_a_process_whose_place_was_taken_does_not_take_it_back(service: ManagerService) -> None:
    """S44: the old incarnation is told to leave, however often it comes; the new one's books are untouched."""
    old = await busy_worker(service)
    new = WorkerStandIn(service.stub)
    await new.register(SPEC, incarnation=Incarnation(8))
    await new.compute(1, tokens_of(0, 9))
    before = await service.audit("w")
    with pytest.raises(StaleEpoch, match="superseded"):
        await old.hear()
    for inventory in ([], old.mirror.inventory()):
        again = WorkerStandIn(service.stub)
        with pytest.raises(Superseded, match=f"epoch {new.epoch}"):
            await again.register(SPEC, inventory, first_epoch=old.epoch, last_epoch=old.epoch)
    assert await service.audit("w") == before
    assert (await new.exchange(finished=[SequenceId(1)])).free_blocks == SPEC.num_blocks
    new.drop()


@pytest.mark.parametrize(
    ("field", "value", "printed"),
    [
        ("model_digest", b"n" * 32, "6e" * 32),
        ("tokenizer_digest", b"u" * 32, "75" * 32),
        ("adapter_digest", b"a" * 32, "61" * 32),
        ("dtype", "bfloat16", "bfloat16"),
        ("kv_dtype", "float8_e4m3fn", "float8_e4m3fn"),
        ("block_size", 8, "8"),
    ],
)
async def test_a_model_is_one_thing_whoever_serves_it(
    service: ManagerService, field: str, value: Any, printed: str
) -> None:
    """S12: a second node with another revision or number format under the same name is refused with the reason."""
    async with service.worker("first") as first:
        second = WorkerStandIn(service.stub, "second")
        with pytest.raises(InvalidRequest) as refusal:
            await second.register(pool_spec(**{field: value}))
        mine = getattr(SPEC, field)
        served = (mine.hex() or "none") if isinstance(mine, bytes) else mine
        assert str(refusal.value) == f"pool.{field}: {printed}, worker first serves tiny with {served}"
        async with service.worker("second", model="another name", **{field: value}), service.worker("third"):
            await first.exchange()


async def test_a_worker_may_come_back_with_another_model(service: ManagerService) -> None:
    """Nobody else serves it under that name."""
    async with service.worker(), service.worker(dtype="bfloat16") as again:
        await again.exchange()
