"""A worker's stream, over real gRPC on loopback."""

from collections.abc import AsyncGenerator, Callable

import grpc
import pytest

from cache_manager.core.ledger import Ledger
from octavo.errors import InvalidRequest, StaleEpoch, UnknownSequence, UnknownWorker
from octavo.records.attend import TableChange
from octavo.records.insight import PoolAudit
from octavo.status import translated
from octavo.v1 import cache_manager_pb2 as v1
from octavo.wire.attend import exchange_to_wire
from octavo.wire.flat import pack
from tests.support import books
from tests.support.manager_service import LEASE_SECONDS, ManagerService, WorkerStandIn, manager_service

TOKENS = list(range(10))


@pytest.fixture
async def service() -> AsyncGenerator[ManagerService]:
    async with manager_service() as service:
        yield service


async def test_a_registration_is_answered_with_an_epoch_and_the_lease(service: ManagerService) -> None:
    worker = WorkerStandIn(service.stub)
    registered = await worker.register(books.pool_spec())
    assert registered.epoch == int(service.clock() * 1000)
    assert registered.lease_seconds == LEASE_SECONDS
    worker.drop()


async def test_a_grant_tells_the_blocks_of_a_new_sequence(service: ManagerService) -> None:
    async with service.worker() as worker:
        grant = await worker.exchange(attaches={1: TOKENS}, reserves=[(1, 10)])
    assert grant.attached == ((1, 0),)
    assert grant.tables == (TableChange(1, 0, (0, 1, 2)),)
    assert grant.free_blocks == 13


async def test_a_repeated_prompt_is_attached_to_its_full_blocks(service: ManagerService) -> None:
    """S1, as the books see it: 0 tokens reused cold, the full blocks before the last token warm."""
    async with service.worker() as worker:
        assert await worker.compute(1, TOKENS) == 0
        assert await worker.compute(2, TOKENS) == 8


async def test_a_repeated_exchange_is_answered_alike_and_changes_nothing(service: ManagerService) -> None:
    async with service.worker() as worker:
        exchange = books.exchange(step=1, attaches={1: TOKENS}, reserves=[(1, 10)])
        first = await worker.send(exchange)
        before = await service.audit("w")
        assert await worker.send(exchange) == first
        assert await service.audit("w") == before


@pytest.mark.parametrize(("last", "step"), [(0, 0), (0, 2), (0, 2**64 - 1), (1, 0), (1, 3), (2, 1)])
async def test_a_step_that_is_neither_the_last_nor_the_next_is_refused_with_both_numbers(
    service: ManagerService, last: int, step: int
) -> None:
    async with service.worker() as worker:
        for _ in range(last):
            await worker.exchange()
        with pytest.raises(InvalidRequest, match=f"exchange.step: {step}, the last one was {last}"):
            await worker.send(books.exchange(step=step))


async def test_freeing_an_unknown_sequence_is_refused_and_changes_nothing(service: ManagerService) -> None:
    """The whole exchange is refused: its valid parts do not happen either."""
    async with service.worker() as worker:
        await worker.compute(1, TOKENS)
        before = await service.audit("w")
        with pytest.raises(UnknownSequence, match="sequence 99") as refusal:
            await worker.exchange(finished=[1, 99])
        status = refusal.value.__cause__
        assert isinstance(status, grpc.aio.AioRpcError)
        assert status.code() is grpc.StatusCode.NOT_FOUND
        assert ("octavo-reason", "UnknownSequence") in tuple(status.trailing_metadata())
        assert await service.audit("w") == before


MALFORMED: list[tuple[str, dict[str, bytes], str]] = [
    ("exchange.truncated", {"truncated": b"123"}, "3 bytes, wanted a multiple of 8"),
    ("exchange.truncated", {"truncated": pack([1])}, "4 bytes, wanted a multiple of 8"),
    ("exchange.committed", {"committed": b"12345"}, "5 bytes, wanted a multiple of 4"),
    ("exchange.committed", {"committed": pack([1])}, "a run ends at value 2, there are 1"),
    ("exchange.committed", {"committed": pack([1, 3, 7, 7])}, "a run ends at value 5, there are 4"),
    ("exchange.finished", {"finished": b"1"}, "1 bytes, wanted a multiple of 4"),
    ("exchange.reserves", {"reserves": b"1234567"}, "7 bytes, wanted a multiple of 8"),
    ("exchange.reserves", {"reserves": pack([1, 2, 3])}, "12 bytes, wanted a multiple of 8"),
]


