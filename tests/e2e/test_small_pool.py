"""A pool that is too small for what is asked, and steps too short for a prompt."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from tests.support.cluster import BLOCK, BLOCK_BYTES, Client, greedy, prose, smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

BLOCKS = 16
STEP_TOKENS = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with smollm2(workers=1, KV_MEMORY=str(BLOCKS * BLOCK_BYTES), MAX_STEP_TOKENS=str(STEP_TOKENS)) as running:
        [worker] = (await running.fleet()).workers
        assert worker.pool.num_blocks == BLOCKS
        yield running


async def test_a_prompt_that_takes_several_steps_is_answered_right(client: Client) -> None:
    prompt = prose(0, 5 * STEP_TOKENS + 7)

    cold = await client.ask(prompt, max_tokens=12)
    warm = await client.ask(prompt, max_tokens=12)

    assert cold.tokens == warm.tokens == [greedy(prompt, 12)]
    assert warm.usage.cached_tokens == len(prompt) - 1  # the end from a copy of the block that the first answer filled


async def test_a_preempted_sequence_resumes_with_the_tokens_it_would_have_had(client: Client) -> None:
    """S18: three requests of 6 blocks in a pool of 16, let in while each has 4."""
    prompts = [prose(300 * i, 60) for i in range(1, 4)]
    before = await client.preemptions()

    answers = await client.ask_together(prompts, max_tokens=26)

    assert [answer.tokens[0] for answer in answers] == [greedy(prompt, 26) for prompt in prompts]
    assert await client.preemptions() > before
    await client.at_rest()


async def test_samples_that_do_not_fit_together_are_all_finished(client: Client) -> None:
    """Four samples of 11 blocks each, of which 8 are shared: 20 in a pool of 16."""
    prompt = prose(1300, 8 * BLOCK + 3)

    answer = await client.ask(prompt, max_tokens=40, n=4)

    assert answer.tokens == [greedy(prompt, 40)] * 4
    await client.at_rest()


async def test_what_can_never_fit_is_refused_at_once_and_others_are_served(client: Client) -> None:
    """S22: N blocks fit, N + 1 do not."""
    prompt, room = prose(1500, 230), BLOCKS * BLOCK
    before = await client.at_rest()

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.ask(prompt, max_tokens=room - 230 + 1)
    whole, small = await asyncio.gather(
        client.ask(prompt, max_tokens=room - 230), client.ask(prose(1700, 20), max_tokens=4)
    )

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for number in (230, room - 230 + 1, room + 1, room):
        assert str(number) in str(refused.value.details())
    assert len(whole.tokens[0]) == room - 230
    assert small.tokens[0] == greedy(prose(1700, 20), 4)
    assert (await client.at_rest()).num_blocks == before.num_blocks


async def test_a_request_that_needs_the_whole_pool_hits_its_own_prefix(client: Client) -> None:
    """S5, where the pool has exactly the blocks that the request needs."""
    prompt = prose(2000, (BLOCKS - 1) * BLOCK)

    cold = await client.ask(prompt, max_tokens=BLOCK)
    warm = await client.ask(prompt, max_tokens=BLOCK)

    assert [answer.usage.cached_tokens for answer in (cold, warm)] == [0, len(prompt) - 1]
    assert cold.tokens == warm.tokens == [greedy(prompt, BLOCK)]


async def test_a_crowd_that_fits_by_turns_is_served_to_the_last(client: Client) -> None:
    """S24: nothing waits for ever, and nothing is held in the end."""
    prompts = [prose(80 * i, 10 + 17 * (i % 5)) for i in range(10)]

    answers = await client.ask_together(prompts, max_tokens=6)

    assert [answer.tokens[0] for answer in answers] == [greedy(prompt, 6) for prompt in prompts]
    await client.at_rest()
