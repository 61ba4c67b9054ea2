"""Worker <-> cache manager: registration, inventory, exchange and grant."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

from octavo.errors import InvalidRequest
from octavo.hashing import HASH_BYTES, NO_SEAM, TOKEN_BYTES, Seam
from octavo.ids import BlockHash, BlockId, CacheEpoch, Epoch, Incarnation, SequenceId, WorkerId
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
from octavo.v1 import cache_manager_pb2 as cache_manager_v1
from octavo.wire.flat import (
    MAX_PARTS,
    NEW_TUPLE,
    FromPair,
    pack,
    pack_all,
    require_few,
    runs_of,
    unpack,
    unpack_blocks,
    unpack_pairs,
    unpack_sequences,
)
from octavo.wire.fleet import load_from_wire, load_to_wire, pool_from_wire, pool_to_wire
from octavo.wire.scope import media_to_wire, scope_from_wire, tenant_from_wire

_NEW_EXCHANGE: Callable[[tuple[Any, ...]], Exchange] = partial(NEW_TUPLE, Exchange)
_NEW_COMMIT: Callable[[tuple[SequenceId, Sequence[int]]], Commit] = partial(NEW_TUPLE, Commit)
_NEW_TRUNCATION: FromPair[Truncation] = partial(NEW_TUPLE, Truncation)
_NEW_RESERVATION: FromPair[Reservation] = partial(NEW_TUPLE, Reservation)
_NEW_COPY: FromPair[BlockCopy] = partial(NEW_TUPLE, BlockCopy)
_NEW_REUSE = cast(FromPair[tuple[SequenceId, int]], tuple)
_NEW_WAIT = cast(FromPair[tuple[SequenceId, SequenceId]], tuple)


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
    require_few("register.inventory_parts", message.inventory_parts)
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
    require_few("inventory.sequences", len(message.sequences))
    return Inventory(message.published, tuple(_held_from_wire(held) for held in message.sequences))


def _held_from_wire(message: cache_manager_v1.HeldSequence) -> HeldSequence:
    return HeldSequence(
        sequence=SequenceId(message.sequence),
        root=root_from_wire("inventory.sequences.root", message.root),
        tokens=unpack("inventory.sequences.tokens", message.tokens),
        table=unpack_blocks("inventory.sequences.table", message.table),
        room=message.room,
        ahead=unpack("inventory.sequences.ahead", message.ahead),
        forgotten=message.forgotten,
        tenant=tenant_from_wire("inventory.sequences", message),
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
        truncated=pack_all(exchange.truncations),
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
                media=media_to_wire(attach.scope),
                public_tokens=attach.scope.public_tokens,
            )
            for attach in exchange.attaches
        ],
        reserves=pack_all(exchange.reserves),
        load=load_to_wire(exchange.load),
        draining=exchange.draining,
    )


def exchange_from_wire(message: cache_manager_v1.Exchange) -> Exchange:
    """In the order of the record's fields.

    Raises:
        InvalidRequest: there is more than anybody can mean, before it is read; or a part has no such shape.
    """
    return _NEW_EXCHANGE(
        (
            Epoch(message.epoch),
            message.step,
            unpack_pairs("exchange.truncated", message.truncated, _NEW_TRUNCATION, MAX_PARTS),
            _commits_from_wire("exchange.committed", message.committed),
            _forks_from_wire("exchange.forks", message.forks),
            unpack_sequences("exchange.finished", message.finished, MAX_PARTS),
            _attaches_from_wire("exchange.attaches", message.attaches),
            unpack_pairs("exchange.reserves", message.reserves, _NEW_RESERVATION, MAX_PARTS),
            load_from_wire(message.load),
            message.draining,
        )
    )


def _commits_from_wire(field: str, raw: bytes) -> tuple[Commit, ...]:
    words = unpack(field, raw)
    sequences = cast(Sequence[SequenceId], words)
    runs = runs_of(field, words, 1, MAX_PARTS)
    return tuple([_NEW_COMMIT((sequences[at], words[start:end])) for at, start, end in runs])


def _forks_from_wire(field: str, messages: Collection[cache_manager_v1.Fork]) -> tuple[Fork, ...]:
    if not messages:
        return ()
    require_few(field, len(messages))
    require_few(f"{field}.children", sum(len(fork.children) for fork in messages) // TOKEN_BYTES)
    return tuple(
        Fork(SequenceId(fork.parent), unpack_sequences(f"{field}.children", fork.children), fork.reserve)
        for fork in messages
    )


def _attaches_from_wire(field: str, messages: Collection[cache_manager_v1.Attach]) -> tuple[Attach, ...]:
    if not messages:
        return ()
    require_few(field, len(messages))
    return tuple(
        Attach(
            SequenceId(attach.sequence),
            unpack(f"{field}.tokens", attach.tokens),
            scope_from_wire(field, attach),
            tenant_from_wire(field, attach),
            attach.retain_seconds,
        )
        for attach in messages
    )


def grant_to_wire(grant: Grant) -> cache_manager_v1.AttendReply:
    """The reply that carries it, filled in place: a message that is put into another is copied by way of bytes."""
    reply = cache_manager_v1.AttendReply()
    message = reply.grant
    message.epoch = grant.epoch
    message.step = grant.step
    message.attached = pack_all(grant.attached)
    message.waiting = pack_all(grant.waiting)
    message.tables = pack(
        [value for sequence, start, blocks in grant.tables for value in (sequence, start, len(blocks), *blocks)]
    )
    message.copies = pack_all(grant.copies)
    message.unmet = pack(grant.unmet)
    message.free_blocks = grant.free_blocks
    message.published = grant.published
    message.evicted = pack(grant.evicted)
    message.roots = b"".join(grant.roots)
    message.cache_epoch = grant.cache_epoch
    return reply


def grant_from_wire(message: cache_manager_v1.Grant) -> Grant:
    tables = unpack("grant.tables", message.tables)
    return Grant(
        epoch=Epoch(message.epoch),
        step=message.step,
        attached=unpack_pairs("grant.attached", message.attached, _NEW_REUSE),
        waiting=unpack_pairs("grant.waiting", message.waiting, _NEW_WAIT),
        tables=tuple(
            TableChange(SequenceId(tables[at]), tables[at + 1], tuple(map(BlockId, tables[start:end])))
            for at, start, end in runs_of("grant.tables", tables, head=2)
        ),
        copies=unpack_pairs("grant.copies", message.copies, _NEW_COPY),
        unmet=unpack_sequences("grant.unmet", message.unmet),
        free_blocks=message.free_blocks,
        published=message.published,
        evicted=unpack_blocks("grant.evicted", message.evicted),
        roots=_roots_from_wire("grant.roots", message.roots),
        cache_epoch=CacheEpoch(message.cache_epoch),
    )


def _roots_from_wire(field: str, raw: bytes) -> tuple[BlockHash, ...]:
    if len(raw) % HASH_BYTES:
        raise InvalidRequest(f"{field}: {len(raw)} bytes, wanted a multiple of {HASH_BYTES}")
    return tuple(BlockHash(raw[at : at + HASH_BYTES]) for at in range(0, len(raw), HASH_BYTES))
