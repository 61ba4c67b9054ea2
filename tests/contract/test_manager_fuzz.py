"""Whatever is said to a cache manager, in whatever order, over the wire of a real process.

Each message is answered, or refused with a status and words that name a field. A refusal leaves the books as they were,
books balance, a worker beside the one that says it all is not disturbed, and the process lives. What is said is drawn
from the schema, so a new message or method needs no word here.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import UnknownWorker
from octavo.ids import Incarnation, SequenceId, WorkerId
from octavo.records.attend import Registration
from octavo.records.insight import PoolAudit
from octavo.service import open_channel
from octavo.status import REASON_KEY, STATUS_OF, translated
from octavo.v1 import cache_manager_pb2 as v1
from octavo.v1 import cache_manager_pb2_grpc as v1_grpc
from octavo.v1 import types_pb2
from octavo.wire.attend import exchange_to_wire, grant_from_wire, registration_to_wire
from octavo.wire.flat import pack
from octavo.wire.insight import audit_from_wire
from tests.support import books, wild
from tests.support.manager_service import WorkerStandIn, manager_process
from tests.support.wild import mangled

pytestmark = pytest.mark.cluster

SERVICE = v1.DESCRIPTOR.services_by_name["CacheManager"]
ANSWERED_ONCE = [method for method in SERVICE.methods if not method.client_streaming]
EXAMPLES = 4 * settings.default.max_examples
ACTS_AN_EXAMPLE = 9
MESSAGES = 10_000
"""In all: when hypothesis has drawn its examples, what it drew is done again in other orders until so many are said."""

ACTS_AGAIN = 100
"""In a row, of those that are done again."""

PATIENCE_SECONDS = 30
BAD, GOOD = WorkerId("bad"), WorkerId("good")
NOBODY = 9
"""No sequence's id."""

POOL = books.pool_spec(num_blocks=8)
LARGEST_POOL = 1 << 16
"""Blocks of a pool that is drawn at random: larger ones are possible, and take a while to open."""

NAMES = {"attend", "worker"} | {
    field.name
    for schema in (v1.DESCRIPTOR, types_pb2.DESCRIPTOR)
    for message in schema.message_types_by_name.values()
    for field in message.fields
}
"""What a refusal speaks of: a field, or the stream as a whole, or a worker."""

STATUSES = set(STATUS_OF.values()) - {grpc.StatusCode.INTERNAL}

OVERTAKEN = "Internal error from Core"
"""What the caller's own gRPC says when it wrote to a stream that ended at the same moment: the real status is lost."""


# ---- what is said ---------------------------------------------------------------------------------------------

few = st.integers(0, 5)
u32 = few | st.sampled_from([16, LARGEST_POOL, 2**31 - 1, 2**31, 2**32 - 1])
u64 = u32 | st.sampled_from([2**32, 2**62, 2**63, 2**64 - 1])
tokens = st.lists(few | st.sampled_from([999, 1000, 2**32 - 1]), max_size=9)
pairs = st.lists(st.tuples(few, few), max_size=3).map(lambda drawn: pack(value for pair in drawn for value in pair))
runs = st.lists(st.tuples(few, tokens), max_size=3).map(
    lambda drawn: pack(value for sequence, run in drawn for value in (sequence, len(run), *run))
)
flat = tokens.map(pack) | pairs | runs | st.binary(max_size=9) | st.sampled_from([bytes(8), bytes(32), b"x" * 32])
texts = st.sampled_from(["", BAD, POOL.model, POOL.dtype, "127.0.0.1:1", "w" * 129, "\u00e9"])
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: u32,
    FieldDescriptor.TYPE_UINT64: u64,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: texts,
    FieldDescriptor.TYPE_BYTES: flat,
}


def messages(schema: Descriptor) -> st.SearchStrategy[Message]:
    return wild.messages(schema, SCALARS)


