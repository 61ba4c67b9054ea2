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
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache_manager.change_queue import Batch, ChangeQueue
from octavo.index_schema import index_member

log = logging.getLogger("octavo.cache_manager.redis_mirror")

PACE_SECONDS = 0.025
"""Least time from batch to batch. The first change after a pause is sent at once; under load the changes gather, since
a batch costs a round trip and 0.2 ms of CPU however small it is."""

SOCKET_TIMEOUT_SECONDS = 1.0
"""A paused Redis holds a connection open for ever; without this, so would we."""

BACKOFF_SECONDS = (0.1, 2.0)
"""The first and the longest pause before Redis is tried again."""

MEMBERS_A_COMMAND = 1 << 12

_Pipeline = Any
"""redis-py types its commands for both of its faces at once, so none of them tells a checker anything."""


@dataclass(frozen=True, slots=True)
class _Write:
    """Where in a pipeline's replies the answers to one index's commands are."""

    additions: range
    removals: range
    size: int


class RedisMirror:
    """Brings what the queue says to Redis. Run one; it ends when it is cancelled."""

    def __init__(
        self, url: str, changes: ChangeQueue, *, ttl_seconds: float, pace_seconds: float = PACE_SECONDS
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
        self._pace = pace_seconds
        self._told_at = 0.0
        self._sizes: dict[str, int] = {}
        """Index -> members of its SET after our last write."""
        self._pause = 0.0
        """Seconds to wait before the next try; 0 while Redis answers."""

    async def run(self) -> None:
        """Follow the queue until cancelled. No failure ends it: the service must not die of its rumour."""
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # asked, since redis-py loses a cancellation that meets a reply
            try:
                await self._wait()
                await self._tell(self._changes.take())
            except Exception as error:
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
        """Return when there is something to tell and it is time, or keys are to be renewed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at):
                await self._changes.wait()
            await asyncio.sleep(self._told_at + self._pace - self._now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

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
        now = self._told_at = self._now()
        renew = now >= self._renew_at
        updates = batch.updates
        async with self._redis.pipeline(transaction=False) as pipeline:
            if renew:
                updates = {index: updates.get(index, {}) for index in self._changes.open_indexes()}
                pipeline.ping()  # pyright: ignore[reportUnknownMemberType]  # as above
            if batch.ended:
                pipeline.unlink(*batch.ended)
            written = {index: self._write(pipeline, index, changes, renew) for index, changes in updates.items()}
            replies = cast("list[object]", await pipeline.execute(raise_on_error=False))
        for index in batch.ended:
            self._sizes.pop(index, None)
        for index, write in written.items():
            self._judge(index, write, replies)
        if renew:
            self._renew_at = now + self._renew_every

    async def _copy(self, index: str) -> None:
        """Make the SET anew from the ledger's truth. What changes meanwhile is in the next batch."""
        await self._redis.unlink(index)  # first, as it fails at once while Redis is away
        self._sizes[index] = 0
        members = [index_member(block_hash) for block_hash in self._changes.truth(index)]
        for chunk in _chunks(members):
            async with self._redis.pipeline(transaction=False) as pipeline:
                self._write(pipeline, index, dict.fromkeys(chunk, True), renew=True)
                replies = cast("list[int]", await pipeline.execute())
            self._sizes[index] = replies[-1]

    def _write(self, pipeline: _Pipeline, index: str, changes: dict[bytes, bool], renew: bool) -> _Write:
        """Add the commands that bring an index up to date, its time to live where it may have none or is due."""
        start = len(pipeline)
        for chunk in _chunks([member for member, there in changes.items() if there]):
            pipeline.sadd(index, *chunk)
        middle = len(pipeline)  # removals come last: a SET that becomes empty is gone, and its time to live with it
        for chunk in _chunks([member for member, there in changes.items() if not there]):
            pipeline.srem(index, *chunk)
        end = len(pipeline)
        pipeline.scard(index)
        if renew or not self._sizes.get(index):
            pipeline.pexpire(index, self._ttl_ms)
        return _Write(additions=range(start, middle), removals=range(middle, end), size=end)

    def _judge(self, index: str, write: _Write, replies: list[object]) -> None:
        """Believe that an index was updated, or have it copied anew."""
        mine = replies[write.additions.start : write.size + 1]
        problem = next((reply for reply in mine if isinstance(reply, Exception)), None)
        if problem is None:
            counts = cast("list[int]", replies)
            added, removed = (sum(counts[at] for at in part) for part in (write.additions, write.removals))
            expected, found = self._sizes.get(index, 0) + added - removed, counts[write.size]
            self._sizes[index] = found
            if found == expected:
                return
            problem = f"{found} members, {expected} expected"
        log.warning("index_copy_damaged", extra={"index": index, "reason": str(problem)})
        self._changes.spoil([index])

    def _note_lost(self, error: Exception) -> None:
        if self._pause == 0.0:
            bug = None if isinstance(error, RedisError | OSError) else error
            log.error("index_mirror_lost", exc_info=bug, extra={"reason": f"{type(error).__name__}: {error}"})
        self._renew_at = 0.0
        shortest, longest = BACKOFF_SECONDS
        self._pause = min(longest, max(shortest, 2 * self._pause))

    def _note_found(self) -> None:
        if self._pause > 0.0:
            log.info("index_mirror_found", extra={"indexes": len(self._sizes), "blocks": sum(self._sizes.values())})
            self._pause = 0.0


def _chunks(members: list[bytes]) -> Iterator[list[bytes]]:
    for at in range(0, len(members), MEMBERS_A_COMMAND):
        yield members[at : at + MEMBERS_A_COMMAND]
