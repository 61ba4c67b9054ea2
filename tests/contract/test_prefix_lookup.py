"""How much of a prompt each worker holds: in memory and in a real Redis."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.claims import ClaimCounts
from gateway.core.in_flight import PromptBlocks
from gateway.prefix_lookup import Hits, PrefixLookup, RedisLookup
from octavo.hashing import block_hashes
from octavo.ids import BlockHash
from octavo.index_schema import CLAIM_SECONDS, MAX_CLAIMS, WHOLE_MARK, claims_key, index_key, index_member
from octavo.records.fleet import PoolSpec, WorkerInfo
from octavo.records.generate import IndexState
from octavo.records.scope import PLAIN, Media, Scope
from octavo.redis_client import Command, RedisClient, open_client
from tests.support.fleets import pool, worker
from tests.support.memory_lookup import MemoryLookup
from tests.support.redis_server import RedisServer, redis_server

BLOCK = 16
PATIENT_SECONDS = 10.0
SALT = b"s" * 32


def plain(prompt: Sequence[int]) -> PromptBlocks:
    return PromptBlocks(prompt, PLAIN)


class Index(Protocol):
    """An implementation, and how a worker's blocks get into what it reads."""

    lookup: PrefixLookup

    async def publish(self, info: WorkerInfo, hashes: Iterable[BlockHash]) -> None: ...


class InMemory:
    def __init__(self) -> None:
        self.lookup = MemoryLookup()

    async def publish(self, info: WorkerInfo, hashes: Iterable[BlockHash]) -> None:
        self.lookup.publish(info.worker_id, info.epoch, hashes)


class InRedis:
    def __init__(self, server: RedisServer, budget_seconds: float = PATIENT_SECONDS) -> None:
        self.server = server
        self.lookup = RedisLookup(open_client(server.url), budget_seconds)

    async def publish(self, info: WorkerInfo, hashes: Iterable[BlockHash]) -> None:
        if members := [index_member(each) for each in hashes]:
            await self.server.client.sadd(index_key(info.worker_id, info.epoch), *members, WHOLE_MARK)


@asynccontextmanager
async def in_redis(budget_seconds: float = PATIENT_SECONDS) -> AsyncGenerator[InRedis]:
    async with redis_server() as server:
        index = InRedis(server, budget_seconds)
        try:
            yield index
        finally:
            await index.lookup.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def index(request: pytest.FixtureRequest) -> AsyncGenerator[Index]:
    if request.param == "memory":
        yield InMemory()
    else:
        async with in_redis() as real:
            yield real


def chain(tokens: Iterable[int], spec: PoolSpec | None = None, salt: bytes = b"") -> list[BlockHash]:
    """Hashes of the full blocks of a worker's sequence."""
    spec = spec or pool()
    return block_hashes(spec.chain_root(Scope(salt=salt)).hash(), list(tokens), spec.block_size)


async def test_each_worker_holds_its_own_leading_blocks(index: Index) -> None:
    """S40: 3, 7 and 5 blocks of the same prompt, and a worker that holds none."""
    prompt = range(10 * BLOCK + 3)
    fleet = {name: worker(name) for name in "abcd"}
    for name, blocks in {"a": 3, "b": 7, "c": 5}.items():
        await index.publish(fleet[name], chain(prompt)[:blocks])

    found = await index.lookup.hits(plain(tuple(prompt)), tuple(fleet.values()))

    assert found.tokens == {"a": 3 * BLOCK, "b": 7 * BLOCK, "c": 5 * BLOCK}


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_one_token_of_a_prompt_is_always_left_to_compute(index: Index, length: int) -> None:
    """S4, S5: everything is published, and a hit ends before the prompt's last token."""
    info = worker("a")
    await index.publish(info, chain(range(4 * BLOCK)))

    found = await index.lookup.hits(plain(tuple(range(length))), [info])

    assert found.tokens.get(info.worker_id, 0) == (length - 1) // BLOCK * BLOCK


async def test_a_prompt_that_leaves_the_chain_is_a_hit_up_to_there(index: Index) -> None:
    info = worker("a")
    await index.publish(info, chain(range(6 * BLOCK)))
    prompt = (*range(2 * BLOCK + 5), 9999, *range(2 * BLOCK + 6, 6 * BLOCK))

    assert (await index.lookup.hits(plain(prompt), [info])).tokens == {"a": 2 * BLOCK}


