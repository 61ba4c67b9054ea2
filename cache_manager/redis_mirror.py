"""The fleet-wide copy of the prefix indexes in Redis: one SET of block hashes for every worker's epoch.

The copy lags behind the ledgers and may be lost at any time; nothing waits for it. Whatever goes wrong - Redis is away,
slow, full, restarted empty - is answered alike: say so once, wait a little, and copy the ledgers' truth anew. This
process is the only writer of its keys, so a SET whose size has changed between two batches has lost writes, whoever
lost them; it alone is copied anew, as is a key that holds something else.

Every SET has a time to live, renewed while its epoch lives: what a manager cannot drop because it died drops itself.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache_manager.change_queue import Batch, ChangeQueue
from octavo.index_schema import index_member

log = logging.getLogger("octavo.cache_manager.redis_mirror")

LINGER_SECONDS = 0.01
"""Changes gather this long before they are sent: a batch costs a round trip, however small."""

SOCKET_TIMEOUT_SECONDS = 1.0
"""A paused Redis holds a connection open for ever; without this, so would we."""

BACKOFF_SECONDS = (0.1, 2.0)
"""The first and the longest pause before Redis is tried again."""

MEMBERS_A_COMMAND = 1 << 12

_Pipeline = Any
"""redis-py types its commands for both of its faces at once, so none of them tells a checker anything."""


class RedisMirror:
    """Brings what the queue says to Redis. Run one; it ends when it is cancelled."""

    def __init__(
        self, url: str, changes: ChangeQueue, *, ttl_seconds: float, linger_seconds: float = LINGER_SECONDS
    ) -> None:
        """Keys live for `ttl_seconds` after they were last renewed, which happens three times as often."""
        self._redis = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # redis-py leaves **kwargs untyped
            url,
            socket_timeout=SOCKET_TIMEOUT_SECONDS,
            socket_connect_timeout=SOCKET_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),  # a command sent again by the library would hide that Redis was away
        )
        self._changes = changes
        self._ttl_ms = round(ttl_seconds * 1000)
        self._renew_every = ttl_seconds / 3
        self._renew_at = 0.0
        self._linger = linger_seconds
        self._sizes: dict[str, int] = {}
        """Index -> members of its SET after our last write."""
        self._pause = 0.0
        """Seconds to wait before the next try; 0 while Redis answers."""

    async def run(self) -> None:
        """Follow the queue until cancelled."""
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # asked, since redis-py loses a cancellation that meets a reply
            try:
                await self._wait()
                await self._tell(self._changes.take())
            except (RedisError, OSError) as error:
                self._note_lost(error)
                await asyncio.sleep(self._pause)
            else:
                self._note_found()

    async def close(self) -> None:
        """Say the last words, for which Redis has a second, and disconnect."""
        with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
            async with asyncio.timeout(SOCKET_TIMEOUT_SECONDS):
                await self._tell(self._changes.take())
        await self._redis.aclose()

    async def _wait(self) -> None:
        """Return when there is something to tell, or keys are to be renewed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at):
                await self._changes.wait()
            await asyncio.sleep(self._linger)

    async def _tell(self, batch: Batch) -> None:
        try:
            for index in batch.stale:
                await self._copy(index)
            await self._send(batch)
        except BaseException:
            self._changes.drop(batch.ended)
            self._changes.spoil(self._changes.open_indexes())
            raise

    async def _send(self, batch: Batch) -> None:
        """Everything of a batch but its stale indexes, in one round trip."""
        updates = batch.updates
        now = asyncio.get_running_loop().time()
        async with self._redis.pipeline(transaction=False) as pipeline:
            if now >= self._renew_at:
                updates = {index: updates.get(index, {}) for index in self._changes.open_indexes()}
                pipeline.ping()  # pyright: ignore[reportUnknownMemberType]  # the same
            first = {index: _update(pipeline, index, members, self._ttl_ms) for index, members in updates.items()}
            if batch.ended:
                pipeline.unlink(*batch.ended)
            replies = cast("list[object]", await pipeline.execute(raise_on_error=False))
        for index in batch.ended:
            self._sizes.pop(index, None)
        for index, (start, end) in first.items():
            self._judge(index, replies[start:end])
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every

    def _judge(self, index: str, replies: list[object]) -> None:
        """Believe that an index was updated, or have it copied anew."""
        problem = next((reply for reply in replies if isinstance(reply, Exception)), None)
        before, after = replies[0], replies[-1]
        if problem is None and before == self._sizes.get(index, 0):
            self._sizes[index] = cast("int", after)
            return
        expected = self._sizes.get(index, 0)
        log.warning("index_copy_damaged", extra={"index": index, "expected": expected, "found": str(problem or before)})
        self._changes.spoil([index])

    async def _copy(self, index: str) -> None:
        """Make the SET anew from the ledger's truth. What changes meanwhile is in the next batch."""
        members = [index_member(block_hash) for block_hash in self._changes.truth(index)]
        await self._redis.unlink(index)
        self._sizes[index] = 0
        for chunk in _chunks(members):
            async with self._redis.pipeline(transaction=False) as pipeline:
                _update(pipeline, index, dict.fromkeys(chunk, True), self._ttl_ms)
                replies = cast("list[object]", await pipeline.execute())
            self._sizes[index] = cast("int", replies[-1])

    def _note_lost(self, error: Exception) -> None:
        if self._pause == 0.0:
            log.error("index_mirror_lost", extra={"reason": f"{type(error).__name__}: {error}"})
        self._renew_at = 0.0
        shortest, longest = BACKOFF_SECONDS
        self._pause = min(longest, max(shortest, 2 * self._pause))

    def _note_found(self) -> None:
        if self._pause > 0.0:
            log.info("index_mirror_found", extra={"indexes": len(self._sizes), "blocks": sum(self._sizes.values())})
            self._pause = 0.0


def _update(pipeline: _Pipeline, index: str, members: dict[bytes, bool], ttl_ms: int) -> tuple[int, int]:
    """Add the commands that bring an index up to date. Returns [start, end) of their replies.

    The first and the last reply are the SET's size before and after.
    """
    start = len(pipeline)
    pipeline.scard(index)
    for chunk in _chunks([member for member, there in members.items() if not there]):
        pipeline.srem(index, *chunk)
    for chunk in _chunks([member for member, there in members.items() if there]):
        pipeline.sadd(index, *chunk)
    pipeline.pexpire(index, ttl_ms)
    pipeline.scard(index)
    return start, len(pipeline)


def _chunks(members: list[bytes]) -> Iterator[list[bytes]]:
    for at in range(0, len(members), MEMBERS_A_COMMAND):
        yield members[at : at + MEMBERS_A_COMMAND]