@pytest.mark.parametrize(("field", "parts", "problem"), MALFORMED)
async def test_a_malformed_flat_field_is_refused_by_name_and_changes_nothing(
    service: ManagerService, field: str, parts: dict[str, bytes], problem: str
) -> None:
    async with service.worker() as worker:
        await worker.compute(1, TOKENS)
        before = await service.audit("w")
        message = v1.Exchange(epoch=worker.epoch, step=3, **parts)
        with pytest.raises(InvalidRequest, match=f"^{field}: {problem}$"):
            await worker.say(v1.AttendRequest(exchange=message))
        assert await service.audit("w") == before


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (v1.Exchange(attaches=[v1.Attach(sequence=2, tokens=b"12")]), "exchange.attaches.tokens: 2 bytes"),
        (v1.Exchange(attaches=[v1.Attach(sequence=2, tokens=pack([1]), salt=b"s")]), "exchange.attaches.salt: 1 bytes"),
        (v1.Exchange(forks=[v1.Fork(parent=1, children=b"123")]), "exchange.forks.children: 3 bytes"),
        (v1.Exchange(attaches=[v1.Attach(sequence=2)]), "sequence 2"),
        (v1.Exchange(attaches=[v1.Attach(sequence=1, tokens=pack([1]))]), "sequence 1"),
        (v1.Exchange(attaches=[v1.Attach(sequence=2, tokens=pack([1000]))]), "1000"),
        (v1.Exchange(truncated=pack([1, 11])), "11"),
        (v1.Exchange(committed=pack([1, 3, 5, 6, 7])), "end at 13, writable up to 12"),
    ],
)
async def test_an_impossible_part_is_refused_and_changes_nothing(
    service: ManagerService, message: v1.Exchange, problem: str
) -> None:
    async with service.worker() as worker:
        await worker.compute(1, TOKENS)
        before = await service.audit("w")
        message.epoch, message.step = worker.epoch, 3
        with pytest.raises(InvalidRequest, match=problem):
            await worker.say(v1.AttendRequest(exchange=message))
        assert await service.audit("w") == before


async def test_after_a_refusal_a_worker_may_register_anew(service: ManagerService) -> None:
    async with service.worker() as worker:
        with pytest.raises(UnknownSequence):
            await worker.exchange(finished=[99])
        async with service.worker() as again:
            assert again.epoch > worker.epoch
            assert (await service.audit("w")).epoch == again.epoch


@pytest.mark.parametrize("offset", [-1, 1, 2**63])
async def test_an_exchange_of_another_epoch_is_stale(service: ManagerService, offset: int) -> None:
    async with service.worker() as worker:
        message = exchange_to_wire(books.exchange(attaches={1: TOKENS}))
        message.epoch = worker.epoch + offset
        with pytest.raises(StaleEpoch, match=str(message.epoch)):
            await worker.say(v1.AttendRequest(exchange=message))
        assert (await service.audit("w")).sequences == 0


async def test_an_exchange_before_the_registration_is_stale(service: ManagerService) -> None:
    with pytest.raises(StaleEpoch, match="nobody has registered on this stream"):
        await WorkerStandIn(service.stub).exchange()


async def test_a_second_registration_on_one_stream_is_refused(service: ManagerService) -> None:
    async with service.worker() as worker:
        epoch = worker.epoch
        with pytest.raises(InvalidRequest, match="register after the registration"):
            await worker.register(books.pool_spec())
        assert (await service.audit("w")).epoch == epoch


async def test_an_empty_message_is_refused_first_and_later(service: ManagerService) -> None:
    with pytest.raises(InvalidRequest, match="wanted a registration"):
        await WorkerStandIn(service.stub).say(v1.AttendRequest())
    async with service.worker() as worker:
        with pytest.raises(InvalidRequest, match="wanted an exchange"):
            await worker.say(v1.AttendRequest())


def _registration(change: Callable[[v1.Register], None]) -> v1.AttendRequest:
    spec = books.pool_spec()
    register = v1.Register(worker_id="w", incarnation=1, address="127.0.0.1:1")
    register.pool.model, register.pool.dtype, register.pool.kv_dtype = spec.model, spec.dtype, spec.kv_dtype
    register.pool.model_digest, register.pool.tokenizer_digest = spec.model_digest, spec.tokenizer_digest
    register.pool.block_size, register.pool.num_blocks = spec.block_size, spec.num_blocks
    register.pool.max_model_tokens, register.pool.vocab_size = spec.max_model_tokens, spec.vocab_size
    change(register)
    return v1.AttendRequest(register=register)


