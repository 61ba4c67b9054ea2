"""Records and their protobuf form: what is sent is what arrives, and what has no shape is refused by name."""

import struct
from array import array
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

import octavo.wire
from octavo.block_record import split_records
from octavo.errors import InvalidRequest, OctavoError
from octavo.hashing import HASH_BYTES, NO_SEAM, Seam
from octavo.ids import BlockId
from octavo.records.attend import (
    Attach,
    BlockCopy,
    Commit,
    Exchange,
    Fork,
    Grant,
    HeldSequence,
    Inventory,
    Registered,
    Registration,
    Reservation,
    TableChange,
    Truncation,
)
from octavo.records.fleet import FleetUpdate, PoolSpec, WorkerInfo, WorkerLoad
from octavo.records.insight import CacheReset, HitEnd, PoolAudit, PromptExplanation, SequenceDescription, TableBlock
from octavo.records.sampling import BeamSearch, SamplingParams
from octavo.records.scope import Media, Scope
from octavo.records.serve import (
    FinishReason,
    Prefilled,
    PromptLogprobs,
    Refusal,
    SampleFinished,
    StepReport,
    Submission,
    TokenLogprobs,
    Tokens,
)
from octavo.status import STATUS_OF
from octavo.v1 import cache_manager_pb2 as manager_v1
from octavo.v1 import types_pb2 as types_v1
from octavo.v1 import worker_pb2 as worker_v1
from octavo.wire import attend, flat, fleet, insight, serve

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
names = st.text(min_size=1, max_size=12)
digests = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
tenants = st.just(b"") | st.binary(min_size=8, max_size=8)
float32 = st.floats(0, 1e9, width=32)
some_u32 = st.lists(u32, max_size=4).map(tuple)
some_tokens = some_u32.map(lambda tokens: array("I", tokens))


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


def record(cls: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **fields)


scopes = record(
    Scope,
    salt=st.just(b"") | digests,
    public_tokens=u32,
    media=several(st.builds(Media, u32, digests)),
)
pools = record(
    PoolSpec,
    model=names,
    model_digest=digests,
    tokenizer_digest=digests,
    dtype=names,
    kv_dtype=names,
    block_size=st.integers(1, 2**32 - 1),
    num_blocks=st.integers(1, 2**32 - 1),
    max_model_tokens=st.integers(1, 2**32 - 1),
    vocab_size=st.integers(1, 2**32 - 1),
    adapter_digest=st.just(b"") | digests,
)
loads = record(
    WorkerLoad,
    running_sequences=u32,
    waiting_sequences=u32,
    queued_prefill_tokens=u32,
    held_blocks=u32,
    cached_blocks=u32,
    prompt_tokens=u64,
    cached_tokens=u64,
    output_tokens=u64,
    preemptions=u64,
)
workers = record(
    WorkerInfo,
    worker_id=names,
    epoch=u64,
    address=names,
    pool=pools,
    load=loads,
    draining=st.booleans(),
    incarnation=u64,
    cache_epoch=u64,
)
exchanges = record(
    Exchange,
    epoch=u64,
    step=u64,
    truncations=several(st.builds(Truncation, u32, u32)),
    commits=several(st.builds(Commit, u32, some_tokens)),
    forks=several(st.builds(Fork, u32, some_u32, u32)),
    finished=some_u32,
    attaches=several(st.builds(Attach, u32, some_tokens, scopes, tenants, u32)),
    reserves=several(st.builds(Reservation, u32, u32)),
    load=loads,
    draining=st.booleans(),
)
grants = record(
    Grant,
    epoch=u64,
    step=u64,
    attached=several(st.tuples(u32, u32)),
    waiting=several(st.tuples(u32, u32)),
    tables=several(st.builds(TableChange, u32, u32, some_u32)),
    copies=several(st.builds(BlockCopy, u32, u32)),
    unmet=some_u32,
    free_blocks=u32,
    published=st.binary(max_size=64),
    evicted=some_u32,
    roots=several(digests),
    cache_epoch=u64,
)
inventories = record(
    Inventory,
    published=st.binary(max_size=64),
    sequences=several(
        record(
            HeldSequence,
            sequence=u32,
            root=digests,
            tokens=some_tokens,
            table=some_u32,
            room=u32,
            ahead=some_tokens,
            forgotten=st.booleans(),
            tenant=tenants,
            retain_seconds=u32,
            seam=st.just(NO_SEAM) | st.builds(Seam, st.integers(1, 2**32 - 1), digests),
        )
    ),
)


