"""Every form of sampling on a real model: what is drawn, how likely it was, and what it leaves behind."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from octavo.records.sampling import SamplingParams
from octavo.records.serve import Submission, TokenLogprobs
from tests.support import tiny_model
from tests.support.engine_stack import SIZE, Stack, prompt, stack
from tests.support.oracle import log_softmax, solo_greedy
from tests.support.scheduling import submission

DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    temperature=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=5
)
LONG = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**{**tiny_model.SHAPE, "max_position_embeddings": 2 * LONG}, tie_word_embeddings=True)
    return tiny_model.save(config, tmp_path_factory.mktemp("models") / "tiny", seed=0)


async def test_four_samples_of_512_tokens_take_one_prefill_and_are_four_solo_runs(folder: Path):
    """Each solo run has the seed, and the number of the sample."""
    async with stack(folder, blocks=200, max_step_tokens=512) as serving:
        four = submission(1, prompt(1, LONG), 20, samples=4, sampling=DRAWN)
        await serving.serve(four)
        assert serving.worker.engine.counts.computed_tokens == LONG + 4 * 19
        solos = [replace(four, request=10 + sample, samples=1, first_sample=sample) for sample in range(4)]
        await serving.serve(*solos)
        for sample, solo in enumerate(solos):
            assert serving.text(four, sample) == serving.text(solo, sample)
        assert len({tuple(serving.text(four, sample)) for sample in range(4)}) == 4
        await serving.until_at_rest()


@pytest.mark.parametrize("cancelled", range(4))
async def test_cancel_of_any_sample_leaks_nothing_and_leaves_the_others_as_they_are(folder: Path, cancelled: int):
    """S14."""
    async with stack(folder, blocks=64) as serving:
        four = submission(1, prompt(1, 2 * SIZE + 5), 24, samples=4, sampling=DRAWN)
        whole = replace(four, request=2)
        await serving.serve(whole)
        await serving.gateway.submit(four)
        heard = serving.gateway.heard.of(1)
        while len(heard.tokens.get(cancelled, ())) < 3:
            await serving.gateway.hear()
        await serving.gateway.cancel(1, cancelled)
        while len(heard.reasons.keys() - {cancelled}) < 3:
            await serving.gateway.hear()
        for sample in {0, 1, 2, 3} - {cancelled}:
            assert serving.text(four, sample) == serving.text(whole, sample)
        assert serving.text(four, cancelled) == serving.text(whole, cancelled)[: len(serving.text(four, cancelled))]
        await serving.until_at_rest()


@pytest.mark.parametrize("blocks", [64, 2 + 5])
async def test_eight_samples_cancelled_after_three_tokens_are_all_gone(folder: Path, blocks: int):
    """S14: with room for all of them, and with blocks for five, so that their fork is refused whole."""
    async with stack(folder, blocks=blocks) as serving:
        eight = submission(1, prompt(1, SIZE + 5), 24, samples=8, sampling=DRAWN)
        beside = submission(2, prompt(2, 20), 6)
        await serving.gateway.submit(eight)
        while max(map(len, serving.gateway.heard.of(1).tokens.values()), default=0) < 3:
            await serving.gateway.hear()
        await serving.gateway.cancel(1)
        await serving.serve(beside)
        await serving.until_at_rest()
        serving.assert_greedy(beside)
        assert serving.worker.scheduler.load().waiting_sequences == 0


async def test_a_prompt_with_four_samples_is_counted_once_cold_and_warm(folder: Path):
    """S26: of ten blocks, nothing is cached at first, and then all but the last token's block; to the token, 159."""
    async with stack(folder, blocks=64) as serving:
        for number, cached in ((1, 0), (2, 10 * SIZE - 1)):
            four = submission(number, prompt(3, 10 * SIZE), 5, samples=4, sampling=DRAWN)
            await serving.serve(four)
            assert serving.gateway.heard.of(number).cached_tokens == cached
        load = serving.worker.scheduler.load()
        assert (load.prompt_tokens, load.cached_tokens) == (2 * 10 * SIZE, 10 * SIZE - 1)