async def test_what_lies_behind_a_hole_does_not_count(index: Index) -> None:
    """S30: only an unbroken run from the first block on can be attached."""
    info = worker("a")
    hashes = chain(range(6 * BLOCK))
    await index.publish(info, hashes[:2] + hashes[3:])

    assert (await index.lookup.hits(plain(tuple(range(6 * BLOCK))), [info])).tokens == {"a": 2 * BLOCK}


async def test_long_prompts_are_followed_to_their_last_block(index: Index) -> None:
    info = worker("a")
    prompt = tuple(range(3000 * BLOCK))
    await index.publish(info, chain(prompt))

    assert (await index.lookup.hits(plain(prompt), [info])).tokens == {"a": 2999 * BLOCK}


async def test_neither_another_epoch_nor_another_scope_nor_another_pool_is_a_hit(index: Index) -> None:
    """S6, S44, S51."""
    prompt = tuple(range(4 * BLOCK))
    await index.publish(worker("a", epoch=1), chain(prompt))
    other_models = [
        worker("a", spec=pool(**{field: value}))
        for field, value in {
            "model_digest": b"M" * 32,
            "tokenizer_digest": b"T" * 32,
            "dtype": "bfloat16",
            "kv_dtype": "float8_e4m3fn",
            "block_size": 8,
            "adapter_digest": b"A" * 32,
        }.items()
    ]

    assert (await index.lookup.hits(plain(prompt), [worker("a", epoch=1)])).tokens == {"a": 3 * BLOCK}
    assert (await index.lookup.hits(plain(prompt), [worker("a", epoch=2)])).tokens == {}
    assert (await index.lookup.hits(PromptBlocks(prompt, Scope(salt=SALT)), [worker("a", epoch=1)])).tokens == {}
    assert [(await index.lookup.hits(plain(prompt), [info])).tokens for info in other_models] == [{}] * 6
    assert (await index.lookup.hits(plain(prompt), [worker("a", epoch=1, cache_epoch=1)])).tokens == {}, "it was reset"
    seen = Scope(media=(Media(3, SALT),))
    assert (await index.lookup.hits(PromptBlocks(prompt, seen), [worker("a", epoch=1)])).tokens == {}


async def test_workers_of_different_pools_are_asked_about_their_own_chains_at_once(index: Index) -> None:
    prompt = tuple(range(65))
    small = worker("small", spec=pool(block_size=8))
    large = worker("large", spec=pool(block_size=32))
    await index.publish(small, chain(prompt, small.pool)[:3])
    await index.publish(large, chain(prompt, large.pool))

    assert (await index.lookup.hits(plain(prompt), [small, large])).tokens == {"small": 24, "large": 64}


async def test_nobody_and_nothing_to_ask_about_are_no_failures(index: Index) -> None:
    assert (await index.lookup.hits(plain(tuple(range(100))), [])).tokens == {}
    assert (await index.lookup.hits(plain((1,)), [worker("a")])).tokens == {}
    assert index.lookup.failures == 0


async def claimed_at(index: Index, prompt: Sequence[int], info: WorkerInfo, tokens: int) -> Hits:
    """The answer once so many are claimed there: a claim is written behind its request."""
    blocks = plain(prompt)
    async with asyncio.timeout(PATIENT_SECONDS):
        while (found := await index.lookup.hits(blocks, [info])).claimed.get(info.worker_id, 0) != tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return found


async def test_what_was_sent_to_a_worker_is_claimed_behind_what_it_has_published(index: Index) -> None:
    """S37."""
    info, prompt = worker("a"), range(6 * BLOCK)
    await index.publish(info, chain(prompt)[:2])
    index.lookup.claim(info, chain(prompt)[2:5])

    found = await claimed_at(index, prompt, info, 5 * BLOCK)

    assert index.lookup.claim_counts == ClaimCounts(blocks=3)
    assert found.tokens == {"a": 2 * BLOCK}, "what is claimed is not held"
    fork = (*range(4 * BLOCK), *[999] * 2 * BLOCK)
    assert (await index.lookup.hits(plain(fork), [info])).claimed == {"a": 4 * BLOCK}
    await index.publish(info, chain(prompt)[2:5])
    assert (await index.lookup.hits(plain(prompt), [info])).claimed == {}, "it has come true"


