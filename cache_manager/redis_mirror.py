"""The fleet-wide copy of the prefix indexes in Redis: one SET of block hashes for every worker's epoch.

The copy lags behind the ledgers and may be lost at any time; nothing waits for it. Whatever goes wrong - Redis is away,
slow, full, restarted empty, failed over to a server that lacks the last writes - is answered alike: say so once, wait a
little, and copy the ledgers' truth anew. Where some servers of a cluster answer and others do not, the copies on those
that do are kept up. This process is the only writer of its keys, so a SET whose size has changed between two batches
has lost writes, whoever lost them; it alone is copied anew, as is a key that holds something else.

A SET gets its mark (octavo.index_schema) last, so readers know a copy that is not whole. Every SET has a time to live,
renewed while its epoch lives: what a manager cannot drop because it died drops itself.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

from cache_manager.change_queue import Batch, ChangeQueue
from octavo.index_schema import WHOLE_MARK, index_member
from octavo.redis_client import Command, RedisClient, ResponseError

log = logging.getLogger("octavo.cache_manager.redis_mirror")

PACE_SECONDS = 0.2
"""Least time from batch to batch. The first change after a pause is sent at once; under load the changes gather, since
a batch costs a round trip and 0.2 ms of CPU however small it is, and 0.05 ms for each busy worker. What a gateway has
sent somewhere it counts as held there itself, and the others do by its claim, which outlives this many times."""

LAST_WORDS_SECONDS = 1.0
"""What Redis has to hear them in."""

BACKOFF_SECONDS = (0.1, 2.0)
"""The first and the longest pause before Redis is tried again."""

MEMBERS_A_COMMAND = 1 << 12


class IndexLost(Exception):
    """Some of the copies could not be written, for this reason."""


@dataclass(frozen=True, slots=True)
class _Update:
    """The commands that bring one index up to date."""

    index: str
    additions: list[Command]
    removals: list[Command]
    rest: list[Command]
    """SCARD first."""

    @property
    def commands(self) -> Iterator[Command]:
        return chain(self.additions, self.removals, self.rest)


class RedisMirror:
    """Brings what the queue says to Redis. Run one; it ends when it is cancelled."""

    def __init__(
        self, client: RedisClient, changes: ChangeQueue, *, ttl_seconds: float, pace_seconds: float = PACE_SECONDS
    ) -> None:
        """Keys live for `ttl_seconds` after they were last renewed, which happens three times as often.

        `client` is closed with this.
        """
        self._client = client
        self._changes = changes
        self._ttl_ms = round(ttl_seconds * 1000)
        self._renew_every = ttl_seconds / 3
        self._renew_at = 0.0
        self._pace = pace_seconds
        self._told_at = 0.0
        self._sizes: dict[str, int] = {}
        """Index -> members of its SET after our last write, its mark among them."""
        self._pause = 0.0
        """Seconds to wait before the next try; 0 while Redis answers."""

    async def run(self) -> None:
        """Follow the queue until cancelled. No failure ends it: the service must not die of its rumour."""
        while True:
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
        with contextlib.suppress(IndexLost, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._tell(self._changes.take())
        await self._client.close()

    async def _wait(self) -> None:
        """Return when there is something to tell and it is time, or keys are to be renewed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at):
                await self._changes.wait()
            await asyncio.sleep(self._told_at + self._pace - self._now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # ---- one batch -------------------------------------------------------------------------------------------

    async def _tell(self, batch: Batch) -> None:
        """Bring a batch to every server that takes it.

        Raises:
            IndexLost: some did not, for the reason it names; what they were to be told will come again.
        """
        try:
            problems = [*await self._drop(batch), *await self._copy_all(batch.stale), *await self._send(batch.updates)]
        except BaseException:
            self._changes.drop(batch.ended)
            self._changes.spoil(self._changes.open_indexes())
            raise
        if problems:
            raise IndexLost(f"{type(problems[0]).__name__}: {problems[0]}") from problems[0]

    async def _drop(self, batch: Batch) -> list[Exception]:
        """Unlink what has ended, and what is to be copied anew. Those of the latter that fail are stale again."""
        keys = [*batch.ended, *batch.stale]
        replies = await self._client.execute([Command(key, ("UNLINK", key)) for key in keys])
        judged = {key: _first_problem([reply]) for key, reply in zip(keys, replies, strict=True)}
        failed = {key: problem for key, problem in judged.items() if problem is not None}
        self._changes.drop(key for key in batch.ended if key in failed)
        self._changes.spoil(key for key in batch.stale if key in failed)
        for key in keys:
            self._sizes.pop(key, None)
        batch.stale = [key for key in batch.stale if key not in failed]
        return list(failed.values())

    async def _copy_all(self, indexes: Sequence[str]) -> list[Exception]:
        """Make SETs that are not there anew; those that fail are stale again."""
        problems: list[Exception] = []
        for index in indexes:
            problem = await self._copy(index)
            if problem is not None:
                problems.append(problem)
                self._changes.spoil([index])
        return problems

    async def _copy(self, index: str) -> Exception | None:
        """Write the ledger's truth. What changes meanwhile is in the next batch."""
        members = [*(index_member(block_hash) for block_hash in self._changes.truth(index)), WHOLE_MARK]
        for part in _chunks(members):
            update = self._update(index, dict.fromkeys(part, True), renew=True)
            replies = await self._client.execute(list(update.commands))
            problem = _first_problem(replies)
            if problem is not None:
                return problem
            self._sizes[index] = cast("int", replies[len(update.additions)])
        return None

    async def _send(self, changed: dict[str, dict[bytes, bool]]) -> list[Exception]:
        """Bring indexes up to date, a round trip a server; returns the failures that are not one index's alone."""
        now = self._told_at = self._now()
        renew = now >= self._renew_at
        if renew:
            changed = {index: changed.get(index, {}) for index in self._changes.open_indexes()}
        updates = [self._update(index, changes, renew) for index, changes in changed.items()]
        replies = iter(await self._client.execute([each for update in updates for each in update.commands]))
        problems = [self._judge(update, [next(replies) for _ in update.commands]) for update in updates]
        if renew:
            self._renew_at = now + self._renew_every
        return [problem for problem in problems if problem is not None]

    def _update(self, index: str, changes: dict[bytes, bool], renew: bool) -> _Update:
        added, removed = ([member for member, there in changes.items() if there is wanted] for wanted in (True, False))
        rest = [Command(index, ("SCARD", index))]
        if renew:
            rest.append(Command(index, ("PEXPIRE", index, self._ttl_ms)))
        return _Update(
            index=index,
            additions=[Command(index, ("SADD", index, *part)) for part in _chunks(added)],
            removals=[Command(index, ("SREM", index, *part)) for part in _chunks(removed)],
            rest=rest,
        )

    def _judge(self, update: _Update, replies: list[object]) -> Exception | None:
        """Believe that an index was updated, or have it copied anew. Returns what a whole server failed with."""
        index, problem = update.index, _first_problem(replies)
        if problem is None:
            counts = cast("list[int]", replies)
            middle, end = len(update.additions), len(update.additions) + len(update.removals)
            expected = self._sizes.get(index, 0) + sum(counts[:middle]) - sum(counts[middle:end])
            self._sizes[index] = counts[end]
            if counts[end] == expected:
                return None
            problem = ResponseError(f"{counts[end]} members, {expected} expected")
        self._changes.spoil([index])
        if not isinstance(problem, ResponseError):
            return problem
        log.warning("index_copy_damaged", extra={"index": index, "reason": str(problem)})
        return None

    # ---- what is said of it ----------------------------------------------------------------------------------

    def _note_lost(self, error: Exception) -> None:
        if self._pause == 0.0:
            bug = None if isinstance(error, IndexLost) else error
            log.error("index_mirror_lost", exc_info=bug, extra={"reason": str(error)})
        shortest, longest = BACKOFF_SECONDS
        self._pause = min(longest, max(shortest, 2 * self._pause))

    def _note_found(self) -> None:
        if self._pause > 0.0:
            log.info("index_mirror_found", extra={"indexes": len(self._sizes), "members": sum(self._sizes.values())})
            self._pause = 0.0


def _first_problem(replies: Sequence[object]) -> Exception | None:
    """What keeps replies from being counts, as everything that is said here is answered with one."""
    problem = next((reply for reply in replies if not isinstance(reply, int)), None)
    if problem is None or isinstance(problem, Exception):
        return problem
    return ResponseError(f"{str(problem)[:60]!r}, wanted a count")


def _chunks(members: list[bytes]) -> Iterator[list[bytes]]:
    for at in range(0, len(members), MEMBERS_A_COMMAND):
        yield members[at : at + MEMBERS_A_COMMAND]