async def test_greedy_texts_under_penalties_and_with_a_least_length_are_those_of_transformers(folder: Path):
    async with stack(folder, blocks=64) as serving:
        tokens = prompt(4, 25)
        plain = solo_greedy(folder, tokens, 30)
        stop = plain[3]
        bias = {plain[1]: -5.0, 7: 3.0}
        params = SamplingParams(repetition_penalty=1.3, logit_bias=tuple(sorted(bias.items())))
        wanted = submission(1, tokens, 30, sampling=params, stop_tokens=frozenset({stop}), min_tokens=12)
        await serving.serve(wanted)
        theirs = solo_greedy(
            folder,
            tokens,
            30,
            repetition_penalty=1.3,
            bias=params.logit_bias,
            min_new_tokens=12,
            eos_token_id=stop,
            pad_token_id=0,
        )
        assert serving.text(wanted) == (theirs[: theirs.index(stop)] if stop in theirs else theirs)
        assert len(serving.text(wanted)) >= 12
        assert serving.text(wanted) != plain


async def test_penalised_samples_are_the_same_whatever_the_pool_goes_through(folder: Path):
    """What was drawn before a preemption is output after it, too."""
    wanted = [
        submission(number, prompt(number, 20), 30, samples=2, sampling=PENALISED, min_tokens=5) for number in range(3)
    ]
    texts: list[list[list[int]]] = []
    for blocks in (64, 6):
        async with stack(folder, blocks=blocks) as serving:
            await serving.serve(*wanted)
            texts.append([serving.text(request, sample) for request in wanted for sample in range(2)])
    assert texts[0] == texts[1]


async def test_what_an_earlier_visit_drew_is_carried_on_with_the_very_same_tokens(folder: Path):
    async with stack(folder, blocks=64) as serving:
        stops = frozenset({5, 6, 7})
        whole = submission(1, prompt(6, 20), 30, sampling=PENALISED, min_tokens=20, stop_tokens=stops)
        await serving.serve(whole)
        text = serving.text(whole)
        carried = replace(whole, request=2, prompt=(*whole.prompt, *text[:11]), carried_tokens=11)
        await serving.serve(carried)
        assert [*text[:11], *serving.text(carried)] == text


async def test_logprobs_are_those_of_transformers_at_every_token(folder: Path):
    async with stack(folder, blocks=64) as serving:
        wanted = submission(1, prompt(7, 21), 20, samples=2, sampling=DRAWN, logprobs=3)
        await serving.serve(wanted)
        for sample in range(2):
            text = serving.text(wanted, sample)
            scores = log_softmax(folder, [*wanted.prompt, *text])[len(wanted.prompt) - 1 :]
            told = serving.gateway.heard.of(1).logprobs[sample]
            assert len(told) == len(text)
            for token, row, one in zip(text, scores, told, strict=False):
                assert one.logprob == pytest.approx(row[token].item(), abs=1e-3)
                assert one.top[0] == (int(row.argmax()), pytest.approx(row.max().item(), abs=1e-3))
                assert len(one.top) == 3


@pytest.mark.parametrize("chunk", [7, 16, 512])
async def test_a_warm_prompts_logprobs_are_those_of_a_cold_run_and_all_are_there(folder: Path, chunk: int):
    """S49, beside strangers, with samples, in chunks."""
    tokens = prompt(8, 5 * SIZE + 3)
    async with stack(folder, blocks=64, max_step_tokens=chunk) as serving:
        cold, warm = (submission(number, tokens, 4, prompt_logprobs=2) for number in (1, 2))
        await serving.serve(cold)
        await serving.serve(submission(3, tokens, 4))
        await serving.serve(replace(warm, samples=2), submission(4, prompt(9, 40), 20))
        assert serving.gateway.heard.of(3).cached_tokens == 5 * SIZE
        assert serving.gateway.heard.of(2).cached_tokens == 0
        scores = log_softmax(folder, tokens)
        for request in (cold, warm):
            assert_judged(serving, request, [row[token].item() for row, token in zip(scores, tokens[1:], strict=False)])
        await serving.until_at_rest()


def assert_judged(serving: Stack, request: Submission, wanted: list[float]) -> None:
    told: list[TokenLogprobs] = serving.gateway.heard.of(request.request).prompt_logprobs
    assert [one.logprob for one in told] == pytest.approx(wanted, abs=1e-3)
    assert all(len(one.top) == 2 and one.top[0][1] >= one.top[1][1] for one in told)