def between(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, width=32)


samplings = record(
    SamplingParams,
    temperature=float32,
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    seed=u64,
    min_p=between(0, 1),
    repetition_penalty=between(0.0625, 16),
    presence_penalty=between(-2, 2),
    frequency_penalty=between(-2, 2),
    logit_bias=several(st.tuples(u32, between(-100, 100))),
)
beams = record(
    BeamSearch,
    width=u32,
    length_penalty=between(-8, 8),
    early_stopping=st.booleans(),
    exhaustive=st.booleans(),
)


@st.composite
def logprobs(draw: st.DrawFn, count: int) -> tuple[TokenLogprobs, ...]:
    """Of so many tokens, each with as many of the likeliest."""
    top = draw(st.integers(0, 3))
    likeliest = st.lists(st.tuples(u32, between(-100, 0)), min_size=top, max_size=top).map(tuple)
    one = st.builds(TokenLogprobs, between(-100, 0), likeliest)
    return tuple(draw(st.lists(one, min_size=count, max_size=count)))


@st.composite
def token_runs(draw: st.DrawFn) -> Tokens:
    """With logprobs or without."""
    tokens = draw(some_u32)
    told = draw(logprobs(len(tokens))) if draw(st.booleans()) else ()
    return Tokens(draw(u32), draw(u32), tokens, told)


reports = record(
    StepReport,
    tokens=st.lists(token_runs(), max_size=3, unique_by=lambda run: (run.request, run.sample)).map(tuple),
    prefilled=several(st.builds(Prefilled, u32, u32)),
    finished=several(
        st.builds(SampleFinished, u32, u32, st.sampled_from(FinishReason), st.none() | st.floats(-1e9, 0))
    ),
    prompt_logprobs=several(st.builds(PromptLogprobs, u32, u32, st.integers(0, 3).flatmap(logprobs))),
)

Case = tuple[st.SearchStrategy[Any], Callable[[Any], Message], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "pool": (pools, fleet.pool_to_wire, fleet.pool_from_wire),
    "load": (loads, fleet.load_to_wire, fleet.load_from_wire),
    "worker": (workers, fleet.worker_to_wire, fleet.worker_from_wire),
    "fleet": (
        record(FleetUpdate, workers=several(workers), gone=several(names), snapshot=st.booleans()),
        fleet.fleet_to_wire,
        fleet.fleet_from_wire,
    ),
    "audit": (
        record(
            PoolAudit,
            epoch=u64,
            num_blocks=u32,
            free_blocks=u32,
            cached_blocks=u32,
            held_blocks=u32,
            sequences=u32,
            violation=st.text(max_size=12),
        ),
        insight.audit_to_wire,
        insight.audit_from_wire,
    ),
    "reset": (
        record(CacheReset, cache_epoch=u64, workers=u32, blocks=u64),
        insight.reset_to_wire,
        insight.reset_from_wire,
    ),
    "description": (
        record(
            SequenceDescription,
            epoch=u64,
            length=u32,
            room=u32,
            blocks=several(st.builds(TableBlock, u32, u32, st.booleans())),
        ),
        insight.description_to_wire,
        insight.description_from_wire,
    ),
    "explanation": (
        record(
            PromptExplanation,
            epoch=u64,
            reused_tokens=u32,
            end=st.sampled_from(HitEnd),
            position=u32,
            block=st.none() | u32,
            leader=st.none() | u32,
        ),
        insight.explanation_to_wire,
        insight.explanation_from_wire,
    ),
    "prompt_to_explain": (
        st.tuples(names, some_tokens, scopes),
        lambda asked: insight.prompt_to_explain_to_wire(*asked),
        insight.prompt_to_explain_from_wire,
    ),
    "registration": (
        record(
            Registration,
            worker_id=names,
            incarnation=u64,
            address=names,
            pool=pools,
            first_epoch=u64,
            last_epoch=u64,
            inventory_parts=st.integers(0, flat.MAX_PARTS),
            cache_epoch=u64,
        ),
        attend.registration_to_wire,
        attend.registration_from_wire,
    ),
    "inventory": (inventories, attend.inventory_to_wire, attend.inventory_from_wire),
    "registered": (
        st.builds(Registered, u64, st.integers(0, 2**32 - 1).map(lambda milliseconds: milliseconds / 1000), u64),
        attend.registered_to_wire,
        attend.registered_from_wire,
    ),
    "exchange": (exchanges, attend.exchange_to_wire, attend.exchange_from_wire),
    "grant": (grants, lambda grant: attend.grant_to_wire(grant).grant, attend.grant_from_wire),
    "sampling": (samplings, serve.sampling_to_wire, serve.sampling_from_wire),
    "beam": (beams, serve.beam_to_wire, serve.beam_from_wire),
    "submission": (
        record(
            Submission,
            request=u32,
            prompt=some_u32,
            max_tokens=u32,
            samples=u32,
            sampling=samplings,
            stop_tokens=st.frozensets(u32, max_size=3),
            scope=scopes,
            tenant=tenants,
            retain_seconds=u32,
            priority=st.integers(-(2**31), 2**31 - 1),
            first_sample=u32,
            carried_tokens=u32,
            min_tokens=u32,
            logprobs=st.none() | u32,
            prompt_logprobs=st.none() | u32,
            beam=st.none() | beams,
        ),
        serve.submission_to_wire,
        serve.submission_from_wire,
    ),
    "report": (reports, serve.report_to_wire, serve.report_from_wire),
}


