"""What a cache manager tells of its books when it is asked: audits, tables, why a prompt missed, resets."""

from array import array
from collections.abc import Sequence

from octavo.errors import InvalidRequest
from octavo.ids import BlockId, CacheEpoch, Epoch, SequenceId, WorkerId
from octavo.records.insight import CacheReset, HitEnd, PoolAudit, PromptExplanation, SequenceDescription, TableBlock
from octavo.records.scope import Scope
from octavo.v1 import cache_manager_pb2 as cache_manager_v1
from octavo.wire.flat import pack, pack_all, unpack
from octavo.wire.scope import media_to_wire, scope_from_wire

_END_TO_WIRE = {
    HitEnd.LAST_TOKEN: cache_manager_v1.HIT_END_LAST_TOKEN,
    HitEnd.DIFFERS: cache_manager_v1.HIT_END_DIFFERS,
    HitEnd.NOT_PUBLISHED: cache_manager_v1.HIT_END_NOT_PUBLISHED,
    HitEnd.BEING_COMPUTED: cache_manager_v1.HIT_END_BEING_COMPUTED,
}
_END_FROM_WIRE = {value: end for end, value in _END_TO_WIRE.items()}


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
        blocks=pack_all(description.blocks),
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
        media=media_to_wire(scope),
        public_tokens=scope.public_tokens,
    )


def prompt_to_explain_from_wire(message: cache_manager_v1.ExplainPromptRequest) -> tuple[WorkerId, "array[int]", Scope]:
    return WorkerId(message.worker_id), unpack("explain.tokens", message.tokens), scope_from_wire("explain", message)


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
