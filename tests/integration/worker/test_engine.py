"""A real model behind the worker: greedy texts are those of plain transformers, whatever the pool goes through."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.records.sampling import SamplingParams
from octavo.records.serve import FinishReason
from tests.support import tiny_model
from tests.support.engine_stack import SIZE, prompt, stack
from tests.support.oracle import solo_greedy
from tests.support.scheduling import submission

GREEDY = SamplingParams()
FOUR = SamplingParams(temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


async def test_a_hit_a_batch_with_strangers_and_a_chunked_prefill_say_what_a_cold_run_says(folder: Path):
    """S1: 5 blocks and 3 tokens; cached 0, 5 blocks, 5 blocks."""
    async with stack(folder, blocks=256, max_step_tokens=32) as serving:
        tokens = prompt(0, 5 * SIZE + 3)
        cold, warm, among = (submission(number, tokens, 64) for number in range(3))
        strangers = [submission(10 + number, prompt(10 + number, 20 + number), 40) for number in range(7)]
        await serving.serve(cold)
        await serving.serve(warm)
        await serving.serve(among, *strangers)
        serving.assert_greedy(cold, warm, among, *strangers)
        cached = [serving.gateway.heard.of(request.request).cached_tokens for request in (cold, warm, among)]
        assert cached == [0, 5 * SIZE, 5 * SIZE]
        await serving.until_at_rest()


@pytest.mark.parametrize("min_copy_tokens", [0, 4])
@pytest.mark.parametrize("size", [16, 64, 256])
async def test_a_copied_part_of_a_block_changes_no_text(folder: Path, size: int, min_copy_tokens: int):
    """S7: a prompt that shares three quarters of a block, alone and among strangers, with copies of parts and without.

    Then a chat turn: the first answer goes on otherwise than the model did.
    """
    async with stack(folder, blocks=512 // size + 6, size=size, min_copy_tokens=min_copy_tokens) as serving:
        part = size * 3 // 4
        first = submission(1, prompt(1, size + 3), 40)
        shares = [submission(number, [*first.prompt[:part], *prompt(number, 20)], 30) for number in (2, 3)]
        await serving.serve(first)
        await serving.serve(shares[0])
        await serving.serve(shares[1], submission(4, prompt(4, 30), 20))
        turn = submission(5, [*first.prompt, *serving.text(first)[:10], *prompt(5, 12)], 30)
        await serving.serve(turn)
        serving.assert_greedy(first, *shares, turn)
        cached = [serving.gateway.heard.of(request.request).cached_tokens for request in shares]
        assert cached == [part if min_copy_tokens else 0] * 2
        answered = 13 if min_copy_tokens and size == 16 else 0  # of a longer block the answer fills too little
        assert serving.gateway.heard.of(5).cached_tokens == size + answered
        await serving.until_at_rest()


async def test_preemption_changes_no_text(folder: Path):
    """S18, S19 and S23 with a real model: six requests on a pool that holds two."""
    async with stack(folder, blocks=12) as serving:
        wanted = [submission(number, prompt(number, 2 * SIZE + number), 3 * SIZE) for number in range(6)]
        await serving.serve(*wanted)
        serving.assert_greedy(*wanted)
        load = serving.worker.scheduler.load()
        assert load.preemptions > 0
        assert (load.cached_tokens, load.prompt_tokens) == (0, sum(len(request.prompt) for request in wanted))
        await serving.until_at_rest()


async def test_two_that_each_need_most_of_the_pool_both_end(folder: Path):
    """S23: 6 of 10 blocks each, of which a prompt of 3 comes first; neither waits with what the other needs."""
    async with stack(folder, blocks=10) as serving:
        wanted = [submission(number, prompt(number, 3 * SIZE), 3 * SIZE) for number in range(2)]
        await serving.serve(*wanted)
        serving.assert_greedy(*wanted)
        assert serving.worker.scheduler.load().preemptions > 0
        await serving.until_at_rest()


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_request_of_high_priority_starts_within_two_steps_and_changes_no_text(folder: Path, overlap: bool):
    """S21: all places are taken by low ones, of which one is preempted, once.

    This model's steps are shorter than an exchange; so where they overlap, some run while the manager is still asked.
    """
    async with stack(folder, blocks=64, max_running=3, overlap=overlap) as serving:
        low = [submission(number, prompt(number, SIZE + number), 60) for number in range(3)]
        high = submission(9, prompt(9, SIZE), 4, priority=1)
        for request in low:
            await serving.gateway.submit(request)
        while len(serving.gateway.heard.of(2).tokens.get(0, [])) < 3:
            await serving.gateway.hear()
        outbox, begun = serving.worker.engine.open_outbox(), serving.worker.engine.counts.steps
        serving.worker.engine.submit(outbox, high)
        async for report in outbox.reports():
            serving.gateway.heard.hear(report)
            if report.finished:
                break
        at = next(at for at, plan in enumerate(serving.plans) if high.prompt in [chunk.tokens for chunk in plan.chunks])
        assert overlap or at - begun < 2
        await serving.gateway.until_ended(*low)
        serving.assert_greedy(*low, high)
        assert serving.worker.scheduler.load().preemptions == 1
        await serving.until_at_rest()


@pytest.mark.parametrize("blocks", [64, 7])
async def test_forked_samples_are_four_runs_and_the_first_may_end_before_the_others(folder: Path, blocks: int):
    """S10, S28: a prompt of two blocks and 5, and four samples; with 7 blocks there is no room for the forks."""
    async with stack(folder, blocks=blocks) as serving:
        tokens = prompt(1, 2 * SIZE + 5)
        greedy, sampled = (submission(n, tokens, 30, samples=4, sampling=how) for n, how in ((1, GREEDY), (2, FOUR)))
        await serving.serve(greedy)
        await serving.serve(sampled)
        for sample in range(4):
            assert serving.text(greedy, sample) == solo_greedy(serving.folder, tokens, 30)
        first, *others = (serving.text(sampled, sample) for sample in range(4))
        stop = next(token for token in first if not any(token in other for other in others))
        shortened = submission(3, tokens, 30, samples=4, sampling=FOUR, stop_tokens=frozenset({stop}))
        await serving.serve(shortened)
        assert serving.gateway.heard.of(3).tokens.get(0, []) == first[: first.index(stop)]
        assert [serving.text(shortened, sample) for sample in (1, 2, 3)] == others
        await serving.until_at_rest()


async def test_a_fork_that_does_not_fit_happens_for_nobody_and_changes_no_text(folder: Path):
    """S28: five children, and blocks for three of them; they wait, each as a sequence of its own."""
    wanted = submission(1, prompt(1, SIZE + 5), 8, samples=6, sampling=FOUR)
    texts: list[list[list[int]]] = []
    for blocks, together in ((64, 6), (2 + 3, 1)):
        async with stack(folder, blocks=blocks) as serving:
            await serving.serve(wanted)
            texts.append([serving.text(wanted, sample) for sample in range(6)])
            assert len(serving.plans[1].chunks) == together
            await serving.until_at_rest()
    assert texts[0] == texts[1]


async def test_samples_are_the_same_in_a_large_and_in_a_small_pool(folder: Path):
    """Randomness is a function of (seed, sample, position): preemption and refused forks change nothing."""
    wanted = [submission(number, prompt(number, 20), 25, samples=3, sampling=FOUR) for number in range(3)]
    texts: list[list[Sequence[int]]] = []
    for blocks in (64, 6):
        async with stack(folder, blocks=blocks) as serving:
            await serving.serve(*wanted)
            texts.append([serving.text(request, sample) for request in wanted for sample in range(3)])
    assert texts[0] == texts[1]


async def test_a_stop_token_ends_a_text_and_a_prompt_that_goes_on_from_there_is_right(folder: Path):
    """S2: a stop in mid-block; then prompt, returned text and one word more equal a cold run."""
    async with stack(folder, blocks=64) as serving:
        tokens = prompt(3, SIZE + 3)
        whole = solo_greedy(folder, tokens, 40)
        stop = next(token for at, token in enumerate(whole) if at > SIZE and whole.index(token) == at)
        stopped = submission(1, tokens, 40, stop_tokens=frozenset({stop}))
        await serving.serve(stopped)
        assert serving.text(stopped) == whole[: whole.index(stop)]
        assert serving.gateway.heard.of(1).reasons == {0: FinishReason.STOP}
        further = submission(2, [*tokens, *serving.text(stopped), 77], 20)
        await serving.serve(further)
        serving.assert_greedy(further)
        heard = serving.gateway.heard.of(2)
        assert heard.cached_tokens == (len(tokens) + whole.index(stop)) // SIZE * SIZE


async def test_eviction_takes_a_chain_from_its_tail_and_the_rest_is_still_a_hit(folder: Path):
    """S30: a chain of 20 blocks, then a stranger who needs more than is free; what is left counts up to the hole."""
    async with stack(folder, blocks=24) as serving:
        chain = submission(1, prompt(1, 20 * SIZE + 1), 1)
        await serving.serve(chain)
        await serving.until_at_rest()
        await serving.serve(submission(2, prompt(2, 9 * SIZE), 1))
        await serving.until_at_rest()
        again = submission(3, chain.prompt, 8)
        await serving.serve(again)
        serving.assert_greedy(again)
        evicted = 9 - (24 - 20)
        assert serving.gateway.heard.of(3).cached_tokens == (20 - evicted) * SIZE


async def test_a_manager_that_dies_in_mid_text_changes_no_text(folder: Path):
    async with stack(folder, blocks=64) as serving:
        wanted = [submission(number, prompt(number, 30), 60) for number in range(4)]
        for request in wanted:
            await serving.gateway.submit(request)
        await serving.gateway.hear()
        await serving.manager.kill()
        await serving.manager.start()
        await serving.gateway.until_ended(*wanted)
        serving.assert_greedy(*wanted)
        await serving.until_at_rest()