def _set(**fields: object) -> Callable[[v1.Register], None]:
    def change(register: v1.Register) -> None:
        for name, value in fields.items():
            setattr(register.pool if hasattr(register.pool, name) else register, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set(worker_id=""), "register.worker_id: empty"),
        (_set(worker_id="w" * 129), "register.worker_id: 129 characters, wanted at most 128"),
        (_set(address=""), "register.address: empty"),
        (_set(address="nowhere"), "register.address: wanted host:port"),
        (_set(model=""), "pool.model: empty"),
        (_set(model_digest=b"short"), "pool.model_digest: 5 bytes, wanted 32"),
        (_set(block_size=0), "pool.block_size: 0, wanted at least 1"),
        (_set(num_blocks=0), "pool.num_blocks: 0, wanted at least 1"),
        (_set(num_blocks=2**32 - 1), "num_blocks: 4294967295"),
        (_set(block_size=2**32 - 1), "block_size: 4294967295"),
    ],
)
async def test_an_impossible_worker_is_refused_and_the_present_one_stays(
    service: ManagerService, change: Callable[[v1.Register], None], problem: str
) -> None:
    async with service.worker() as present:
        with pytest.raises(InvalidRequest, match=problem):
            await WorkerStandIn(service.stub).say(_registration(change))
        await present.exchange()


async def test_a_later_registration_ends_the_earlier_stream_at_once(service: ManagerService) -> None:
    async with service.worker() as earlier, service.worker() as later:
        with pytest.raises(StaleEpoch, match=f"superseded by epoch {later.epoch}"):
            await earlier.hear()
        await later.exchange()


async def test_the_end_of_a_superseded_stream_leaves_the_later_one_alone(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as earlier, service.worker() as later:
        await fleet.until(lambda update: any(worker.epoch == later.epoch for worker in update.workers))
        earlier.drop()
        await later.compute(1, TOKENS)
        assert (await service.audit("w")).epoch == later.epoch


async def test_a_dropped_stream_expires_the_worker_at_once(service: ManagerService) -> None:
    async with service.fleet() as fleet:
        async with service.worker():
            await fleet.until(lambda update: bool(update.workers))
        assert (await fleet.until(lambda update: bool(update.gone))).gone == ("w",)
    with pytest.raises(UnknownWorker):
        await service.audit("w")


async def test_a_stream_that_is_closed_in_order_expires_the_worker_too(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as worker:
        await worker.exchange()
        await worker.close()
        assert (await fleet.until(lambda update: bool(update.gone))).gone == ("w",)


async def test_a_worker_that_is_not_heard_for_a_lease_expires(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as worker:
        service.clock.advance(LEASE_SECONDS - 0.001)
        service.manager.expire(service.clock())
        await worker.exchange()
        service.clock.advance(LEASE_SECONDS)
        service.manager.expire(service.clock())
        assert (await fleet.until(lambda update: bool(update.gone))).gone == ("w",)
        with pytest.raises(StaleEpoch, match="not heard for 5 s"):
            await worker.hear()


async def test_a_long_audit_costs_no_worker_its_lease(service: ManagerService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The books of a large pool take seconds, in which nobody is heard."""
    audit = Ledger.audit

    def long_audit(ledger: Ledger) -> PoolAudit:
        service.clock.advance(2 * LEASE_SECONDS)
        return audit(ledger)

    async with service.worker("w1") as audited, service.worker("w2") as other:
        monkeypatch.setattr(Ledger, "audit", long_audit)
        await service.audit("w1")
        service.manager.expire(service.clock())
        for worker in (audited, other):
            await worker.exchange()


async def test_the_late_exchange_of_a_frozen_worker_is_stale_even_before_anyone_looks(service: ManagerService) -> None:
    async with service.worker() as worker:
        service.clock.advance(LEASE_SECONDS)
        with pytest.raises(StaleEpoch):
            await worker.exchange(attaches={1: TOKENS})
        assert (await service.audit("w")).sequences == 0


async def test_the_books_of_a_refused_worker_live_until_its_lease_runs_out(service: ManagerService) -> None:
    async with service.fleet() as fleet, service.worker() as worker:
        await worker.compute(1, TOKENS)
        with pytest.raises(UnknownSequence):
            await worker.exchange(finished=[99])
        assert (await service.audit("w")).sequences == 1
        service.clock.advance(LEASE_SECONDS)
        service.manager.expire(service.clock())
        await fleet.until(lambda update: update.gone == ("w",))


@pytest.mark.parametrize("worker_id", ["", "stranger"])
async def test_the_audit_of_a_stranger_is_refused(service: ManagerService, worker_id: str) -> None:
    with pytest.raises(UnknownWorker, match="is not in the fleet"):
        await service.audit(worker_id)


async def test_a_worker_id_that_is_not_utf8_is_refused_by_the_field_s_name(service: ManagerService) -> None:
    register = v1.Register(worker_id="wxyz").SerializeToString().replace(b"wxyz", b"wx\xff\xfe")
    attend = service.channel.stream_stream("/octavo.v1.CacheManager/Attend")()
    await attend.write(b"\x0a" + bytes([len(register)]) + register)  # field 1 of AttendRequest
    with pytest.raises(InvalidRequest, match=r"^register\.worker_id: not UTF-8 at byte 2 of 4$"), translated():
        await attend.read()
