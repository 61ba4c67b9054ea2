"""What the keys of a sequence's blocks depend on besides its tokens: fields that several messages have side by side."""

from collections.abc import Collection

from octavo.errors import InvalidRequest
from octavo.hashing import HASH_BYTES, TENANT_TAG_BYTES
from octavo.ids import TenantTag
from octavo.records.scope import PLAIN, Media, Scope
from octavo.v1 import cache_manager_pb2 as cache_manager_v1
from octavo.v1 import types_pb2 as types_v1
from octavo.v1 import worker_pb2 as worker_v1
from octavo.wire.flat import absent_or_whole, require_few


def scope_from_wire(
    path: str, message: cache_manager_v1.Attach | worker_v1.Submit | cache_manager_v1.ExplainPromptRequest
) -> Scope:
    """The fields of a scope, which lie side by side in the messages that have one. `path` is what leads to them."""
    if not (message.salt or message.media or message.public_tokens):
        return PLAIN
    return Scope(
        salt=absent_or_whole(f"{path}.salt", message.salt, HASH_BYTES),
        media=_media_from_wire(f"{path}.media", message.media),
        public_tokens=message.public_tokens,
    )


def tenant_from_wire(
    path: str, message: cache_manager_v1.Attach | cache_manager_v1.HeldSequence | worker_v1.Submit
) -> TenantTag:
    return TenantTag(absent_or_whole(f"{path}.tenant", message.tenant, TENANT_TAG_BYTES))


def media_to_wire(scope: Scope) -> list[types_v1.Media]:
    return [types_v1.Media(position=media.position, digest=media.digest) for media in scope.media]


def _media_from_wire(field: str, messages: Collection[types_v1.Media]) -> tuple[Media, ...]:
    require_few(field, len(messages))
    for message in messages:
        if len(message.digest) != HASH_BYTES:
            raise InvalidRequest(f"{field}.digest: {len(message.digest)} bytes, wanted {HASH_BYTES}")
    return tuple(Media(message.position, message.digest) for message in messages)
