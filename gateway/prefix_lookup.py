"""Adapter: how much of a prompt each worker holds, read from the prefix index.

The index is a hint: it may lag, and it may be away. So a look-up never fails and never takes longer than its budget;
what cannot be learned in time counts as "no hits", and every answer says what it is worth
(octavo.records.generate.IndexState).

Invariant: a request waits for its budget's end or for the answer, whichever comes first, and for nothing else. It
neither connects nor finds out whether Redis is back: while the breaker (gateway.core.breaker) is open, nobody is asked
but by the probe, which runs beside.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Protocol

from gateway.claims import ClaimCounts, Claims
from gateway.core.breaker import Breaker
from gateway.core.in_flight import Blocks, PromptBlocks
from octavo.ids import BlockHash, Epoch, WorkerId
from octavo.index_schema import (
    LONGEST_PREFIX_SCRIPT,
    MEMBER_BYTES,
    WHOLE_MARK,
    IndexAnswer,
    claims_key,
    index_answer,
    index_key,
    index_member,
)
from octavo.records.fleet import WorkerInfo
from octavo.records.generate import IndexState
from octavo.redis_client import Command, NoScriptError, RedisClient, ResponseError

log = logging.getLogger("octavo.gateway")

_SCRIPT_SHA = sha1(LONGEST_PREFIX_SCRIPT.encode(), usedforsecurity=False).hexdigest()

WARM_UP_SECONDS = 2.0
"""For a probe to connect in; what is asked next must be answered within the budget."""

RECHECK_SECONDS = 1.0
"""From look to look of our own while the index is not EXACT though Redis answers."""

MAX_LATE = 64
"""Look-ups that may go on after their budget. Each of them ends by itself, and leaves an open connection behind for
the next one; those beyond are cancelled, which costs their connections."""

_UNANSWERED = TimeoutError("no answer within the budget")


@dataclass(frozen=True, slots=True)
class Hits:
    """What a look-up learned."""

    tokens: dict[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    """Leading tokens of the prompt that each worker holds, whole blocks only; workers without any are left out."""
    state: IndexState = IndexState.EXACT
    claimed: dict[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    """Leading tokens that each will hold, by what gateways have sent there; who has no more than above is left out."""


class PrefixLookup(Protocol):
    """Where to ask for prefix hits."""

    @property
    def state(self) -> IndexState:
        """Of the last look-up."""
        ...

    @property
    def failures(self) -> int:
        """Look-ups that were tried and learned nothing, since the start."""
        ...

    @property
    def claim_counts(self) -> ClaimCounts:
        """What was claimed."""
        ...

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        """How much of the prompt each worker holds.

        At least one token of the prompt is never counted, since it must be computed.
        """
        ...

    def claim(self, worker: WorkerInfo, blocks: Sequence[BlockHash]) -> None:
        """Say that a prompt was sent to a worker that has not published these blocks of it.

        Other gateways' look-ups count them as claimed for CLAIM_SECONDS. Returns at once, and never fails: a claim that
        is lost costs a hit.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Query:
    """The question to one worker: which of these members, from the first on, lie in its SET, and are claimed?"""

    worker: WorkerId
    epoch: Epoch
    members: bytes
    block_size: int

    def judged(self, reply: object) -> object:
        """The answer that a server gave to this question, or whatever else it said."""
        answer = index_answer(reply, len(self.members) // MEMBER_BYTES)
        return reply if answer is None else answer

    def command(self, name: str, script: str) -> Command:
        """EVALSHA with the script's digest, or EVAL with its text, which a server remembers from then on."""
        key, claims = index_key(self.worker, self.epoch), claims_key(self.worker, self.epoch)
        return Command(key, (name, script, 2, key, claims, self.members, WHOLE_MARK))


def _queries(prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> list[_Query]:
    """One question per worker, if there is any. Workers of equal pools have equal members, which are joined once."""
    members: dict[Blocks, bytes] = {}
    queries: list[_Query] = []
    for worker in workers:
        wanted = prompt.wanted(worker)
        if wanted not in members:
            members[wanted] = b"".join(map(index_member, wanted))
        if wanted:
            queries.append(_Query(worker.worker_id, worker.epoch, members[wanted], worker.pool.block_size))
    return queries


def _hits(queries: Iterable[_Query], replies: Iterable[object], state: IndexState) -> Hits:
    found = [(query, reply) for query, reply in zip(queries, replies, strict=True) if isinstance(reply, IndexAnswer)]
    return Hits(
        {query.worker: answer.held * query.block_size for query, answer in found if answer.held},
        state,
        {query.worker: answer.coming * query.block_size for query, answer in found if answer.coming > answer.held},
    )


class RedisLookup:
    """The fleet's index in Redis: one round trip a look-up, one script call per worker in it.

    Run `keep_checking` beside it.
    """

    def __init__(
        self,
        client: RedisClient,
        budget_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Ask through `client`, which is closed with this; nothing is connected yet."""
        self.state = IndexState.FALLBACK
        self.failures = 0
        self.breaker = Breaker()
        self._client = client
        self._claims = Claims(client)
        self._budget_seconds = budget_seconds
        self._clock = clock
        self._sleep = sleep
        self._told: IndexState | None = None
        """The state that the log was told last."""
        self._asking: set[asyncio.Task[None]] = set()
        self._unsettled = asyncio.Event()
        """Set while the state is not EXACT."""
        self._unsettled.set()

    @property
    def claim_counts(self) -> ClaimCounts:
        """See PrefixLookup."""
        return self._claims.counts

    async def close(self) -> None:
        """Forget what is still asked, and give the connections back."""
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking, timeout=WARM_UP_SECONDS)
        await self._claims.close()
        await self._client.close()

    # ---- requests --------------------------------------------------------------------------------------------

    async def hits(self, prompt: PromptBlocks, workers: Sequence[WorkerInfo]) -> Hits:
        """See PrefixLookup."""
        queries = _queries(prompt, workers)
        if not queries:
            return Hits(state=self.state)
        if not self.breaker.closed:
            return Hits(state=IndexState.FALLBACK)
        asked = self._clock()
        replies = await self._ask(queries, self._budget_seconds)
        state = _state_of(replies)
        self.failures += state is IndexState.FALLBACK
        if _answered(replies):
            self.breaker.succeeded()
        else:
            self.breaker.failed(asked, self._clock())
        self._tell(state, replies)
        return _hits(queries, replies, state)

    def claim(self, worker: WorkerInfo, blocks: Sequence[BlockHash]) -> None:
        """See PrefixLookup. While the breaker is open nobody would read it."""
        if self.breaker.closed:
            self._claims.add(worker, blocks)

    async def _ask(self, queries: Sequence[_Query], seconds: float) -> list[object]:
        """An IndexAnswer a query, or what came in its place, after `seconds` at most, whatever the client does."""
        replies: list[object] = [_UNANSWERED] * len(queries)
        asking = asyncio.create_task(self._exchange(queries, replies))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        timer = asyncio.ensure_future(self._sleep(seconds))
        try:
            await asyncio.wait({asking, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            if len(self._asking) > MAX_LATE:
                asking.cancel()
        # As they are now: an answer that comes later is not seen.
        return [query.judged(reply) for query, reply in zip(queries, replies, strict=True)]

    async def _exchange(self, queries: Sequence[_Query], replies: list[object]) -> None:
        await self._client.fill([query.command("EVALSHA", _SCRIPT_SHA) for query in queries], replies)
        untaught = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if untaught:  # servers that were started anew, or have never seen us
            commands = [queries[at].command("EVAL", LONGEST_PREFIX_SCRIPT) for at in untaught]
            for at, reply in zip(untaught, await self._client.execute(commands), strict=True):
                replies[at] = reply

    # ---- beside them -----------------------------------------------------------------------------------------

    async def keep_checking(self, fleet: Callable[[], Sequence[WorkerInfo]]) -> None:
        """While the index is not EXACT, see whether it has healed. Runs until cancelled."""
        while True:
            await self._unsettled.wait()
            due = self.breaker.probe_at
            await self._sleep(RECHECK_SECONDS if due is None else max(0.0, due - self._clock()))
            await self.check(fleet())

    async def check(self, workers: Sequence[WorkerInfo]) -> None:
        """Ask on our own account, whether these workers' copies are there and whole.

        While the breaker is open, does nothing before its pause is over; closes it when Redis answers within the
        budget again.
        """
        probing = self.breaker.probe(self._clock())
        if not (probing or self.breaker.closed):
            return
        replies = await self._probe(workers)
        if probing:
            self.breaker.probed(_answered(replies), self._clock())
        nobody = not workers and _answered(replies)
        self._tell(IndexState.EXACT if nobody else _state_of(replies), replies)

    async def _probe(self, workers: Sequence[WorkerInfo]) -> list[object]:
        """Ask with time to connect, then as requests do. Where there is no worker, about one that never was."""
        books = [(worker.worker_id, worker.epoch) for worker in workers] or [(WorkerId("nobody"), Epoch(0))]
        queries = [_Query(worker, epoch, b"", 1) for worker, epoch in books]
        replies = await self._ask(queries, WARM_UP_SECONDS)
        return await self._ask(queries, self._budget_seconds) if _answered(replies) else replies

    def _tell(self, state: IndexState, replies: Sequence[object]) -> None:
        """Take note of the state, and say so when it is the first or has changed.

        While the breaker is open it is FALLBACK, whatever one that asked before has still heard.
        """
        if not self.breaker.closed:
            state = IndexState.FALLBACK
        if state is IndexState.EXACT:
            self._unsettled.clear()
        else:
            self._unsettled.set()
        self.state = state
        if state is self._told:
            return
        before, self._told = self._told, state
        reason = next((f"{type(reply).__name__}: {reply}" for reply in replies if isinstance(reply, Exception)), "")
        level = logging.INFO if state is IndexState.EXACT else logging.WARNING
        log.log(
            level,
            "prefix_index_state",
            extra={
                "state": state.value,
                "before": before.value if before is not None else "unknown",
                "failures": self.failures,
                "reason": reason,
            },
        )


def _answered(replies: Sequence[object]) -> bool:
    """Whether any server said anything. An error about a key costs that key, and is an answer all the same."""
    return any(isinstance(reply, IndexAnswer | ResponseError) for reply in replies)


def _state_of(replies: Sequence[object]) -> IndexState:
    """What these answers are worth; see IndexState."""
    answers = [reply for reply in replies if isinstance(reply, IndexAnswer)]
    if not answers:
        return IndexState.FALLBACK
    whole = len(answers) == len(replies) and all(answer.whole for answer in answers)
    return IndexState.EXACT if whole else IndexState.DEGRADED
