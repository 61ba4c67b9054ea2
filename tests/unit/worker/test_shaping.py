"""Logits as requests shape them are those of transformers' processors, in transformers' order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.records.sampling import SamplingParams
from worker.core.step import Draw
from worker.model.sampler import sample
from worker.model.shaping import shape

VOCABULARY = 40
PLAIN = Draw(SamplingParams(), 0, 8)


def noise(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def draw(history: Sequence[int] = (), output_begins: int = 0, forbidden: Sequence[int] = (), **params: Any) -> Draw:
    return Draw(SamplingParams(**params), 0, len(history), tuple(history), output_begins, tuple(forbidden))


def shaped(logits: torch.Tensor, *draws: Draw) -> torch.Tensor:
    copy = logits.clone()
    shape(copy, draws)
    return copy


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)
biases = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-9, 9, width=32), min_size=1, max_size=4)
penalties = st.floats(0.5, 3.0, width=32)


@given(tokens, biases, penalties, st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5), st.integers(0, 99))
def test_biases_repetition_penalty_and_forbidden_stops_are_transformers(
    history: list[int], bias: dict[int, float], penalty: float, stops: set[int], seed: int
) -> None:
    logits = noise(1, seed=seed)
    theirs = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
            RepetitionPenaltyLogitsProcessor(penalty),
            MinNewTokensLengthLogitsProcessor(len(history), 3, sorted(stops)),
        ]
    )(torch.tensor([history]), logits.clone())
    ours = shaped(
        logits,
        draw(
            history,
            len(history),
            sorted(stops),
            repetition_penalty=penalty,
            logit_bias=tuple(sorted(bias.items())),
        ),
    )
    assert torch.equal(ours, theirs)


@given(tokens, tokens, st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
def test_presence_and_frequency_are_taken_for_the_output_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = noise(1)
    ours = shaped(
        logits,
        draw([*prompt, *output], len(prompt), presence_penalty=presence, frequency_penalty=frequency),
    )
    wanted = [
        value - (presence if token in output else 0) - frequency * output.count(token)
        for token, value in enumerate(logits[0].tolist())
    ]
    torch.testing.assert_close(ours[0], torch.tensor(wanted), atol=1e-5, rtol=1e-5)


def test_each_row_is_shaped_as_if_it_were_alone_and_a_plain_one_stays() -> None:
    draws = [
        draw([1, 2, 2], 1, repetition_penalty=1.3, frequency_penalty=0.5),
        PLAIN,
        draw([5, 5, 5, 7], 2, presence_penalty=1.0),
        draw([9], 1, forbidden=[3, 4]),
        draw(logit_bias=((6, 2.0), (7, -100.0))),
    ]
    logits = noise(5)
    together = shaped(logits, *draws)
    alone = torch.cat([shaped(logits[row : row + 1], own) for row, own in enumerate(draws)])
    assert torch.equal(together, alone)
    assert torch.equal(together[1], logits[1])


@pytest.mark.parametrize("vocabulary", [60, 2_000])
@given(
    temperature=st.floats(0.5, 2.0),
    top_k=st.sampled_from([0, 1, 5, 30]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.001, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 9),
)
def test_tokens_that_are_left_are_those_that_transformers_leaves(
    vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Temperature, top-k, top-p, min-p: drawn at both ends of (0, 1), the first and the last token left come out."""
    logits = noise(1, vocabulary, seed)
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    left = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits.clone())[0]
    kept = left.isfinite().nonzero()[:, 0].tolist()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = {
        sample(logits, [0], [Draw(replace(params, seed=seed), 0, position)])[0]
        for seed in range(3)
        for position in range(40)
    }
    assert drawn <= set(kept)
    if len(kept) <= 3:
        assert int(logits.argmax()) in drawn


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9])
def test_the_first_look_and_the_whole_sort_cut_alike(monkeypatch: pytest.MonkeyPatch, min_p: float) -> None:
    logits = noise(1, 2_000) * 0.3
    draws = [
        Draw(SamplingParams(temperature=1.0, min_p=min_p, top_k=top_k, top_p=top_p), 0, position)
        for position in range(60)
        for top_k in (0, 40, 700)
        for top_p in (0.5, 1.0)
    ]
    looked = sample(logits, [0] * len(draws), draws)
    monkeypatch.setattr("worker.model.sampler._CANDIDATES", 2_000)
    assert sample(logits, [0] * len(draws), draws) == looked


def test_a_forbidden_token_is_not_drawn_though_it_is_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert sample(logits, [0], [draw([0], 1, forbidden=[1])]) == [2]