def test_every_translation_has_its_case() -> None:
    """A new pair of functions in octavo.wire needs a line in CASES."""
    modules = [import_module(f"octavo.wire.{found.name}") for found in iter_modules(octavo.wire.__path__)]
    names = {name for module in modules for name in vars(module) if name.endswith("_to_wire") and name[0] != "_"}
    assert {name.removesuffix("_to_wire") for name in names} == {*CASES, "finish_reason", "index_state", "media"}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_what_is_sent_is_what_arrives(name: str, data: st.DataObject) -> None:
    strategy, to_wire, from_wire = CASES[name]
    sent = data.draw(strategy)
    message = to_wire(sent)
    assert from_wire(type(message).FromString(message.SerializeToString())) == sent


@pytest.mark.parametrize("error", STATUS_OF, ids=lambda cls: cls.__name__)
def test_a_refusal_arrives_as_the_error_that_it_was(error: type[OctavoError]) -> None:
    sent = StepReport(refused=(Refusal(7, error("wanted 3 blocks, 1 available")),))
    (arrived,) = serve.report_from_wire(serve.report_to_wire(sent)).refused
    assert arrived.request == 7
    assert (type(arrived.error), str(arrived.error)) == (error, "wanted 3 blocks, 1 available")


def test_a_refusal_of_an_unknown_kind_is_still_an_error_of_ours() -> None:
    message = worker_v1.ServeReply(refused=[worker_v1.Refused(request=1, reason="FromTheFuture", message="why")])
    (refused,) = serve.report_from_wire(message).refused
    assert (type(refused.error), str(refused.error)) == (OctavoError, "why")


def test_numbers_lie_little_endian() -> None:
    assert flat.pack([1, 2**32 - 1]) == bytes.fromhex("01000000 ffffffff")
    assert list(flat.unpack("field", bytes.fromhex("00010000"))) == [256]


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_that_is_no_u32_is_not_packed(number: int) -> None:
    with pytest.raises(OverflowError):
        flat.pack([number])


# ---- what has no shape ----------------------------------------------------------------------------------------

BYTES = b"12345"
RUN_TOO_LONG = flat.pack([1, 3, 7])
PLACED_RUN_TOO_LONG = flat.pack([1, 0, 3, 7])


def with_logprobs(run: worker_v1.LogprobRun, sample: int = 0) -> worker_v1.ServeReply:
    """A report of two tokens of sample 0, and logprobs."""
    logprobs = worker_v1.SampleLogprobRun(request=1, sample=sample, tokens=run)
    return worker_v1.ServeReply(tokens=flat.pack([1, 0, 2, 7, 8]), logprobs=[logprobs])


def in_inventory(message: manager_v1.HeldSequence) -> Inventory:
    return attend.inventory_from_wire(manager_v1.Inventory(sequences=[message]))


def records_of_four(message: manager_v1.Inventory) -> list[tuple[BlockId, bytes]]:
    """Those of blocks of four tokens."""
    return list(split_records("inventory.published", attend.inventory_from_wire(message).published, 4))


