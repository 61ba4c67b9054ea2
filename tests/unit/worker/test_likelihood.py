"""Logprobs are the log-softmax of a row of logits as it is."""

import math

import pytest
import torch

from octavo.ids import BlockId, SequenceId
from octavo.records.sampling import SamplingParams
from octavo.records.serve import TokenLogprobs
from worker.core.step import Chunk, Draw
from worker.model.likelihood import logprobs
from worker.model.outcome import logit_rows, outcome


def noise(rows: int, vocabulary: int = 30) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def expected(row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    scores = row.double().log_softmax(-1)
    likeliest = scores.argsort(descending=True)[:top].tolist()
    return TokenLogprobs(scores[token].item(), tuple((at, scores[at].item()) for at in likeliest))


def assert_close(told: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert [token for token, _ in told.top] == [token for token, _ in wanted.top]
    ours = [told.logprob, *(value for _, value in told.top)]
    assert ours == pytest.approx([wanted.logprob, *(value for _, value in wanted.top)], abs=1e-5)


def test_each_token_is_told_with_as_many_of_the_likeliest_as_were_asked() -> None:
    logits = noise(150)
    rows, tokens, tops = list(range(150)), [at % 30 for at in range(150)], [at % 4 for at in range(150)]
    told = logprobs(logits, rows, tokens, tops)
    for row, token, top, one in zip(rows, tokens, tops, told, strict=True):
        assert_close(one, expected(logits[row], token, top))


def test_no_more_are_listed_than_there_are() -> None:
    (told,) = logprobs(torch.zeros(1, 3), [0], [2], [20])
    assert sorted(token for token, _ in told.top) == [0, 1, 2]
    assert told.logprob == pytest.approx(-math.log(3))


def chunk(
    tokens: int, draws: int = 0, targets: tuple[int, ...] = (), logprobs: int | None = None, **params: float
) -> Chunk:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Chunk(
        sequence=SequenceId(1),
        start=0,
        tokens=(0,) * tokens,
        table=(BlockId(0),),
        draws=tuple(Draw(sampling, sample, tokens, logprobs=logprobs) for sample in range(draws)),
        targets=targets,
        top_logprobs=2,
    )


def test_the_rows_of_a_chunk_are_those_of_its_targets_and_its_last() -> None:
    chunks = [chunk(3, 1), chunk(4, 0, (1, 2, 3, 4)), chunk(3, 2, (5, 6)), chunk(2)]
    starts = torch.tensor([0, 3, 7, 10, 12]).numpy()
    assert logit_rows(chunks, starts).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert logit_rows([chunk(3, 1), chunk(2), chunk(1, 2)], torch.tensor([0, 3, 5, 6]).numpy()).tolist() == [2, 5]


def test_a_step_draws_and_judges_by_the_right_rows() -> None:
    chunks = [chunk(1, 1), chunk(3, 0, (7, 8, 9)), chunk(3, 2, (5, 6), logprobs=1), chunk(2)]
    logits = noise(1 + 3 + 3)
    result = outcome(chunks, logits)
    best = logits.argmax(-1).tolist()
    assert result.tokens == ((best[0],), (), (best[6], best[6]), ())
    assert set(result.logprobs) == {2}
    assert set(result.judged) == {1, 2}
    for told, row, token in zip(result.judged[1], (1, 2, 3), (7, 8, 9), strict=True):
        assert_close(told, expected(logits[row], token, 2))
    for told, row, token in zip(result.judged[2], (4, 5), (5, 6), strict=True):
        assert_close(told, expected(logits[row], token, 2))
    for told in result.logprobs[2]:
        assert_close(told, expected(logits[6], best[6], 1))


def test_what_is_told_is_the_models_own_distribution_whatever_is_drawn_from() -> None:
    logits = noise(1)
    biased = chunk(1, 1, logprobs=3, temperature=2.0, top_k=1, logit_bias=((4, 100.0),))  # type: ignore[arg-type]
    result = outcome([biased], logits)
    assert result.tokens == ((4,),)
    assert_close(result.logprobs[0][0], expected(logits[0], 4, 3))
