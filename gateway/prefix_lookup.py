"""Adapter: how much of a prompt each worker holds, read from the prefix index.

The index is a hint: it may lag, and it may be away. So a look-up never fails and never takes longer than its budget;
what cannot be learned in time counts as "no hits", and the failure is counted.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any, Protocol, cast

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

from octavo.hashing import ChainRoot, block_hashes, hit_candidates
from octavo.ids import BlockHash, Epoch, WorkerId
from octavo.index_schema import LONGEST_PREFIX_SCRIPT, index_key, index_member
from octavo.records import WorkerInfo

log = logging.getLogger("octavo.gateway")

_SCRIPT_SHA = sha1(LONGEST_PREFIX_SCRIPT.encode(), usedforsecurity=False).hexdigest()

_SOCKET_SECONDS = 1.0
"""Bound of one socket operation; a look-up's own budget ends it earlier."""
_WARM_UP_SECONDS = 1.0


class PrefixLookup(Protocol):
    """Where to ask for prefix hits."""

    failures: int
    """Look-ups that learned nothing, since the start."""

    async def hits(self, prompt: Sequence[int], salt: bytes, workers: Sequence[WorkerInfo]) -> dict[WorkerId, int]:
        """Leading tokens of the prompt that each worker holds, whole blocks only; workers without any are left out.

        At least one token of the prompt is never counted, since it must be computed. `salt` is empty or 32 bytes.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Query:
    """The question to one worker: which of these members, from the first on, lie in the SET of that key?"""

    worker: WorkerId
    key: str
    members: bytes
    block_size: int


def _queries(prompt: Sequence[int], salt: bytes, workers: Sequence[WorkerInfo]) -> list[_Query]:
    """One question per worker. Workers of equal pools share a hash chain, which is computed once."""
    members: dict[ChainRoot, bytes] = {}
    queries: list[_Query] = []
    for worker in workers:
        root, block_size = worker.pool.chain_root(salt), worker.pool.block_size
        if root not in members:
            candidates = prompt[: hit_candidates(len(prompt), block_size) * block_size]
            members[root] = b"".join(index_member(each) for each in block_hashes(root.hash(), candidates, block_size))
        if members[root]:
            queries.append(
                _Query(worker.worker_id, index_key(worker.worker_id, worker.epoch), members[root], block_size)
            )
    return queries


class MemoryLookup:
    """An index of its own, in memory, for one process."""

    def __init__(self) -> None:
        self.failures = 0
        self._index: dict[str, set[bytes]] = {}

    def publish(self, worker: WorkerId, epoch: Epoch, hashes: Iterable[BlockHash]) -> None:
        """Say that a worker holds these blocks."""
        self._index.setdefault(index_key(worker, epoch), set()).update(index_member(each) for each in hashes)

    async def hits(self, prompt: Sequence[int], salt: bytes, workers: Sequence[WorkerInfo]) -> dict[WorkerId, int]:
        """See PrefixLookup."""
        found = {query.worker: self._leading(query) * query.block_size for query in _queries(prompt, salt, workers)}
        return {worker: tokens for worker, tokens in found.items() if tokens}

    def _leading(self, query: _Query) -> int:
        held = self._index.get(query.key, set())
        width = len(index_member(BlockHash(bytes(32))))
        members = [query.members[at : at + width] for at in range(0, len(query.members), width)]
        return next((at for at, member in enumerate(members) if member not in held), len(members))


class RedisLookup:
    """The fleet's index in Redis: one round trip a look-up, one script call per worker in it."""

    def __init__(self, url: str, budget_seconds: float) -> None:
        """Ask the server at `url`; nothing is connected yet."""
        self.failures = 0
        self._budget_seconds = budget_seconds
        self._redis = cast("Any", redis.asyncio.Redis).from_url(
            url, socket_connect_timeout=_SOCKET_SECONDS, socket_timeout=_SOCKET_SECONDS
        )
        self._answering = True

    async def warm_up(self) -> None:
        """Connect and load the script, so that the first look-up stays within its budget. Fails silently."""
        try:
            async with asyncio.timeout(_WARM_UP_SECONDS):
                await self._redis.script_load(LONGEST_PREFIX_SCRIPT)
        except (RedisError, OSError) as error:
            self._failed(error)

    async def close(self) -> None:
        """Give the connections back."""
        await self._redis.aclose()

    async def hits(self, prompt: Sequence[int], salt: bytes, workers: Sequence[WorkerInfo]) -> dict[WorkerId, int]:
        """See PrefixLookup."""
        queries = _queries(prompt, salt, workers)
        if not queries:
            return {}
        try:
            async with asyncio.timeout(self._budget_seconds):
                answers = await self._ask(queries)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            self._failed(error)
            return {}
        self._answered()
        return {
            query.worker: answer * query.block_size
            for query, answer in zip(queries, answers, strict=True)
            if isinstance(answer, int) and answer > 0  # an error about one key costs that key only
        }

    async def _ask(self, queries: Sequence[_Query]) -> list[Any]:
        answers = await self._call_script(queries)
        if any(isinstance(answer, NoScriptError) for answer in answers):  # a server that was started anew
            await self._redis.script_load(LONGEST_PREFIX_SCRIPT)
            answers = await self._call_script(queries)
        return answers

    async def _call_script(self, queries: Sequence[_Query]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for query in queries:
                pipeline.evalsha(_SCRIPT_SHA, 1, query.key, query.members)
            return await pipeline.execute(raise_on_error=False)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self._answering:
            log.warning("prefix_lookup_failed", extra={"reason": f"{type(error).__name__}: {error}"})
        self._answering = False

    def _answered(self) -> None:
        if not self._answering:
            log.info("prefix_lookup_answers_again", extra={"failures": self.failures})
        self._answering = True
