"""Prompts that begin alike go to one worker, and what they share is computed once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cluster import Answer, Client, greedy, prose, smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SYSTEM_TOKENS = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with smollm2(workers=2) as running:
        yield running


def computed_tokens(answers: list[Answer]) -> int:
    """Prompt tokens that the fleet has put through the model."""
    return sum(answer.usage.prompt_tokens - answer.usage.cached_tokens for answer in answers)


def workers_used(answers: list[Answer]) -> set[str]:
    return {answer.usage.worker_id for answer in answers}


async def most_blocks_held(client: Client, answers: "asyncio.Task[list[Answer]]") -> int:
    """The most that the workers held together, as their books say while the answers come."""
    most = 0
    while not answers.done():
        most = max(most, sum(audit.held_blocks for audit in await client.audits()))
    return most


async def test_eight_requests_at_the_same_moment_compute_what_they_share_once(client: Client) -> None:
    """S37: 104 tokens each, of which 96 are shared: 160 are computed, in 14 blocks, at one worker."""
    prompts = [prose(0, 96) + prose(500 + 8 * i, 8) for i in range(8)]

    asking = asyncio.create_task(client.ask_together(prompts, max_tokens=8))
    held = await most_blocks_held(client, asking)
    answers = await asking

    assert computed_tokens(answers) == 160
    assert held == 14
    assert len(workers_used(answers)) == 1
    assert all(answer.started.predicted_cached_tokens == answer.usage.cached_tokens for answer in answers)
    assert [answers[i].tokens[0] for i in (0, 7)] == [greedy(prompts[i], 8) for i in (0, 7)]
    await client.at_rest()


async def test_sixty_four_requests_behind_one_cold_prefix_compute_it_once_for_each_worker_used(client: Client) -> None:
    """S37."""
    prompts = [prose(1000, 512) + prose(8 * i, 8) for i in range(64)]

    answers = await client.ask_together(prompts, max_tokens=2)

    assert computed_tokens(answers) == 512 * len(workers_used(answers)) + 64 * 8
    assert answers[-1].tokens[0] == greedy(prompts[-1], 2)
    await client.at_rest()


async def test_prompts_that_share_a_beginning_go_to_the_worker_that_holds_it(client: Client) -> None:
    """Six prompts behind one system prompt, then one that has nothing to do with them."""
    system = prose(1800, SYSTEM_TOKENS)
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