async def test_a_claim_counts_for_its_worker_and_epoch_and_chain_only(index: Index) -> None:
    """S6, S9, S51."""
    info, prompt = worker("a"), range(4 * BLOCK)
    index.lookup.claim(info, chain(prompt))
    await claimed_at(index, prompt, info, 3 * BLOCK)

    others = [worker("b"), worker("a", epoch=2), worker("a", cache_epoch=1), worker("a", spec=pool(dtype="bfloat16"))]
    assert [(await index.lookup.hits(plain(prompt), [other])).claimed for other in others] == [{}] * 4
    assert (await index.lookup.hits(PromptBlocks(prompt, Scope(salt=SALT)), [info])).claimed == {}


async def test_a_claim_in_memory_ends_after_its_time() -> None:
    now = 0.0
    lookup, info, prompt = MemoryLookup(lambda: now), worker("a"), range(4 * BLOCK)
    lookup.claim(info, chain(prompt)[:2])
    now = CLAIM_SECONDS - 1.0
    lookup.claim(info, chain(prompt)[:1])
    assert (await lookup.hits(plain(prompt), [info])).claimed == {"a": 2 * BLOCK}
    now = CLAIM_SECONDS
    assert (await lookup.hits(plain(prompt), [info])).claimed == {"a": BLOCK}


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=80),
    st.lists(st.lists(st.integers(0, 2), max_size=80), max_size=4),
)
async def test_memory_finds_what_comparing_tokens_finds(prompt: list[int], written: list[list[int]]) -> None:
    spec = pool(block_size=4)
    info = worker("a", spec=spec)
    index = InMemory()
    for sequence in written:
        await index.publish(info, chain(sequence, spec))

    blocks = 0
    while 4 * (blocks + 1) < len(prompt) and any(
        sequence[: 4 * (blocks + 1)] == prompt[: 4 * (blocks + 1)] for sequence in written
    ):
        blocks += 1
    assert (await index.lookup.hits(plain(prompt), [info])).tokens.get(info.worker_id, 0) == 4 * blocks


# ---- what only Redis can do (what happens to its servers: test_redis_topologies.py) ---------------------------


@pytest.mark.redis
async def test_a_server_that_forgot_the_script_is_told_it_again() -> None:
    async with in_redis() as index:
        info = worker("a")
        prompt = tuple(range(3 * BLOCK))
        await index.publish(info, chain(prompt))
        await index.lookup.check([info])
        await index.server.client.script_flush()

        assert await index.lookup.hits(plain(prompt), [info]) == Hits({"a": 2 * BLOCK}, IndexState.EXACT)
        assert index.lookup.failures == 0


@pytest.mark.redis
async def test_a_wrong_value_costs_its_own_worker_only() -> None:
    """S47: one key holds something else."""
    async with in_redis() as index:
        good, bad = worker("good"), worker("bad")
        prompt = tuple(range(3 * BLOCK))
        await index.publish(good, chain(prompt))
        await index.server.client.set(index_key(bad.worker_id, bad.epoch), "not a set")

        assert await index.lookup.hits(plain(prompt), [bad, good]) == Hits({"good": 2 * BLOCK}, IndexState.DEGRADED)


@pytest.mark.redis
async def test_wrong_values_alone_open_no_breaker() -> None:
    """The server answers; another model's workers may be asked about next."""
    async with in_redis() as index:
        bad = worker("bad")
        await index.server.client.set(index_key(bad.worker_id, bad.epoch), "not a set")

        found = [await index.lookup.hits(plain(tuple(range(3 * BLOCK))), [bad]) for _ in range(5)]

        assert found == [Hits({}, IndexState.FALLBACK)] * 5
        assert index.lookup.breaker.closed


@pytest.mark.redis
async def test_claims_neither_fail_a_request_nor_change_what_the_index_is_worth() -> None:
    """Under their key lies something else; then Redis is away."""
    async with in_redis() as index:
        info, prompt = worker("a"), range(4 * BLOCK)
        await index.publish(info, chain(prompt)[:1])
        await index.server.client.set(claims_key(info.worker_id, info.epoch), "no claims")
        assert await index.lookup.hits(plain(prompt), [info]) == Hits({"a": BLOCK}, IndexState.EXACT)
        index.lookup.claim(info, chain(prompt))
        assert (await claimed_at(index, prompt, info, 3 * BLOCK)).state is IndexState.EXACT

        await index.server.stop()
        index.lookup.claim(info, chain(prompt))
        assert await index.lookup.hits(plain(prompt), [info]) == Hits({}, IndexState.FALLBACK)
        async with asyncio.timeout(PATIENT_SECONDS):
            while not index.lookup.claim_counts.failures:  # noqa: ASYNC110  # nobody is told but a scrape
                await asyncio.sleep(0.001)


