"""Records <-> protobuf, both directions, once.

Reading checks shape only: whole numbers of u32, runs that end where they say, fields that must be there. A message
that fails raises `InvalidRequest` with the field's name and both numbers. What the values mean is judged by who owns
the state. Names: `x_to_wire` makes a message, `x_from_wire` makes a record.
"""

import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

from octavo.errors import InvalidRequest, OctavoError
from octavo.hashing import HASH_BYTES, NO_SEAM, TENANT_TAG_BYTES, TOKEN_BYTES, Seam
from octavo.ids import BlockHash, BlockId, CacheEpoch, Epoch, Incarnation, SequenceId, TenantTag, WorkerId
from octavo.records import (
    PLAIN,
    Attach,
    BeamSearch,
    BlockCopy,
    CacheReset,
    Commit,
    Exchange,
    FinishReason,
    FleetUpdate,
    Fork,
    Grant,
    HeldSequence,
    HitEnd,
    IndexState,
    Inventory,
    Media,
    PoolAudit,
    PoolSpec,
    Prefilled,
    PromptExplanation,
    PromptLogprobs,
    Refusal,
    Registered,
    Registration,
    Reservation,
    SampleFinished,
    SamplingParams,
    Scope,
    SequenceDescription,
    StepReport,
    Submission,
    TableBlock,
    TableChange,
    TokenLogprobs,
    Tokens,
    Truncation,
    WorkerInfo,
    WorkerLoad,
)
from octavo.sampling import require_biases, require_knobs
from octavo.status import error_named
from octavo.v1 import cache_manager_pb2 as cache_manager_v1
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import types_pb2 as types_v1
from octavo.v1 import worker_pb2 as worker_v1

# A record straight from its fields. `_make` does the same in Python, for twice the time.
_NEW_TUPLE = cast(Callable[..., Any], tuple.__new__)  # pyright: ignore[reportUnknownMemberType]  # of tuples of anything
_NEW_COMMIT: Callable[[tuple[SequenceId, Sequence[int]]], Commit] = partial(_NEW_TUPLE, Commit)

_Record = TypeVar("_Record")
_FromPair = Callable[[tuple[int, int]], _Record]

_NEW_TRUNCATION: _FromPair[Truncation] = partial(_NEW_TUPLE, Truncation)
_NEW_RESERVATION: _FromPair[Reservation] = partial(_NEW_TUPLE, Reservation)
_NEW_COPY: _FromPair[BlockCopy] = partial(_NEW_TUPLE, BlockCopy)
_NEW_REUSE = cast(_FromPair[tuple[SequenceId, int]], tuple)
_NEW_WAIT = cast(_FromPair[tuple[SequenceId, SequenceId]], tuple)

MAX_PARTS = 1 << 14
"""Of one kind in an exchange, or sequences in a part of an inventory: many times those of the largest batch. To read a
million would hold up every other worker for seconds. Also of parts in an inventory, which then has 16 GB."""

_BIAS = struct.Struct("<If")
"""A token id and what is added to its logit."""
_BIG_ENDIAN = sys.byteorder == "big"
_REASON_TO_WIRE = {
    FinishReason.STOP: worker_v1.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_v1.FINISH_REASON_LENGTH,
}
_REASON_FROM_WIRE = {value: reason for reason, value in _REASON_TO_WIRE.items()}
_STATE_TO_WIRE = {
    IndexState.EXACT: gateway_v1.INDEX_STATE_EXACT,
    IndexState.DEGRADED: gateway_v1.INDEX_STATE_DEGRADED,
    IndexState.FALLBACK: gateway_v1.INDEX_STATE_FALLBACK,
}
_STATE_FROM_WIRE = {value: state for state, value in _STATE_TO_WIRE.items()}
_END_TO_WIRE = {
    HitEnd.LAST_TOKEN: cache_manager_v1.HIT_END_LAST_TOKEN,
    HitEnd.DIFFERS: cache_manager_v1.HIT_END_DIFFERS,
    HitEnd.NOT_PUBLISHED: cache_manager_v1.HIT_END_NOT_PUBLISHED,
    HitEnd.BEING_COMPUTED: cache_manager_v1.HIT_END_BEING_COMPUTED,
}
_END_FROM_WIRE = {value: end for end, value in _END_TO_WIRE.items()}