MALFORMED_NUMBERS: list[tuple[Callable[[Any], Any], Message, str]] = [
    (attend.exchange_from_wire, manager_v1.Exchange(truncated=BYTES), "exchange.truncated: 5 bytes"),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(truncated=flat.pack([1])),
        "exchange.truncated: 4 bytes",
    ),
    (attend.exchange_from_wire, manager_v1.Exchange(committed=BYTES), "exchange.committed: 5 bytes"),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(committed=RUN_TOO_LONG),
        "exchange.committed: a run ends at value 5",
    ),
    (attend.exchange_from_wire, manager_v1.Exchange(committed=flat.pack([1])), "exchange.committed: a run ends"),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(committed=flat.pack([1, 2**32 - 1])),
        "exchange.committed: a run ends at value 4294967297, there are 2",
    ),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(forks=[manager_v1.Fork(children=BYTES)]),
        "exchange.forks.children: 5 bytes",
    ),
    (attend.exchange_from_wire, manager_v1.Exchange(finished=BYTES), "exchange.finished: 5 bytes"),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(attaches=[manager_v1.Attach(tokens=BYTES)]),
        "exchange.attaches.tokens: 5 bytes",
    ),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(attaches=[manager_v1.Attach(salt=BYTES)]),
        "exchange.attaches.salt: 5 bytes, wanted 0 or 32",
    ),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(attaches=[manager_v1.Attach(media=[types_v1.Media()])]),
        "exchange.attaches.media.digest: 0 bytes, wanted 32",
    ),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(attaches=[manager_v1.Attach(tenant=BYTES)]),
        "exchange.attaches.tenant: 5 bytes, wanted 0 or 8",
    ),
    (attend.exchange_from_wire, manager_v1.Exchange(reserves=BYTES), "exchange.reserves: 5 bytes"),
    (
        attend.exchange_from_wire,
        manager_v1.Exchange(reserves=flat.pack([1])),
        "exchange.reserves: 4 bytes",
    ),
    (attend.grant_from_wire, manager_v1.Grant(attached=BYTES), "grant.attached: 5 bytes"),
    (
        attend.grant_from_wire,
        manager_v1.Grant(attached=flat.pack([1])),
        "grant.attached: 4 bytes",
    ),
    (attend.grant_from_wire, manager_v1.Grant(tables=BYTES), "grant.tables: 5 bytes"),
    (attend.grant_from_wire, manager_v1.Grant(tables=PLACED_RUN_TOO_LONG), "grant.tables: a run ends at value 6"),
    (attend.grant_from_wire, manager_v1.Grant(tables=flat.pack([1, 0])), "grant.tables: a run ends"),
    (attend.grant_from_wire, manager_v1.Grant(waiting=BYTES), "grant.waiting: 5 bytes"),
    (
        attend.grant_from_wire,
        manager_v1.Grant(waiting=flat.pack([1])),
        "grant.waiting: 4 bytes",
    ),
    (attend.grant_from_wire, manager_v1.Grant(copies=BYTES), "grant.copies: 5 bytes"),
    (attend.grant_from_wire, manager_v1.Grant(copies=flat.pack([1])), "grant.copies: 4 bytes"),
    (attend.grant_from_wire, manager_v1.Grant(unmet=BYTES), "grant.unmet: 5 bytes"),
    (attend.grant_from_wire, manager_v1.Grant(evicted=BYTES), "grant.evicted: 5 bytes"),
    (attend.grant_from_wire, manager_v1.Grant(roots=BYTES), "grant.roots: 5 bytes, wanted a multiple of 32"),
    (
        in_inventory,
        manager_v1.HeldSequence(root=bytes(32), seam_block=2, seam_salt=BYTES),
        "inventory.sequences.seam_salt: 5 bytes with seam_block 2, wanted 32",
    ),
    (in_inventory, manager_v1.HeldSequence(root=BYTES), "inventory.sequences.root: 5 bytes, wanted 32"),
    (in_inventory, manager_v1.HeldSequence(root=bytes(32), tokens=BYTES), "inventory.sequences.tokens: 5 bytes"),
    (in_inventory, manager_v1.HeldSequence(root=bytes(32), table=BYTES), "inventory.sequences.table: 5 bytes"),
    (in_inventory, manager_v1.HeldSequence(root=bytes(32), ahead=BYTES), "inventory.sequences.ahead: 5 bytes"),
    (records_of_four, manager_v1.Inventory(published=BYTES), "inventory.published: 5 bytes, wanted a multiple of 68"),
    (insight.prompt_to_explain_from_wire, manager_v1.ExplainPromptRequest(tokens=BYTES), "explain.tokens: 5 bytes"),
    (
        insight.description_from_wire,
        manager_v1.DescribeSequenceReply(blocks=flat.pack([1, 2])),
        "describe.blocks: 2 values",
    ),
    (insight.explanation_from_wire, manager_v1.PromptExplanation(), "explain.end: 0, wanted one of"),
    (serve.submission_from_wire, worker_v1.Submit(prompt=BYTES), "submit.prompt: 5 bytes"),
    (
        serve.submission_from_wire,
        worker_v1.Submit(sampling=types_v1.SamplingParams(top_p=1), stop_tokens=BYTES),
        "submit.stop_tokens: 5 bytes",
    ),
    (
        serve.submission_from_wire,
        worker_v1.Submit(sampling=types_v1.SamplingParams(top_p=1), salt=BYTES),
        "submit.salt: 5 bytes, wanted 0 or 32",
    ),
    (serve.report_from_wire, worker_v1.ServeReply(tokens=BYTES), "serve.tokens: 5 bytes"),
    (serve.report_from_wire, worker_v1.ServeReply(tokens=PLACED_RUN_TOO_LONG), "serve.tokens: a run ends at value 6"),
    (
        serve.sampling_from_wire,
        types_v1.SamplingParams(top_p=1, logit_bias=BYTES),
        "sampling.logit_bias: 5 bytes, wanted a multiple of 8",
    ),
    (
        serve.report_from_wire,
        with_logprobs(worker_v1.LogprobRun(chosen=BYTES)),
        "serve.logprobs.chosen: 5 bytes, wanted a multiple of 4",
    ),
    (serve.report_from_wire, with_logprobs(worker_v1.LogprobRun(top_ids=BYTES)), "serve.logprobs.top_ids: 5 bytes"),
    (
        serve.report_from_wire,
        with_logprobs(worker_v1.LogprobRun(top_logprobs=BYTES)),
        "serve.logprobs.top_logprobs: 5 bytes",
    ),
    (
        serve.report_from_wire,
        with_logprobs(worker_v1.LogprobRun(chosen=bytes(8), top=2, top_ids=bytes(16), top_logprobs=bytes(12))),
        "serve.logprobs: 4 top_ids and 3 top_logprobs, wanted 4 of each",
    ),
    (
        serve.report_from_wire,
        with_logprobs(worker_v1.LogprobRun(chosen=bytes(12))),
        "serve.logprobs: 3 of them for 2 tokens",
    ),
    (
        serve.report_from_wire,
        with_logprobs(worker_v1.LogprobRun(chosen=bytes(8)), sample=5),
        "serve.logprobs: 1 runs too many for 1 of tokens",
    ),
    (
        serve.report_from_wire,
        worker_v1.ServeReply(finished=[worker_v1.SampleFinished()]),
        "finish reason: 0, wanted one of",
    ),
]


