"""Whatever befalls Redis, requests are answered right, what the index is worth is told, and it heals by itself.

A gateway and a cache manager that are processes of their own, a real Redis behind a proxy, and real workers whose model
is a function of the whole history that it reads back through the block table.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count

import pytest
import pytest_asyncio

from deploy.process import LOOPBACK, Process
from gateway.client import AsyncClient, GatewayLoad
from gateway.core.events import Usage
from gateway.core.request import Generation, TokenPrompt
from octavo.ids import WorkerId
from octavo.records.generate import IndexState
from tests.support import words
from tests.support.fakes import FunctionRunner, solo_text
from tests.support.gateway_process import gateway_process, index_state, scrape_of, until_ready
from tests.support.gateway_service import words_pool
from tests.support.manager_service import manager_process, until
from tests.support.redis_server import RedisServer, redis_server
from tests.support.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.worker_service import worker_service
from worker.cache_client import AttendClient

pytestmark = [pytest.mark.cluster, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

BLOCK, PROMPT, OUTPUT = 16, 100, 4
HELD = PROMPT // BLOCK * BLOCK
"""Tokens of a prompt that a second one finds in whole blocks."""
AT_ONCE = 4
FIRST_WORD = len(words.SPECIAL_TOKENS)
LOOKUPS_UNTIL_OPEN = 3
"""In a row that learn nothing, until nobody asks any more."""


@dataclass
class Fleet:
    """What is sick, what must not mind, and prompts that nobody has sent before."""

    redis: RedisServer
    proxy: TcpProxy
    gateway: Process
    client: AsyncClient
    _numbers: "count[int]" = field(default_factory=count)

    def new_prompts(self) -> list[tuple[int, ...]]:
        return [self._prompt(next(self._numbers)) for _ in range(AT_ONCE)]

    @staticmethod
    def _prompt(number: int) -> tuple[int, ...]:
        span = words.VOCAB_SIZE - FIRST_WORD
        return tuple(FIRST_WORD + (number * 31 + at * (number + 1)) % span for at in range(PROMPT))

    async def ask(self, prompts: Sequence[tuple[int, ...]]) -> list[Usage]:
        """All at once; each must be answered as if it were alone."""
        asked = [Generation(prompt=TokenPrompt(prompt), max_tokens=OUTPUT, ignore_eos=True) for prompt in prompts]
        answers = await asyncio.gather(*(self.client.complete(request) for request in asked))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.samples[0].token_ids) == solo_text(prompt, OUTPUT, vocab_size=words.VOCAB_SIZE)
        return [answer.usage for answer in answers]

    async def load(self) -> GatewayLoad:
        return (await self.client.fleet()).gateway

    async def until_told(self, state: IndexState) -> None:
        """Requests go on until the gateway says that the index is so."""
        async with asyncio.timeout(60):
            while (await self.load()).index_state is not state:
                await self.ask(self.new_prompts())
        assert index_state(await scrape_of(self.gateway)) == state.value

    async def is_whole(self, prompts: Sequence[tuple[int, ...]]) -> bool:
        """Whether the index says of all these prompts where they are, and it is true."""
        usages = await self.ask(prompts)
        assert all(usage.cached_tokens >= usage.predicted_cached_tokens for usage in usages)
        exact = (await self.load()).index_state is IndexState.EXACT
        return exact and all(usage.predicted_cached_tokens == HELD for usage in usages)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    model = words.save_model(tmp_path_factory.mktemp("model") / "words")
    digest = sha256((model / "tokenizer.json").read_bytes()).digest()
    pool = words_pool(block_size=BLOCK, num_blocks=4096, tokenizer_digest=digest)
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server())
        proxy = await stack.enter_async_context(tcp_proxy(redis.port))
        url = f"redis://{LOOPBACK}:{proxy.port}/0"
        manager = manager_process(redis_url=url, lease_seconds=2)
        stack.push_async_callback(manager.kill)
        await manager.start()
        await manager.serving()
        for number in range(2):
            client = AttendClient(manager.address, deadline_seconds=30)
            runner = FunctionRunner(pool)
            await stack.enter_async_context(
                worker_service(pool, runner, client, worker_id=WorkerId(f"worker-{number}"), max_step_tokens=1024)
            )
        settings = {"OCTAVO_METRICS_LISTEN": f"{LOOPBACK}:0", "OCTAVO_LOOKUP_SECONDS": "0.3"}
        gateway = await stack.enter_async_context(gateway_process(manager.address, url, model, **settings))
        await until_ready(gateway)
        asks = await stack.enter_async_context(AsyncClient(gateway.address))
        yield Fleet(redis, proxy, gateway, asks)


async def stop(fleet: Fleet) -> None:
    await fleet.redis.stop()


async def start(fleet: Fleet) -> None:
    await fleet.redis.start()


async def freeze(fleet: Fleet) -> None:
    fleet.redis.process.freeze()


async def thaw(fleet: Fleet) -> None:
    fleet.redis.process.thaw()


async def slow_down(fleet: Fleet) -> None:
    fleet.proxy.delay = 2.0


async def speed_up(fleet: Fleet) -> None:
    fleet.proxy.delay = 0.0


async def fill(fleet: Fleet) -> None:
    await fleet.redis.client.config_set("maxmemory", 1)


async def make_room(fleet: Fleet) -> None:
    await fleet.redis.client.config_set("maxmemory", 0)


async def wipe(fleet: Fleet) -> None:
    await fleet.redis.client.flushall()


async def corrupt(fleet: Fleet) -> None:
    client = fleet.redis.client
    one, _ = [key for key in await client.keys("*") if await client.type(key) == b"set"]
    await client.set(one, "nonsense")


Doing = Callable[[Fleet], Awaitable[None]]


@pytest.mark.parametrize(
    ("break_it", "mend_it", "told"),
    [
        pytest.param(stop, start, IndexState.FALLBACK, id="stopped"),
        pytest.param(freeze, thaw, IndexState.FALLBACK, id="frozen"),
        pytest.param(slow_down, speed_up, IndexState.FALLBACK, id="slow"),
        pytest.param(fill, make_room, IndexState.DEGRADED, id="full"),
    ],
)
async def test_a_sick_redis_fails_no_request_and_the_index_is_whole_again_when_it_is_well(
    fleet: Fleet, break_it: Doing, mend_it: Doing, told: IndexState
) -> None:
    """S43, S47. Whoever learns nothing has waited for a look-up's budget; after three of those, nobody waits for it."""
    before, during = fleet.new_prompts(), fleet.new_prompts()
    await fleet.ask(before)
    await until(lambda: fleet.is_whole(before))

    await break_it(fleet)
    try:
        await fleet.until_told(told)
        for prompt in before[:LOOKUPS_UNTIL_OPEN]:
            await fleet.ask([prompt])
        failed = (await fleet.load()).failed_lookups
        await fleet.ask([*before, *during])
        assert (await fleet.load()).failed_lookups == failed
    finally:
        await mend_it(fleet)

    await until(lambda: fleet.is_whole([*before, *during]))


@pytest.mark.parametrize("damage", [pytest.param(wipe, id="wiped"), pytest.param(corrupt, id="of the wrong type")])
async def test_damaged_copies_are_made_anew_while_requests_run(fleet: Fleet, damage: Doing) -> None:
    """S43, S47. Redis answers, so this is seen by what it says; nobody who looks for hits is told that all is well."""
    before = fleet.new_prompts()
    await fleet.ask(before)
    await until(lambda: fleet.is_whole(before))
    known = len(fleet.gateway.events("prefix_index_state"))

    def told() -> list[str]:
        return [event["state"] for event in fleet.gateway.events("prefix_index_state")[known:]]

    while IndexState.DEGRADED.value not in told():  # else its manager was there before the first request
        await damage(fleet)
        await fleet.ask([*before, *fleet.new_prompts()])
    await until(lambda: fleet.is_whole(before))
    assert told()[-1] == IndexState.EXACT.value