living = few
"""A place among the sequences that live."""
possible_exchanges = st.builds(
    dict,
    truncations=st.dictionaries(living, few, max_size=1),
    commits=st.dictionaries(living, st.lists(few, max_size=9), max_size=2),
    forks=st.lists(st.tuples(living, st.tuples(st.lists(few, min_size=1, max_size=2), few)), max_size=1),
    finished=st.lists(st.tuples(living, st.none()), max_size=1),
    attaches=st.dictionaries(few, st.lists(few, min_size=1, max_size=9), max_size=2),
    reserves=st.lists(st.tuples(living, few | st.just(40)), max_size=3),
)
"""The parts of an exchange of the right shape; most of them happen."""

exchanges = messages(v1.Exchange.DESCRIPTOR).map(lambda exchange: v1.AttendRequest(exchange=exchange))
held = st.builds(
    v1.HeldSequence,
    sequence=few,
    root=st.just(bytes(32)),
    tokens=st.lists(few, max_size=9).map(pack),
    table=st.lists(st.integers(0, 8), unique=True, max_size=3).map(pack),
    room=st.integers(0, 12),
    ahead=tokens.map(pack),
)
records = st.lists(
    st.builds(
        lambda block, parent, chunk: pack([block, parent]) + bytes(32) + pack(chunk),
        st.integers(0, 8),
        st.integers(0, 8) | st.just(2**32 - 1),
        st.lists(few, min_size=POOL.block_size, max_size=POOL.block_size),
    ),
    max_size=3,
).map(b"".join)
inventories = st.builds(v1.Inventory, published=records, sequences=st.lists(held, max_size=2))
attends = messages(v1.AttendRequest.DESCRIPTOR)


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


@dataclass(frozen=True)
class Act:
    """A method of the stage, and what it is called with."""

    name: str
    arguments: tuple[Any, ...]


def act(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Act]:
    return st.builds(Act, st.just(name), st.tuples(*arguments))


registers = messages(v1.Register.DESCRIPTOR)
acts = st.one_of(
    *[act("step", possible_exchanges)] * 4,
    act("say_in_turn", exchanges),
    act("say_in_turn", attends),
    act("say", (attends | exchanges).map(_bytes)),
    act("say", mangled(attends | exchanges)),
    act("say_again"),
    act("register", st.just(v1.Register()) | registers),
    act("come_again", inventories | messages(v1.Inventory.DESCRIPTOR)),
    act("end"),
    *(
        act("ask", st.just(method.name), st.just(method.server_streaming), whole.map(_bytes) | mangled(whole))
        for method in ANSWERED_ONCE
        for whole in [messages(method.input_type)]
    ),
)


# ---- to whom, and what must come of it ------------------------------------------------------------------------


