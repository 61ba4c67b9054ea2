"""Prompts that begin alike and arrive at the same moment are computed once, at one worker. S37."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cluster import Answer, Client, greedy, prose, smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


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
    """104 tokens each, of which 96 are shared: 160 are computed, in 14 blocks, at one worker."""
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
    prompts = [prose(1000, 512) + prose(8 * i, 8) for i in range(64)]

    answers = await client.ask_together(prompts, max_tokens=2)

    assert computed_tokens(answers) == 512 * len(workers_used(answers)) + 64 * 8
    assert answers[-1].tokens[0] == greedy(prompts[-1], 2)
    await client.at_rest()