# ---- flat u32 arrays -----------------------------------------------------------------------------------------


def pack(values: Iterable[int]) -> bytes:
    """The values as little-endian u32. Raises OverflowError outside [0, 2^32)."""
    words = array("I", values)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def unpack(field: str, raw: bytes) -> "array[int]":
    """The u32 values of a flat field."""
    if len(raw) % 4:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of 4")
    words = array("I", raw)
    if _BIG_ENDIAN:
        words.byteswap()
    return words


def _pack_floats(values: Iterable[float]) -> bytes:
    """The values as little-endian f32."""
    words = array("f", values)
    if _BIG_ENDIAN:
        words.byteswap()
    return words.tobytes()


def _unpack_floats(field: str, raw: bytes) -> "array[float]":
    """The f32 values of a flat field."""
    if len(raw) % 4:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of 4")
    words = array("f", raw)
    if _BIG_ENDIAN:
        words.byteswap()
    return words


def _pack_all(records: Collection[Iterable[int]]) -> bytes:
    """The numbers of records that have nothing else."""
    return pack(chain.from_iterable(records)) if records else b""


def _pairs(field: str, raw: bytes, make: _FromPair[_Record], most: int = sys.maxsize) -> tuple[_Record, ...]:
    """A record of every pair of values."""
    if not raw:
        return ()
    words = unpack(field, raw)
    if len(words) % 2:
        raise InvalidRequest(f"{field}: {len(words)} values, wanted pairs")
    _require_few(field, len(words) // 2, most)
    return tuple(map(make, zip(words[::2], words[1::2], strict=True)))


def _runs(field: str, words: "array[int]", head: int) -> Iterator[tuple[int, int, int]]:
    """(at, start, end) of each run: `head` values from `at` on, a count, and that many values, [start, end)."""
    size, at = len(words), 0
    while at < size:
        start = at + head + 1
        end = start + words[start - 1] if start <= size else start
        if end > size:
            raise InvalidRequest(f"{field}: a run ends at value {end}, there are {size}")
        yield at, start, end
        at = end


def _sequences(field: str, raw: bytes, most: int = sys.maxsize) -> tuple[SequenceId, ...]:
    """Each value is one. To call `SequenceId` for each would cost as much as making its record."""
    words = unpack(field, raw)
    _require_few(field, len(words), most)
    return cast(tuple[SequenceId, ...], tuple(words))


def _require_few(field: str, count: int, most: int = MAX_PARTS) -> None:
    if count > most:
        raise InvalidRequest(f"{field}: {count} of them, wanted at most {most}")


def _blocks(field: str, raw: bytes) -> tuple[BlockId, ...]:
    """Each value is one."""
    return cast(tuple[BlockId, ...], tuple(unpack(field, raw)))


# ---- what a worker is ----------------------------------------------------------------------------------------


def pool_to_wire(pool: PoolSpec) -> types_v1.PoolSpec:
    return types_v1.PoolSpec(
        model=pool.model,
        model_digest=pool.model_digest,
        tokenizer_digest=pool.tokenizer_digest,
        dtype=pool.dtype,
        kv_dtype=pool.kv_dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        max_model_tokens=pool.max_model_tokens,
        vocab_size=pool.vocab_size,
        block_bytes=pool.block_bytes,
    )


def pool_from_wire(message: types_v1.PoolSpec) -> PoolSpec:
    """Raises InvalidRequest where a pool of that kind cannot exist."""
    for field in ("model", "dtype", "kv_dtype"):
        if not getattr(message, field):
            raise InvalidRequest(f"pool.{field}: empty")
    for field in ("model_digest", "tokenizer_digest"):
        if len(getattr(message, field)) != HASH_BYTES:
            raise InvalidRequest(f"pool.{field}: {len(getattr(message, field))} bytes, wanted {HASH_BYTES}")
    for field in ("block_size", "num_blocks", "max_model_tokens", "vocab_size"):
        if getattr(message, field) < 1:
            raise InvalidRequest(f"pool.{field}: {getattr(message, field)}, wanted at least 1")
    return PoolSpec(
        model=message.model,
        model_digest=message.model_digest,
        tokenizer_digest=message.tokenizer_digest,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_model_tokens=message.max_model_tokens,
        vocab_size=message.vocab_size,
        block_bytes=message.block_bytes,
    )


def load_to_wire(load: WorkerLoad) -> types_v1.WorkerLoad:
    return types_v1.WorkerLoad(
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        queued_prefill_tokens=load.queued_prefill_tokens,
        held_blocks=load.held_blocks,
        cached_blocks=load.cached_blocks,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
        preemptions=load.preemptions,
    )


def load_from_wire(message: types_v1.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        running_sequences=message.running_sequences,
        waiting_sequences=message.waiting_sequences,
        queued_prefill_tokens=message.queued_prefill_tokens,
        held_blocks=message.held_blocks,
        cached_blocks=message.cached_blocks,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        preemptions=message.preemptions,
    )


def worker_to_wire(worker: WorkerInfo) -> cache_manager_v1.WorkerInfo:
    return cache_manager_v1.WorkerInfo(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        address=worker.address,
        pool=pool_to_wire(worker.pool),
        load=load_to_wire(worker.load),
        draining=worker.draining,
        incarnation=worker.incarnation,
        cache_epoch=worker.cache_epoch,
    )


def worker_from_wire(message: cache_manager_v1.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        epoch=Epoch(message.epoch),
        address=message.address,
        pool=pool_from_wire(message.pool),
        load=load_from_wire(message.load),
        draining=message.draining,
        incarnation=Incarnation(message.incarnation),
        cache_epoch=CacheEpoch(message.cache_epoch),
    )


def fleet_to_wire(update: FleetUpdate) -> cache_manager_v1.FleetUpdate:
    return cache_manager_v1.FleetUpdate(
        workers=[worker_to_wire(worker) for worker in update.workers], gone=update.gone, snapshot=update.snapshot
    )


def fleet_from_wire(message: cache_manager_v1.FleetUpdate) -> FleetUpdate:
    return FleetUpdate(
        workers=tuple(worker_from_wire(worker) for worker in message.workers),
        gone=tuple(WorkerId(worker) for worker in message.gone),
        snapshot=message.snapshot,
    )


def audit_to_wire(audit: PoolAudit) -> cache_manager_v1.AuditReply:
    return cache_manager_v1.AuditReply(
        epoch=audit.epoch,
        num_blocks=audit.num_blocks,
        free_blocks=audit.free_blocks,
        cached_blocks=audit.cached_blocks,
        held_blocks=audit.held_blocks,
        sequences=audit.sequences,
        violation=audit.violation,
    )


def audit_from_wire(message: cache_manager_v1.AuditReply) -> PoolAudit:
    return PoolAudit(
        epoch=Epoch(message.epoch),
        num_blocks=message.num_blocks,
        free_blocks=message.free_blocks,
        cached_blocks=message.cached_blocks,
        held_blocks=message.held_blocks,
        sequences=message.sequences,
        violation=message.violation,
    )


def description_to_wire(description: SequenceDescription) -> cache_manager_v1.DescribeSequenceReply:
    return cache_manager_v1.DescribeSequenceReply(
        epoch=description.epoch,
        length=description.length,
        room=description.room,
        blocks=_pack_all(description.blocks),
    )


def description_from_wire(message: cache_manager_v1.DescribeSequenceReply) -> SequenceDescription:
    words = unpack("describe.blocks", message.blocks)
    if len(words) % 3:
        raise InvalidRequest(f"describe.blocks: {len(words)} values, wanted triples")
    triples = zip(words[::3], words[1::3], words[2::3], strict=True)
    return SequenceDescription(
        epoch=Epoch(message.epoch),
        length=message.length,
        room=message.room,
        blocks=tuple(
            TableBlock(BlockId(block), references, bool(published)) for block, references, published in triples
        ),
    )


def prompt_to_explain_to_wire(
    worker: WorkerId, tokens: Sequence[int], scope: Scope
) -> cache_manager_v1.ExplainPromptRequest:
    return cache_manager_v1.ExplainPromptRequest(
        worker_id=worker,
        tokens=pack(tokens),
        salt=scope.salt,
        adapter_digest=scope.adapter_digest,
        media=_media_messages(scope),
        public_tokens=scope.public_tokens,
    )


def prompt_to_explain_from_wire(message: cache_manager_v1.ExplainPromptRequest) -> tuple[WorkerId, "array[int]", Scope]:
    return WorkerId(message.worker_id), unpack("explain.tokens", message.tokens), _scope_from_wire("explain", message)


def explanation_to_wire(explanation: PromptExplanation) -> cache_manager_v1.PromptExplanation:
    return cache_manager_v1.PromptExplanation(
        epoch=explanation.epoch,
        reused_tokens=explanation.reused_tokens,
        end=_END_TO_WIRE[explanation.end],
        position=explanation.position,
        block=explanation.block,
        leader=explanation.leader,
    )


def explanation_from_wire(message: cache_manager_v1.PromptExplanation) -> PromptExplanation:
    if message.end not in _END_FROM_WIRE:
        raise InvalidRequest(f"explain.end: {message.end}, wanted one of {sorted(_END_FROM_WIRE)}")
    return PromptExplanation(
        epoch=Epoch(message.epoch),
        reused_tokens=message.reused_tokens,
        end=_END_FROM_WIRE[message.end],
        position=message.position,
        block=BlockId(message.block) if message.HasField("block") else None,
        leader=SequenceId(message.leader) if message.HasField("leader") else None,
    )


def reset_to_wire(reset: CacheReset) -> cache_manager_v1.ResetPrefixCacheReply:
    return cache_manager_v1.ResetPrefixCacheReply(
        cache_epoch=reset.cache_epoch, workers=reset.workers, blocks=reset.blocks
    )


def reset_from_wire(message: cache_manager_v1.ResetPrefixCacheReply) -> CacheReset:
    return CacheReset(cache_epoch=CacheEpoch(message.cache_epoch), workers=message.workers, blocks=message.blocks)


# ---- worker <-> cache manager --------------------------------------------------------------------------------


def registration_to_wire(registration: Registration) -> cache_manager_v1.Register:
    return cache_manager_v1.Register(
        worker_id=registration.worker_id,
        incarnation=registration.incarnation,
        address=registration.address,
        pool=pool_to_wire(registration.pool),
        first_epoch=registration.first_epoch,
        last_epoch=registration.last_epoch,
        inventory_parts=registration.inventory_parts,
        cache_epoch=registration.cache_epoch,
    )


def registration_from_wire(message: cache_manager_v1.Register) -> Registration:
    for field in ("worker_id", "address"):
        if not getattr(message, field):
            raise InvalidRequest(f"register.{field}: empty")
    _require_few("register.inventory_parts", message.inventory_parts)
    return Registration(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        address=message.address,
        pool=pool_from_wire(message.pool),
        first_epoch=Epoch(message.first_epoch),
        last_epoch=Epoch(message.last_epoch),
        inventory_parts=message.inventory_parts,
        cache_epoch=CacheEpoch(message.cache_epoch),
    )


def inventory_to_wire(inventory: Inventory) -> cache_manager_v1.Inventory:
    return cache_manager_v1.Inventory(
        published=inventory.published,
        sequences=[
            cache_manager_v1.HeldSequence(
                sequence=held.sequence,
                root=held.root,
                tokens=pack(held.tokens),
                table=pack(held.table),
                room=held.room,
                ahead=pack(held.ahead),
                forgotten=held.forgotten,
                tenant=held.tenant,
                retain_seconds=held.retain_seconds,
                seam_block=max(0, held.seam.block),
                seam_salt=held.seam.salt,
            )
            for held in inventory.sequences
        ],
    )


def inventory_from_wire(message: cache_manager_v1.Inventory) -> Inventory:
    _require_few("inventory.sequences", len(message.sequences))
    return Inventory(message.published, tuple(_held_from_wire(held) for held in message.sequences))


def _held_from_wire(message: cache_manager_v1.HeldSequence) -> HeldSequence:
    return HeldSequence(
        sequence=SequenceId(message.sequence),
        root=root_from_wire("inventory.sequences.root", message.root),
        tokens=unpack("inventory.sequences.tokens", message.tokens),
        table=_blocks("inventory.sequences.table", message.table),
        room=message.room,
        ahead=unpack("inventory.sequences.ahead", message.ahead),
        forgotten=message.forgotten,
        tenant=_tenant_from_wire("inventory.sequences", message),
        retain_seconds=message.retain_seconds,
        seam=_seam_from_wire("inventory.sequences", message.seam_block, message.seam_salt),
    )


def _seam_from_wire(path: str, block: int, salt: bytes) -> Seam:
    if not block and not salt:
        return NO_SEAM
    if not block or len(salt) != HASH_BYTES:
        wanted = HASH_BYTES if block else 0
        raise InvalidRequest(f"{path}.seam_salt: {len(salt)} bytes with seam_block {block}, wanted {wanted}")
    return Seam(block, salt)


def root_from_wire(field: str, root: bytes) -> BlockHash:
    """A root is a whole hash."""
    if len(root) != HASH_BYTES:
        raise InvalidRequest(f"{field}: {len(root)} bytes, wanted {HASH_BYTES}")
    return BlockHash(root)


def registered_to_wire(registered: Registered) -> cache_manager_v1.Registered:
    return cache_manager_v1.Registered(
        epoch=registered.epoch,
        lease_milliseconds=round(registered.lease_seconds * 1000),
        cache_epoch=registered.cache_epoch,
    )


def registered_from_wire(message: cache_manager_v1.Registered) -> Registered:
    return Registered(Epoch(message.epoch), message.lease_milliseconds / 1000, CacheEpoch(message.cache_epoch))


def exchange_to_wire(exchange: Exchange) -> cache_manager_v1.Exchange:
    return cache_manager_v1.Exchange(
        epoch=exchange.epoch,
        step=exchange.step,
        truncated=_pack_all(exchange.truncations),
        committed=pack(
            value for commit in exchange.commits for value in (commit.sequence, len(commit.tokens), *commit.tokens)
        ),
        forks=[
            cache_manager_v1.Fork(parent=fork.parent, children=pack(fork.children), reserve=fork.reserve)
            for fork in exchange.forks
        ],
        finished=pack(exchange.finished),
        attaches=[
            cache_manager_v1.Attach(
                sequence=attach.sequence,
                tokens=pack(attach.tokens),
                salt=attach.scope.salt,
                tenant=attach.tenant,
                retain_seconds=attach.retain_seconds,
                adapter_digest=attach.scope.adapter_digest,
                media=_media_messages(attach.scope),
                public_tokens=attach.scope.public_tokens,
            )
            for attach in exchange.attaches
        ],
        reserves=_pack_all(exchange.reserves),
        load=load_to_wire(exchange.load),
        draining=exchange.draining,
    )


def exchange_from_wire(message: cache_manager_v1.Exchange) -> Exchange:
    """Raises InvalidRequest where there is more than anybody can mean, before it is read."""
    return Exchange(
        epoch=Epoch(message.epoch),
        step=message.step,
        truncations=_pairs("exchange.truncated", message.truncated, _NEW_TRUNCATION, MAX_PARTS),
        commits=_commits_from_wire("exchange.committed", message.committed),
        forks=_forks_from_wire("exchange.forks", message.forks),
        finished=_sequences("exchange.finished", message.finished, MAX_PARTS),
        attaches=_attaches_from_wire("exchange.attaches", message.attaches),
        reserves=_pairs("exchange.reserves", message.reserves, _NEW_RESERVATION, MAX_PARTS),
        load=load_from_wire(message.load),
        draining=message.draining,
    )


def _commits_from_wire(field: str, raw: bytes) -> tuple[Commit, ...]:
    words = unpack(field, raw)
    sequences = cast(Sequence[SequenceId], words)
    runs = islice(_runs(field, words, head=1), MAX_PARTS + 1)
    commits = tuple([_NEW_COMMIT((sequences[at], words[start:end])) for at, start, end in runs])
    _require_few(field, len(commits))
    return commits


def _forks_from_wire(field: str, messages: Collection[cache_manager_v1.Fork]) -> tuple[Fork, ...]:
    if not messages:
        return ()
    _require_few(field, len(messages))
    _require_few(f"{field}.children", sum(len(fork.children) for fork in messages) // TOKEN_BYTES)
    return tuple(
        Fork(SequenceId(fork.parent), _sequences(f"{field}.children", fork.children), fork.reserve) for fork in messages
    )


def _attaches_from_wire(field: str, messages: Collection[cache_manager_v1.Attach]) -> tuple[Attach, ...]:
    if not messages:
        return ()
    _require_few(field, len(messages))
    return tuple(
        Attach(
            SequenceId(attach.sequence),
            unpack(f"{field}.tokens", attach.tokens),
            _scope_from_wire(field, attach),
            _tenant_from_wire(field, attach),
            attach.retain_seconds,
        )
        for attach in messages
    )


def _scope_from_wire(
    path: str, message: cache_manager_v1.Attach | worker_v1.Submit | cache_manager_v1.ExplainPromptRequest
) -> Scope:
    """The fields of a scope, which lie side by side in the messages that have one. `path` is what leads to them."""
    salt, adapter = message.salt, message.adapter_digest
    if not (salt or adapter or message.media or message.public_tokens):
        return PLAIN
    return Scope(
        salt=_absent_or_whole(f"{path}.salt", salt, HASH_BYTES),
        adapter_digest=_absent_or_whole(f"{path}.adapter_digest", adapter, HASH_BYTES),
        media=_media_from_wire(f"{path}.media", message.media),
        public_tokens=message.public_tokens,
    )


def _tenant_from_wire(
    path: str, message: cache_manager_v1.Attach | cache_manager_v1.HeldSequence | worker_v1.Submit
) -> TenantTag:
    return TenantTag(_absent_or_whole(f"{path}.tenant", message.tenant, TENANT_TAG_BYTES))


def _media_messages(scope: Scope) -> list[types_v1.Media]:
    return [types_v1.Media(position=media.position, digest=media.digest) for media in scope.media]


def _media_from_wire(field: str, messages: Collection[types_v1.Media]) -> tuple[Media, ...]:
    _require_few(field, len(messages))
    for message in messages:
        if len(message.digest) != HASH_BYTES:
            raise InvalidRequest(f"{field}.digest: {len(message.digest)} bytes, wanted {HASH_BYTES}")
    return tuple(Media(message.position, message.digest) for message in messages)


def _absent_or_whole(field: str, value: bytes, size: int) -> bytes:
    if len(value) not in (0, size):
        raise InvalidRequest(f"{field}: {len(value)} bytes, wanted 0 or {size}")
    return value


def grant_to_wire(grant: Grant) -> cache_manager_v1.Grant:
    return cache_manager_v1.Grant(
        epoch=grant.epoch,
        step=grant.step,
        attached=_pack_all(grant.attached),
        waiting=_pack_all(grant.waiting),
        tables=pack(
            value
            for change in grant.tables
            for value in (change.sequence, change.start, len(change.blocks), *change.blocks)
        ),
        copies=_pack_all(grant.copies),
        unmet=pack(grant.unmet),
        free_blocks=grant.free_blocks,
        published=grant.published,
        evicted=pack(grant.evicted),
        roots=b"".join(grant.roots),
        cache_epoch=grant.cache_epoch,
    )


def grant_from_wire(message: cache_manager_v1.Grant) -> Grant:
    tables = unpack("grant.tables", message.tables)
    return Grant(
        epoch=Epoch(message.epoch),
        step=message.step,
        attached=_pairs("grant.attached", message.attached, _NEW_REUSE),
        waiting=_pairs("grant.waiting", message.waiting, _NEW_WAIT),
        tables=tuple(
            TableChange(SequenceId(tables[at]), tables[at + 1], tuple(map(BlockId, tables[start:end])))
            for at, start, end in _runs("grant.tables", tables, head=2)
        ),
        copies=_pairs("grant.copies", message.copies, _NEW_COPY),
        unmet=_sequences("grant.unmet", message.unmet),
        free_blocks=message.free_blocks,
        published=message.published,
        evicted=_blocks("grant.evicted", message.evicted),
        roots=_roots_from_wire("grant.roots", message.roots),
        cache_epoch=CacheEpoch(message.cache_epoch),
    )


def _roots_from_wire(field: str, raw: bytes) -> tuple[BlockHash, ...]:
    if len(raw) % HASH_BYTES:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of {HASH_BYTES}")
    return tuple(BlockHash(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES))


# ---- gateway <-> worker --------------------------------------------------------------------------------------


def sampling_to_wire(sampling: SamplingParams) -> types_v1.SamplingParams:
    return types_v1.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=b"".join(_BIAS.pack(token, bias) for token, bias in sampling.logit_bias),
    )


def sampling_from_wire(message: types_v1.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest for parameters that no distribution has."""
    if len(message.logit_bias) % _BIAS.size:
        raise InvalidRequest(f"sampling.logit_bias: {len(message.logit_bias)} bytes, wanted a multiple of {_BIAS.size}")
    sampling = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(_BIAS.iter_unpack(message.logit_bias)),
    )
    require_knobs(sampling, "sampling.")
    require_biases(sampling.logit_bias, "sampling.")
    return sampling


def beam_to_wire(beam: BeamSearch | None) -> types_v1.BeamSearch | None:
    if beam is None:
        return None
    return types_v1.BeamSearch(width=beam.width, length_penalty=beam.length_penalty, early_stopping=beam.early_stopping)


def beam_from_wire(message: types_v1.BeamSearch) -> BeamSearch:
    """Its ranges are judged with the rest of the request."""
    return BeamSearch(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=message.early_stopping,
    )


def submission_to_wire(submission: Submission) -> worker_v1.Submit:
    return worker_v1.Submit(
        request=submission.request,
        prompt=pack(submission.prompt),
        max_tokens=submission.max_tokens,
        samples=submission.samples,
        sampling=sampling_to_wire(submission.sampling),
        stop_tokens=pack(sorted(submission.stop_tokens)),
        salt=submission.scope.salt,
        tenant=submission.tenant,
        retain_seconds=submission.retain_seconds,
        adapter_digest=submission.scope.adapter_digest,
        media=_media_messages(submission.scope),
        public_tokens=submission.scope.public_tokens,
        priority=submission.priority,
        first_sample=submission.first_sample,
        carried_tokens=submission.carried_tokens,
        min_tokens=submission.min_tokens,
        logprobs=submission.logprobs,
        prompt_logprobs=submission.prompt_logprobs,
        beam=beam_to_wire(submission.beam),
    )


def submission_from_wire(message: worker_v1.Submit) -> Submission:
    return Submission(
        request=message.request,
        prompt=tuple(unpack("submit.prompt", message.prompt)),
        max_tokens=message.max_tokens,
        samples=message.samples,
        sampling=sampling_from_wire(message.sampling),
        stop_tokens=frozenset(unpack("submit.stop_tokens", message.stop_tokens)),
        scope=_scope_from_wire("submit", message),
        tenant=_tenant_from_wire("submit", message),
        retain_seconds=message.retain_seconds,
        priority=message.priority,
        first_sample=message.first_sample,
        carried_tokens=message.carried_tokens,
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        beam=beam_from_wire(message.beam) if message.HasField("beam") else None,
    )


def finish_reason_to_wire(reason: FinishReason) -> "worker_v1.FinishReason.ValueType":
    return _REASON_TO_WIRE[reason]


def finish_reason_from_wire(value: "worker_v1.FinishReason.ValueType") -> FinishReason:
    if value not in _REASON_FROM_WIRE:
        raise InvalidRequest(f"finish reason: {value}, wanted one of {sorted(_REASON_FROM_WIRE)}")
    return _REASON_FROM_WIRE[value]


def index_state_to_wire(state: IndexState | None) -> "gateway_v1.IndexState.ValueType":
    return gateway_v1.INDEX_STATE_UNSPECIFIED if state is None else _STATE_TO_WIRE[state]


def index_state_from_wire(value: "gateway_v1.IndexState.ValueType") -> IndexState | None:
    """None for a state that is not told, or not known here: it is not worth losing a reply for."""
    return _STATE_FROM_WIRE.get(value)


def report_to_wire(report: StepReport) -> worker_v1.ServeReply:
    return worker_v1.ServeReply(
        tokens=pack(
            value for new in report.tokens for value in (new.request, new.sample, len(new.tokens), *new.tokens)
        ),
        prefilled=[
            worker_v1.Prefilled(request=done.request, cached_tokens=done.cached_tokens) for done in report.prefilled
        ],
        finished=[
            worker_v1.SampleFinished(
                request=end.request,
                sample=end.sample,
                reason=finish_reason_to_wire(end.reason),
                cumulative_logprob=end.cumulative_logprob,
            )
            for end in report.finished
        ],
        refused=[
            worker_v1.Refused(request=refusal.request, reason=type(refusal.error).__name__, message=str(refusal.error))
            for refusal in report.refused
        ],
        logprobs=[
            worker_v1.SampleLogprobRun(request=new.request, sample=new.sample, tokens=_logprobs_to_wire(new.logprobs))
            for new in report.tokens
            if new.logprobs
        ],
        prompt_logprobs=[
            worker_v1.PromptLogprobRun(request=part.request, start=part.start, tokens=_logprobs_to_wire(part.tokens))
            for part in report.prompt_logprobs
        ],
    )


def report_from_wire(message: worker_v1.ServeReply) -> StepReport:
    tokens = unpack("serve.tokens", message.tokens)
    runs = tuple(
        Tokens(tokens[at], tokens[at + 1], tuple(tokens[start:end]))
        for at, start, end in _runs("serve.tokens", tokens, head=2)
    )
    return StepReport(
        tokens=_with_logprobs(runs, message.logprobs) if message.logprobs else runs,
        prefilled=tuple(Prefilled(done.request, done.cached_tokens) for done in message.prefilled),
        finished=tuple(
            SampleFinished(
                end.request,
                end.sample,
                finish_reason_from_wire(end.reason),
                end.cumulative_logprob if end.HasField("cumulative_logprob") else None,
            )
            for end in message.finished
        ),
        refused=tuple(Refusal(refusal.request, _refusal_error(refusal)) for refusal in message.refused),
        prompt_logprobs=tuple(
            PromptLogprobs(part.request, part.start, _logprobs_from_wire("serve.prompt_logprobs", part.tokens))
            for part in message.prompt_logprobs
        ),
    )


def _with_logprobs(runs: tuple[Tokens, ...], parts: Iterable[worker_v1.SampleLogprobRun]) -> tuple[Tokens, ...]:
    """The runs with those of their logprobs that were told, which come in the same order."""
    left = deque(parts)
    told: list[Tokens] = []
    for run in runs:
        if left and (left[0].request, left[0].sample) == (run.request, run.sample):
            logprobs = _logprobs_from_wire("serve.logprobs", left.popleft().tokens)
            if len(logprobs) != len(run.tokens):
                raise InvalidRequest(f"serve.logprobs: {len(logprobs)} of them for {len(run.tokens)} tokens")
            run = Tokens(run.request, run.sample, run.tokens, logprobs)
        told.append(run)
    if left:
        raise InvalidRequest(f"serve.logprobs: {len(left)} runs too many for {len(runs)} of tokens")
    return tuple(told)


def _logprobs_to_wire(logprobs: Sequence[TokenLogprobs]) -> worker_v1.LogprobRun:
    likeliest = [pair for token in logprobs for pair in token.top]
    return worker_v1.LogprobRun(
        chosen=_pack_floats(token.logprob for token in logprobs),
        top=len(logprobs[0].top) if logprobs else 0,
        top_ids=pack(token for token, _ in likeliest),
        top_logprobs=_pack_floats(logprob for _, logprob in likeliest),
    )


def _logprobs_from_wire(field: str, message: worker_v1.LogprobRun) -> tuple[TokenLogprobs, ...]:
    chosen = _unpack_floats(f"{field}.chosen", message.chosen)
    ids = unpack(f"{field}.top_ids", message.top_ids)
    top_logprobs = _unpack_floats(f"{field}.top_logprobs", message.top_logprobs)
    top, wanted = message.top, len(chosen) * message.top
    if not len(ids) == len(top_logprobs) == wanted:
        raise InvalidRequest(
            f"{field}: {len(ids)} top_ids and {len(top_logprobs)} top_logprobs, wanted {wanted} of each"
        )
    likeliest = tuple(zip(ids, top_logprobs, strict=True))
    return tuple(TokenLogprobs(value, likeliest[at * top : (at + 1) * top]) for at, value in enumerate(chosen))


def _refusal_error(message: worker_v1.Refused) -> OctavoError:
    return error_named(message.reason, message.message)