@pytest.mark.redis
async def test_while_the_breaker_is_open_nothing_is_claimed() -> None:
    async with in_redis() as index:
        info, prompt = worker("a"), range(4 * BLOCK)
        await index.server.stop()
        while index.lookup.breaker.closed:
            await index.lookup.hits(plain(prompt), [info])
        index.lookup.claim(info, chain(prompt))
        assert index.lookup.claim_counts == ClaimCounts()


@pytest.mark.redis
async def test_more_claims_than_a_worker_may_have_are_left_out() -> None:
    async with in_redis() as index:
        info, prompt = worker("a", spec=pool(block_size=1)), range(MAX_CLAIMS + 100)
        index.lookup.claim(info, chain(prompt, info.pool))
        await claimed_at(index, prompt, info, MAX_CLAIMS)
        assert await index.server.client.zcard(claims_key(info.worker_id, info.epoch)) == MAX_CLAIMS


class Puppet(RedisClient):
    """Answers a look-up when the test says so."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Event] = []

    async def fill(self, commands: Sequence[Command], replies: list[object]) -> None:
        answer = asyncio.Event()
        self.answers.append(answer)
        await answer.wait()
        replies[:] = [[1, 1, 1]] * len(commands)

    async def close(self) -> None:
        pass


async def test_an_answer_that_comes_after_the_breaker_has_opened_leaves_it_to_the_probe() -> None:
    """Its request has it; but the state stays what it is, or nobody would look whether Redis is back."""
    client, now, over, patient = Puppet(), 0.0, asyncio.Event(), asyncio.Event()
    sleeps = iter([patient, over, over, over])
    lookup = RedisLookup(client, 1.0, clock=lambda: now, sleep=lambda _: next(sleeps).wait())
    info, prompt = worker("a"), range(3 * BLOCK)
    late = asyncio.create_task(lookup.hits(plain(prompt), [info]))
    while not client.answers:  # noqa: ASYNC110  # one turn of the loop
        await asyncio.sleep(0)
    over.set()
    for _ in range(3):
        now += 1.0
        await lookup.hits(plain(prompt), [info])
    assert not lookup.breaker.closed

    client.answers[0].set()

    assert await late == Hits({"a": BLOCK}, IndexState.EXACT)
    assert lookup.state is IndexState.FALLBACK
    assert lookup.breaker.probe_at is not None
    await lookup.close()


@pytest.mark.redis
async def test_a_gateway_without_workers_knows_whether_redis_answers() -> None:
    async with in_redis() as index:
        await index.lookup.check([])
        assert index.lookup.state is IndexState.EXACT
        await index.server.stop()
        await index.lookup.check([])
        assert index.lookup.state is IndexState.FALLBACK


@pytest.mark.redis
@pytest.mark.parametrize("there", [True, False], ids=["with Redis", "without Redis"])
async def test_what_a_gateway_finds_first_is_told_whatever_it_is_and_once(
    there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    async with in_redis() as index:
        if not there:
            await index.server.stop()
        for _ in range(2):
            await index.lookup.check([])

    told = [record.__dict__ for record in caplog.records if record.msg == "prefix_index_state"]
    assert [(each["before"], each["state"]) for each in told] == [("unknown", "exact" if there else "fallback")]
    assert bool(told[0]["reason"]) is not there


@pytest.mark.redis
async def test_the_index_is_looked_at_until_it_is_exact_without_any_request() -> None:
    """S43: as a gateway does beside its requests, under the clock of the machine."""
    async with in_redis() as index:
        info = worker("a")
        checking = asyncio.create_task(index.lookup.keep_checking(lambda: [info]))
        try:
            await index.publish(info, chain(range(3 * BLOCK)))
            async with asyncio.timeout(PATIENT_SECONDS):
                while index.lookup.state is not IndexState.EXACT:  # noqa: ASYNC110  # nobody is told but the log
                    await asyncio.sleep(0.01)
        finally:
            checking.cancel()
            await asyncio.wait({checking})