@pytest.mark.parametrize(
    ("read", "message", "problem"), MALFORMED_NUMBERS, ids=[problem for _, _, problem in MALFORMED_NUMBERS]
)
def test_a_field_without_shape_is_refused_by_name(read: Callable[[Any], Any], message: Message, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(message)
    assert str(refusal.value).startswith(problem)


def test_every_flat_field_of_the_schemas_has_a_malformed_case() -> None:
    """A new `bytes` field on the step path needs a line above."""
    covered = {problem.split(":")[0].rpartition(".")[2] for _, _, problem in MALFORMED_NUMBERS}
    schemas = {**manager_v1.DESCRIPTOR.message_types_by_name, **worker_v1.DESCRIPTOR.message_types_by_name}
    flat = {field.name for message in schemas.values() for field in message.fields if field.type == field.TYPE_BYTES}
    assert flat <= covered


MANY = flat.MAX_PARTS + 1
TOO_MANY: dict[str, Message] = {
    "exchange.truncated": manager_v1.Exchange(truncated=bytes(8 * MANY)),
    "exchange.committed": manager_v1.Exchange(committed=bytes(8 * MANY)),
    "exchange.forks": manager_v1.Exchange(forks=[manager_v1.Fork()] * MANY),
    "exchange.forks.children": manager_v1.Exchange(forks=[manager_v1.Fork(children=bytes(2 * MANY))] * 2),
    "exchange.finished": manager_v1.Exchange(finished=bytes(4 * MANY)),
    "exchange.attaches": manager_v1.Exchange(attaches=[manager_v1.Attach()] * MANY),
    "exchange.attaches.media": manager_v1.Exchange(attaches=[manager_v1.Attach(media=[types_v1.Media()] * MANY)]),
    "exchange.reserves": manager_v1.Exchange(reserves=bytes(8 * MANY)),
    "inventory.sequences": manager_v1.Inventory(sequences=[manager_v1.HeldSequence()] * MANY),
    "register.inventory_parts": manager_v1.Register(worker_id="w", address="h:1", inventory_parts=MANY),
}
READS: dict[type[Message], Callable[[Any], object]] = {
    manager_v1.Exchange: attend.exchange_from_wire,
    manager_v1.Inventory: attend.inventory_from_wire,
    manager_v1.Register: attend.registration_from_wire,
}


@pytest.mark.parametrize("field", TOO_MANY)
def test_more_parts_than_anybody_can_mean_are_refused_by_name(field: str) -> None:
    message = TOO_MANY[field]
    with pytest.raises(InvalidRequest, match=rf"^{field}: \d+ of them, wanted at most {flat.MAX_PARTS}$"):
        READS[type(message)](message)


GOOD_POOL: dict[str, Any] = {
    "model": "m",
    "model_digest": bytes(HASH_BYTES),
    "tokenizer_digest": bytes(HASH_BYTES),
    "dtype": "float32",
    "kv_dtype": "float32",
    "block_size": 16,
    "num_blocks": 8,
    "max_model_tokens": 64,
    "vocab_size": 100,
}


@pytest.mark.parametrize("field", GOOD_POOL)
def test_a_pool_needs_every_field(field: str) -> None:
    fleet.pool_from_wire(types_v1.PoolSpec(**GOOD_POOL))
    with pytest.raises(InvalidRequest, match=rf"^pool\.{field}: "):
        fleet.pool_from_wire(types_v1.PoolSpec(**{name: value for name, value in GOOD_POOL.items() if name != field}))


@pytest.mark.parametrize("field", ["model_digest", "tokenizer_digest"])
@pytest.mark.parametrize("size", [HASH_BYTES - 1, HASH_BYTES + 1])
def test_a_digest_has_its_size(field: str, size: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"^pool\.{field}: {size} bytes, wanted 32"):
        fleet.pool_from_wire(types_v1.PoolSpec(**{**GOOD_POOL, field: bytes(size)}))


@pytest.mark.parametrize("field", ["worker_id", "address"])
def test_a_registration_names_its_worker_and_where_it_is(field: str) -> None:
    given = {"worker_id": "w", "address": "127.0.0.1:1", field: ""}
    with pytest.raises(InvalidRequest, match=rf"^register\.{field}: empty"):
        attend.registration_from_wire(manager_v1.Register(pool=types_v1.PoolSpec(**GOOD_POOL), **given))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("logit_bias", struct.pack("<If", 3, 100.5)),
    ],
)
def test_sampling_that_no_distribution_has_is_refused(field: str, value: float | bytes) -> None:
    fields: dict[str, Any] = {"top_p": 1.0, field: value}
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field}(\[3\])?: "):
        serve.sampling_from_wire(types_v1.SamplingParams(**fields))


@given(committed=st.binary(max_size=64), truncated=st.binary(max_size=32), reserves=st.binary(max_size=32), step=u64)
def test_any_bytes_are_either_an_exchange_or_refused(
    committed: bytes, truncated: bytes, reserves: bytes, step: int
) -> None:
    """Nothing but InvalidRequest is ever raised; what passes goes back to the same bytes."""
    message = manager_v1.Exchange(committed=committed, truncated=truncated, reserves=reserves, step=step)
    try:
        exchange = attend.exchange_from_wire(message)
    except InvalidRequest:
        return
    again = attend.exchange_to_wire(exchange)
    assert (again.committed, again.truncated, again.reserves) == (committed, truncated, reserves)
