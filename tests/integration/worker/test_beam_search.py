"""Beam search on a real model finds the texts of transformers' beam search, whatever the pool goes through."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from octavo.commands.model import fetch_model
from octavo.records.sampling import BeamSearch, SamplingParams
from octavo.records.serve import Submission
from tests.support import tiny_model
from tests.support.engine_stack import SIZE, Stack, prompt, stack
from tests.support.oracle import log_softmax, solo_beams
from tests.support.scheduling import submission

STOP = tiny_model.EOS_TOKEN
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def search(number: int, tokens: list[int], beam: BeamSearch, stop: int = STOP, **fields: Any) -> Submission:
    return submission(number, tokens, COUNT, beam=beam, samples=beam.width, stop_tokens=frozenset({stop}), **fields)


def assert_found(serving: Stack, request: Submission, **generation: Any) -> None:
    assert request.beam is not None
    (stop,) = request.stop_tokens
    theirs = solo_beams(
        serving.folder,
        request.prompt,
        request.max_tokens,
        width=request.beam.width,
        samples=request.samples,
        stop=stop,
        length_penalty=request.beam.length_penalty,
        early_stopping="never" if request.beam.exhaustive else request.beam.early_stopping,
        **generation,
    )
    heard = serving.gateway.heard.of(request.request)
    assert [heard.tokens.get(sample, []) for sample in range(request.samples)] == theirs


@pytest.mark.parametrize(
    ("length_penalty", "ends"),
    [
        (1.0, {}),
        (1.0, {"early_stopping": True}),
        (0.0, {}),
        (2.0, {"early_stopping": True}),
        (1.0, {"exhaustive": True}),
        (-1.0, {"exhaustive": True}),
    ],
)
async def test_four_beams_find_what_transformers_finds(folder: Path, length_penalty: float, ends: dict[str, bool]):
    """With the model's own end, and with one that comes often."""
    beam = BeamSearch(width=4, length_penalty=length_penalty, **ends)
    async with stack(folder, blocks=64) as serving:
        plain = search(1, prompt(1, SIZE + 5), beam)
        await serving.serve(plain)
        assert_found(serving, plain)
        often = serving.text(plain)[2]
        ending = [search(number, prompt(number, SIZE + number), beam, often) for number in range(2, 5)]
        await serving.serve(*ending, submission(9, prompt(9, 30), 20))
        for request in ending:
            assert_found(serving, request)
        serving.assert_greedy(submission(9, prompt(9, 30), 20))
        await serving.until_at_rest()


@pytest.mark.parametrize(("blocks", "max_step_tokens"), [(5, 64), (7, 64), (64, 3)])
async def test_a_search_in_a_pool_for_one_beam_or_in_steps_of_three_tokens_finds_the_same(
    folder: Path, blocks: int, max_step_tokens: int
):
    """S18: its beams are sent back, rest, and come again, each by itself."""
    async with stack(folder, blocks=blocks, max_step_tokens=max_step_tokens) as serving:
        request = search(1, prompt(4, 2 * SIZE + 5), BeamSearch(width=4))
        await serving.serve(request, submission(2, prompt(2, 20), 20))
        assert_found(serving, request)
        serving.assert_greedy(submission(2, prompt(2, 20), 20))
        await serving.until_at_rest()


async def test_a_manager_that_dies_in_mid_search_changes_no_text(folder: Path):
    async with stack(folder, blocks=64) as serving:
        request = search(1, prompt(5, 30), BeamSearch(width=4))
        beside = submission(2, prompt(6, 30), 60)
        for one in (beside, request):
            await serving.gateway.submit(one)
        while len(serving.gateway.heard.of(2).tokens.get(0, ())) < 8:
            await serving.gateway.hear()
        await serving.manager.kill()
        await serving.manager.start()
        await serving.gateway.until_ended(request, beside)
        assert_found(serving, request)
        serving.assert_greedy(beside)
        await serving.until_at_rest()


async def test_a_search_under_penalties_and_a_least_length_is_that_of_transformers(folder: Path):
    """Penalties are about each beam's own output, and are put on logarithms of probabilities."""
    async with stack(folder, blocks=64) as serving:
        params = SamplingParams(repetition_penalty=1.3)
        request = search(1, prompt(7, 20), BeamSearch(width=3), sampling=params, min_tokens=10)
        await serving.serve(request)
        assert_found(serving, request, repetition_penalty=1.3, min_new_tokens=10)


@pytest.mark.parametrize("bias", [0.0, 1.5])
async def test_a_beam_tells_its_score_which_is_how_likely_it_is_where_nothing_shapes_it(folder: Path, bias: float):
    """A bias is added to the logarithm of a probability, and the sum is not normalised again."""
    biases = dict.fromkeys(range(0, 100, 2), bias)
    async with stack(folder, blocks=64) as serving:
        params = SamplingParams(logit_bias=tuple(biases.items()) if bias else ())
        request = search(1, prompt(8, 20), BeamSearch(width=2), sampling=params)
        await serving.serve(request)
        heard = serving.gateway.heard.of(1)
        for sample in range(2):
            text = [*request.prompt, *heard.tokens[sample]]
            scores = log_softmax(folder, text)[len(request.prompt) - 1 :]
            total = math.fsum(
                row[token].item() + biases.get(token, 0.0)
                for row, token in zip(scores, heard.tokens[sample], strict=False)
            )
            if len(heard.tokens[sample]) < COUNT:
                total += scores[-1][STOP].item() + biases.get(STOP, 0.0)
            assert heard.cumulative[sample] == pytest.approx(total, abs=1e-3)


async def test_a_search_that_is_cancelled_leaves_nothing(folder: Path):
    async with stack(folder, blocks=64) as serving:
        beside = submission(2, prompt(6, 30), 40)
        await serving.gateway.submit(search(1, prompt(5, 30), BeamSearch(width=4)))
        await serving.gateway.submit(beside)
        while len(serving.gateway.heard.of(2).tokens.get(0, ())) < 5:
            await serving.gateway.hear()
        await serving.gateway.cancel(1)
        await serving.gateway.until_ended(beside)
        assert serving.gateway.heard.of(1).tokens == {}
        await serving.until_at_rest()


@pytest.mark.model
async def test_four_beams_of_smollm2_are_those_of_transformers():
    smollm2 = fetch_model("smollm2")
    question = "<|im_start|>user\nWhy do printers fold a sheet into sixteen pages?<|im_end|>\n<|im_start|>assistant\n"
    tokens = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(question).ids
    async with stack(smollm2, blocks=40) as serving:
        request = replace(search(1, tokens, BeamSearch(width=4)), max_tokens=10)
        await serving.serve(request)
        assert_found(serving, request)
        await serving.until_at_rest()
