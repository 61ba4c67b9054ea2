"""A fleet that has just started learns who holds what."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cluster import Client, greedy, prose, smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SYSTEM_TOKENS = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with smollm2(workers=2) as running:
        yield running


async def test_prompts_that_share_a_beginning_go_to_the_worker_that_holds_it(client: Client) -> None:
    """Six prompts behind one system prompt, then one that has nothing to do with them."""
    system = prose(0, SYSTEM_TOKENS)
    prompts = [system + prose(1000 + 30 * i, 20) for i in range(6)]

    first, *others = [await client.ask(prompt, max_tokens=4) for prompt in prompts]
    unrelated = await client.ask(prose(2000, 200), max_tokens=4)

    assert first.usage.cached_tokens == 0
    assert {other.usage.worker_id for other in others} == {first.usage.worker_id}
    assert all(other.usage.cached_tokens >= SYSTEM_TOKENS for other in others)
    assert all(other.started.predicted_cached_tokens == other.usage.cached_tokens for other in others)
    assert unrelated.usage.worker_id != first.usage.worker_id
    assert others[-1].tokens[0] == greedy(prompts[-1], 4)


async def test_the_gateway_counts_what_it_predicted_and_what_was_delivered(client: Client) -> None:
    before = (await client.fleet()).gateway
    prompt = prose(700, 100)
    for _ in range(2):
        await client.ask(prompt, max_tokens=2)

    after = (await client.fleet()).gateway

    assert after.requests - before.requests == 2
    assert after.delivered_cached_tokens - before.delivered_cached_tokens == 96
    assert after.predicted_cached_tokens - before.predicted_cached_tokens == 96