class Stage:
    """A manager, the worker that says anything, and one that behaves."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._attend = self._channel.stream_stream(f"/{SERVICE.full_name}/Attend")
        self._stub: Any = v1_grpc.CacheManagerStub(self._channel)
        self._own_channel = open_channel(address)
        self._good = WorkerStandIn(v1_grpc.CacheManagerStub(self._own_channel), GOOD)
        self._good_sequence = 0
        self._call: Any = None
        self._epoch = self._step = 0
        self._alive: dict[int, None] = {}
        """Sequences that were in a grant and may still be there."""
        self._parts_owed: int | None = None
        """Of the inventory, before the registration is answered. None before anything is said."""
        self._last = b""
        self._last_reply: bytes | None = None
        self._known: PoolAudit | None = None
        """The bad worker's books after its last message that was taken."""
        self.messages = 0

    async def open(self) -> None:
        await self._good.register(POOL)

    async def close(self) -> None:
        self._good.drop()
        await self._channel.close()
        await self._own_channel.close()

    async def example(self, drawn: list[Act]) -> None:
        """The bad worker says all that, while the good one goes on."""
        await asyncio.gather(self._misbehave(drawn), self._behave())
        for worker in (BAD, GOOD):
            _require_balance(await self._audit(worker))

    async def _misbehave(self, drawn: list[Act]) -> None:
        for each in drawn:
            await getattr(self, each.name)(*each.arguments)
        await self.end()

    async def _behave(self) -> None:
        """A request from its beginning to its end."""
        sequence = SequenceId(self._good_sequence)
        self._good_sequence += 1
        prompt = [(7 * self._good_sequence + position) % POOL.vocab_size for position in range(10)]
        grant = await self._good.exchange(attaches={sequence: prompt}, reserves=[(sequence, len(prompt))])
        ((attached, reused),) = grant.attached
        assert (attached, grant.unmet) == (sequence, ())
        await self._good.exchange(commits={sequence: prompt[reused:]}, reserves=[(sequence, 1)])
        await self._good.exchange(commits={sequence: [1]}, finished=[sequence])

    # ---- acts ----

    async def register(self, instead: v1.Register) -> None:
        """A registration as it should be but for what is set in `instead`, on a new stream."""
        await self.end()
        registration = Registration(worker_id=BAD, incarnation=Incarnation(1), address="127.0.0.1:1", pool=POOL)
        message = registration_to_wire(registration)
        message.MergeFrom(instead)
        await self.say(_bytes(v1.AttendRequest(register=message)))

    async def come_again(self, inventory: v1.Inventory) -> None:
        """A registration with an inventory."""
        await self.register(v1.Register(inventory_parts=1))
        if self._call is not None:
            await self.say(_bytes(v1.AttendRequest(inventory=inventory)))

    async def step(self, parts: dict[str, Any]) -> None:
        """An exchange about those who live."""
        if self._call is None:
            await self.register(v1.Register())
        exchange = books.exchange(
            truncations=dict(self._about_living(parts["truncations"].items())),
            commits=dict(self._about_living(parts["commits"].items())),
            forks=[
                (parent, [*map(self._new, children)], count)
                for parent, (children, count) in self._about_living(parts["forks"])
            ],
            finished=[sequence for sequence, _ in self._about_living(parts["finished"])],
            attaches={self._new(name): prompt for name, prompt in parts["attaches"].items()},
            reserves=[*self._about_living(parts["reserves"])],
        )
        await self.say_in_turn(v1.AttendRequest(exchange=exchange_to_wire(exchange)))

    def _about_living(self, parts: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """The parts about sequences that may live, by their place among them; the last place is nobody's."""
        alive = [*self._alive]
        for at, content in parts:
            if at == 5 or alive:
                yield NOBODY if at == 5 else alive[at % len(alive)], content

    def _new(self, name: int) -> int:
        """The id of a sequence to come, which is taken already for the last of the names."""
        return next(iter(self._alive), NOBODY) if name == 5 else 10 + 10 * self._step + name

    async def say_in_turn(self, message: v1.AttendRequest) -> None:
        """Anything, on a registered stream; an exchange with the right epoch and step."""
        if self._call is None:
            await self.register(v1.Register())
        if message.WhichOneof("kind") == "exchange":
            message.exchange.epoch, message.exchange.step = self._epoch, self._step + 1
        await self.say(_bytes(message))

    async def say_again(self) -> None:
        """What was said last. An exchange that was answered is answered alike."""
        alike = self._last_reply if self._call is not None and self._step else None
        await self.say(self._last)
        assert alike is None or self._last_reply == alike

    async def say(self, raw: bytes) -> None:
        """Any bytes, as the next message of the stream."""
        said = _parsed(raw)
        if said is not None and LARGEST_POOL < said.register.pool.num_blocks <= 2**31:
            return
        before = await self._audit(BAD) if self._known is None else self._known
        if self._call is None:
            self._call = self._attend()
        self.messages += 1
        self._last = raw
        try:
            await self._call.write(raw)
            if not self._is_unanswered(said):
                self._take(await asyncio.wait_for(self._call.read(), PATIENCE_SECONDS))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as refusal:
            await self._refused(refusal, before)

    def _is_unanswered(self, said: Any) -> bool:
        """Whether the manager waits for more before it answers this."""
        kind = None if said is None else said.WhichOneof("kind")
        if self._parts_owed is None:
            self._parts_owed = said.register.inventory_parts if kind == "register" else 0
        elif kind == "inventory":
            self._parts_owed = max(0, self._parts_owed - 1)
        else:
            self._parts_owed = 0
        return self._parts_owed > 0

    def _take(self, reply: bytes) -> None:
        """A message was taken."""
        told = v1.AttendReply.FromString(reply)
        self._last_reply, self._known = reply, None
        if told.WhichOneof("kind") == "registered":
            self._epoch, self._step = told.registered.epoch, 0
        else:
            self._step = told.grant.step
            self._alive |= dict.fromkeys(change.sequence for change in grant_from_wire(told.grant).tables)

    async def _refused(self, refusal: BaseException, before: PoolAudit | None) -> None:
        """A message was refused, which ends the stream."""
        call, was_registered = self._call, self._epoch != 0
        self._forget_stream()
        _require_reason(await call.code(), await call.details(), await call.trailing_metadata())
        if was_registered:
            assert await self._audit(BAD) == before, f"changed by what was refused: {refusal}"
        self._known = before

    async def end(self) -> None:
        """Close the stream, as a worker does that leaves."""
        if self._call is not None:
            call = self._call
            self._forget_stream()
            await call.done_writing()
            if await call.code() is not grpc.StatusCode.OK:
                _require_reason(await call.code(), await call.details(), await call.trailing_metadata())
        self._known = None

    def _forget_stream(self) -> None:
        self._call, self._parts_owed, self._last_reply = None, None, None
        self._epoch = self._step = 0
        self._alive = {}

    async def ask(self, method: str, answered_often: bool, raw: bytes) -> None:
        """Any bytes, as the request of a method that takes one."""
        self.messages += 1
        path = f"/{SERVICE.full_name}/{method}"
        self._known = None  # it may be a reset
        call: Any
        try:
            if answered_often:
                call = self._channel.unary_stream(path)(raw)
                await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
                call.cancel()
            else:
                call = self._channel.unary_unary(path)(raw)
                await asyncio.wait_for(call, PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as refusal:
            _require_reason(refusal.code(), refusal.details(), refusal.trailing_metadata())

    async def _audit(self, worker: WorkerId) -> PoolAudit | None:
        try:
            with translated():
                reply = await self._stub.Audit(v1.AuditRequest(worker_id=worker), timeout=PATIENCE_SECONDS)
        except UnknownWorker:
            return None
        return audit_from_wire(reply)


def _parsed(raw: bytes) -> Any:
    try:
        return v1.AttendRequest.FromString(raw)
    except DecodeError:
        return None


def _require_reason(code: grpc.StatusCode, details: str, metadata: Any) -> None:
    """A refusal is one of ours, and says what it is about."""
    if details == OVERTAKEN:
        return
    assert code in STATUSES, f"{code}: {details}"
    assert REASON_KEY in dict(metadata), details
    assert NAMES & set(re.findall("[a-z_]+", details)) or details.endswith("does not parse"), details


def _require_balance(audit: PoolAudit | None) -> None:
    if audit is not None:
        assert audit.violation == ""
        assert audit.free_blocks + audit.cached_blocks + audit.held_blocks == audit.num_blocks


def test_nothing_that_is_said_breaks_a_manager() -> None:
    done: list[Act] = []
    with asyncio.Runner() as runner:
        process = manager_process(audit=True, lease_seconds=3600)
        runner.run(process.start())
        try:
            runner.run(process.serving())
            stage = runner.run(_opened(process.address))

            @settings(max_examples=EXAMPLES)
            @given(st.lists(acts, min_size=ACTS_AN_EXAMPLE, max_size=ACTS_AN_EXAMPLE))
            def say(drawn: list[Act]) -> None:
                done.extend(drawn)
                runner.run(stage.example(drawn))

            say()
            dice = Random(MESSAGES)
            while stage.messages < MESSAGES:
                runner.run(stage.example(dice.sample(done, ACTS_AGAIN)))
            runner.run(stage.close())
        finally:
            runner.run(process.kill())


async def _opened(address: str) -> Stage:
    stage = Stage(address)
    await stage.open()
    return stage
