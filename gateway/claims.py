"""Adapter: what this gateway has sent where, told to the others before any worker has published it.

A worker's blocks are in the prefix index only when they have been computed. Until then, whoever sends a prompt claims
its blocks beside the index (octavo.index_schema), so that a burst which comes in through several gateways stays
together.

A claim is worth a hit and nothing more: it is written behind the request, once, and nobody hears of what became of it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from octavo.ids import BlockHash
from octavo.index_schema import CLAIM_SCRIPT, CLAIM_SECONDS, MAX_CLAIMS, claims_key, index_member
from octavo.records.fleet import WorkerInfo
from octavo.redis_client import Command, RedisClient

PACE_SECONDS = 0.01
"""Between two writes. The first claim after a pause is sent at once; under load claims gather, and the many that a
burst makes of one block become one."""

MEMBERS_A_COMMAND = 1 << 9
"""What a server writes in a fraction of a look-up's budget; look-ups go in between."""


@dataclass(slots=True)
class ClaimCounts:
    """Since the gateway's start."""

    blocks: int = 0
    """Claimed on some worker."""
    failures: int = 0
    """Writes of up to MEMBERS_A_COMMAND blocks that Redis did not take."""


class Claims:
    """What is to be written, and the task that writes it while there is any."""

    def __init__(self, client: RedisClient) -> None:
        """Write through `client`, which stays its owner's."""
        self.counts = ClaimCounts()
        self._client = client
        self._unwritten: dict[str, dict[bytes, None]] = {}
        """Key -> members, each once."""
        self._writing: asyncio.Task[None] | None = None

    def add(self, worker: WorkerInfo, blocks: Sequence[BlockHash]) -> None:
        """Claim blocks on a worker; those that are more than it may have at once are left out."""
        if not blocks:
            return
        members = self._unwritten.setdefault(claims_key(worker.worker_id, worker.epoch), {})
        before = len(members)
        members.update(dict.fromkeys(map(index_member, islice(blocks, MAX_CLAIMS - before))))
        self.counts.blocks += len(members) - before
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Write no more."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    async def _write(self) -> None:
        while self._unwritten:
            unwritten, self._unwritten = self._unwritten, {}
            replies = await self._client.execute(list(_commands(unwritten)))
            self.counts.failures += sum(isinstance(reply, Exception) for reply in replies)
            await asyncio.sleep(PACE_SECONDS)


def _commands(claims: dict[str, dict[bytes, None]]) -> Iterator[Command]:
    """EVAL with the text, which is shorter than most claims: no second round trip for a server that has not seen it."""
    milliseconds = int(CLAIM_SECONDS * 1000)
    for key, members in claims.items():
        rest = iter(members)
        while part := b"".join(islice(rest, MEMBERS_A_COMMAND)):
            yield Command(key, ("EVAL", CLAIM_SCRIPT, 1, key, part, milliseconds, MAX_CLAIMS))
