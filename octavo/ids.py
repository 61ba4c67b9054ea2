"""Names for the numbers that travel: a block is not a sequence, though both are integers."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool, from 0."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes that stand for a full block and everything before it (octavo.hashing)."""

SequenceId = NewType("SequenceId", int)
"""A token stream with a table of its own; drawn by its worker, unique within an epoch; fits in a u32."""

WorkerId = NewType("WorkerId", str)
"""Drawn by a worker when it is set up; survives nothing but its process."""

Incarnation = NewType("Incarnation", int)
"""Random 64 bits, one draw per worker process."""

UNKNOWN_INCARNATION = Incarnation(0)

CacheEpoch = NewType("CacheEpoch", int)
"""Part of every block hash. Each reset of a worker's prefix index raises it, so that nothing before is found again."""

NEVER_RESET = CacheEpoch(0)

TenantTag = NewType("TenantTag", bytes)
"""8 bytes that stand for a tenant's name, or none."""

NOBODY = TenantTag(b"")
"""No tenant in particular."""

Epoch = NewType("Epoch", int)
"""A registration's number. Grows with every registration anywhere, so that an old message is known by it."""

NO_EPOCH = Epoch(0)
"""Before the first registration."""
