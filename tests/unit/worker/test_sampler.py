import math
from collections import Counter

import pytest
import torch

from octavo.records.sampling import SamplingParams
from worker.core.step import Draw
from worker.model.sampler import sample, uniforms

WIDE = 2_000  # more than the sampler looks at before it sorts everything


def draw(position: int = 0, *, sample: int = 0, seed: int = 0, temperature: float = 1.0, **cut: float) -> Draw:
    top_k = int(cut.get("top_k", 0))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=cut.get("top_p", 1.0), seed=seed)
    return Draw(params, sample, position)


def noise(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def many(logits: torch.Tensor, count: int, **params: float) -> Counter[int]:
    """How often each token comes in `count` draws at different positions from one row."""
    return Counter(sample(logits, [0] * count, [draw(position, **params) for position in range(count)]))  # type: ignore[arg-type]


def chi_square(counts: Counter[int], expected: dict[int, float], draws: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens expected fewer than five times are pooled."""
    common = {token: share for token, share in expected.items() if share * draws >= 5}
    cells = [(counts[token], share * draws) for token, share in common.items()]
    rare = 1 - sum(common.values())
    if rare * draws >= 5:
        cells.append((sum(n for token, n in counts.items() if token not in common), rare * draws))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def assert_distributed(counts: Counter[int], expected: dict[int, float], draws: int) -> None:
    """The draws fit: chi-square at most its mean plus four standard deviations (fixed seeds: this never flickers)."""
    statistic, freedom = chi_square(counts, expected, draws)
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)
    assert set(counts) <= set(expected)


def probabilities(logits: torch.Tensor, temperature: float = 1.0) -> dict[int, float]:
    return dict(enumerate((logits[0].double() / temperature).softmax(-1).tolist()))


def cut_to(shares: dict[int, float], kept: list[int]) -> dict[int, float]:
    whole = sum(shares[token] for token in kept)
    return {token: shares[token] / whole for token in kept}


def ranking(shares: dict[int, float]) -> list[int]:
    return sorted(shares, key=lambda token: (-shares[token], token))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocabulary", [5, 60, WIDE])
def test_tokens_come_as_often_as_the_softmax_says(vocabulary: int, temperature: float) -> None:
    logits = noise(1, vocabulary)
    counts = many(logits, 4_000, temperature=temperature)
    assert_distributed(counts, probabilities(logits, temperature), 4_000)


@pytest.mark.parametrize("vocabulary", [60, WIDE])
@pytest.mark.parametrize("top_k", [1, 3, 50])
def test_top_k_keeps_exactly_k_tokens_in_proportion(vocabulary: int, top_k: int) -> None:
    logits = noise(1, vocabulary, spread=1.0)
    shares = probabilities(logits)
    counts = many(logits, 3_000, top_k=top_k)
    assert_distributed(counts, cut_to(shares, ranking(shares)[:top_k]), 3_000)
    if top_k <= 3:
        assert len(counts) == top_k


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [2]), (0.499, [2]), (0.501, [2, 0]), (0.749, [2, 0]), (0.751, [2, 0, 3])]
)
def test_top_p_keeps_the_fewest_tokens_that_hold_that_much(top_p: float, kept: list[int]) -> None:
    shares = {0: 0.25, 1: 0.0625, 2: 0.5, 3: 0.1875}
    logits = torch.tensor([[shares[token] for token in range(4)]]).log()
    counts = many(logits, 2_000, top_p=top_p)
    assert set(counts) == set(kept)
    assert_distributed(counts, cut_to(shares, kept), 2_000)


@pytest.mark.parametrize("spread", [0.01, 3.0])  # a nucleus of nearly all tokens, and of few
def test_top_p_of_a_wide_vocabulary_keeps_the_fewest_tokens_that_hold_that_much(spread: float) -> None:
    logits = noise(1, WIDE, spread=spread)
    shares = probabilities(logits)
    kept, held = [], 0.0
    for token in ranking(shares):
        kept.append(token)
        held += shares[token]
        if held >= 0.7:
            break
    counts = many(logits, 8_000, top_p=0.7)
    assert_distributed(counts, cut_to(shares, kept), 8_000)


def test_top_p_is_taken_of_what_top_k_left() -> None:
    shares = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
    logits = torch.tensor([list(shares.values())]).log()
    counts = many(logits, 1_000, top_k=2, top_p=0.6)  # 0.4 of 0.7 is 0.57, so both stay
    assert set(counts) == {0, 1}


def test_of_equal_logits_the_lowest_ids_are_kept() -> None:
    logits = torch.zeros(1, WIDE)
    logits[0, 7] = -1.0
    assert set(many(logits, 300, top_k=9)) == {0, 1, 2, 3, 4, 5, 6, 8, 9}


def test_greedy_takes_the_lowest_of_the_highest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [0, 1], [draw(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize("vocabulary", [40, WIDE])
def test_a_draw_does_not_depend_on_its_company(vocabulary: int) -> None:
    logits = noise(6, vocabulary, spread=1.5)
    draws = [
        draw(3),
        draw(4, top_k=5),
        draw(5, top_p=0.9),
        draw(6, temperature=0.0),
        draw(7, temperature=5.0),
        draw(8, top_k=30, top_p=0.3),
    ]
    together = sample(logits, range(6), draws)
    alone = [sample(logits[row : row + 1], [0], [draws[row]])[0] for row in range(6)]
    assert together == alone


@pytest.mark.parametrize("vocabulary", [WIDE, 8_000])  # more than 256 runs of 16, of which only the best are looked at
@pytest.mark.parametrize("spread", [0.05, 2.0])  # beyond the first look nearly always, and nearly never
def test_the_first_look_and_the_whole_sort_draw_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, spread: float, vocabulary: int
) -> None:
    logits = noise(1, vocabulary, spread=spread).bfloat16().float()  # with equals
    draws = [draw(position, temperature=0.8, top_p=0.95, top_k=position % 3 * 100) for position in range(100)]
    looked = sample(logits, [0] * 100, draws)
    monkeypatch.setattr("worker.model.sampler._CANDIDATES", vocabulary + 256)
    assert sample(logits, [0] * 100, draws) == looked


def test_neighbouring_draws_know_nothing_of_each_other() -> None:
    """Positions, samples and seeds that lie side by side: pairs come as often as the product of their shares says."""
    logits = noise(1, 4, spread=1.0)
    shares = probabilities(logits)
    pairs = {4 * first + second: shares[first] * shares[second] for first in shares for second in shares}
    for position, of, seed in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        draws = [
            draw(2 * at + position * second, sample=of * second, seed=seed * second)
            for at in range(2_000)
            for second in (0, 1)
        ]
        tokens = sample(logits, [0] * len(draws), draws)
        came = Counter(4 * first + second for first, second in zip(tokens[::2], tokens[1::2], strict=True))
        assert_distributed(came, pairs, 2_000)


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_logits_that_differ_by_rounding_seldom_draw_otherwise(spread: float) -> None:
    """At most four times as often as any rule must: that is how far the two distributions are apart.

    Among thousands of nearly equal tokens, a running sum of probabilities would nearly always stop at another.
    """
    logits = noise(1, WIDE, spread=spread)
    rounded = logits + noise(1, WIDE, seed=1, spread=0.01)
    apart = 0.5 * (logits.softmax(-1) - rounded.softmax(-1)).abs().sum().item()
    draws = [draw(position) for position in range(5_000)]
    before, after = (sample(of, [0] * len(draws), draws) for of in (logits, rounded))
    changed = sum(one != other for one, other in zip(before, after, strict=True)) / len(draws)
    assert 0 < changed < 4 * apart, (changed, apart)


def test_the_same_counter_gives_the_same_token_and_another_one_another_stream() -> None:
    logits = torch.zeros(1, WIDE)

    def stream(**of: int) -> list[int]:
        return sample(logits, [0] * 20, [draw(position, **of) for position in range(20)])  # type: ignore[arg-type]

    assert stream(seed=1, sample=2) == stream(seed=1, sample=2)
    assert len({tuple(stream(seed=seed, sample=of)) for seed in range(4) for of in range(4)}) == 16


def test_the_counter_gives_these_very_numbers() -> None:
    """Whoever changes them breaks every request that is replayed or carried over during an update."""
    assert uniforms(0, 0, 0, 2).tolist() == [0.8589129889161277, 0.30108020017350057]
    assert uniforms(2**64 - 1, 3, 8191, 1).tolist() == [0.1874894838751039]


def test_more_numbers_of_a_counter_begin_with_the_fewer() -> None:
    assert uniforms(1, 2, 3, 9).tolist()[:4] == uniforms(1, 2, 3, 4).tolist()


def test_the_counter_is_spread_evenly_and_never_an_end() -> None:
    numbers = [number for seed in range(20) for position in range(20) for number in uniforms(seed, 0, position, 10)]
    counts = Counter(int(number * 64) for number in numbers)
    assert_distributed(counts, dict.fromkeys(range(64), 1 / 64), len(numbers))
    assert all(0 < number < 1 for number in numbers)


@pytest.mark.parametrize("vocabulary", [4, WIDE])
def test_a_forbidden_token_never_comes(vocabulary: int) -> None:
    logits = torch.full((1, vocabulary), -math.inf)
    logits[0, 2] = -3.0
    assert many(logits, 50, temperature=100.0) == {2: 50}


def test_temperatures_at_the_extremes_are_greedy_and_flat() -> None:
    logits = noise(1, 8)
    assert set(many(logits, 50, temperature=1e-300)) == {int(logits.argmax())}
    counts = many(logits, 2_000, temperature=1e30)
    assert_distributed(counts, dict.fromkeys(range(8), 1 / 8), 2_000)


def test_cuts_wider_than_the_vocabulary_change_nothing() -> None:
    logits = noise(1, 30)
    draws = range(50)
    assert sample(logits, [0] * 50, [draw(at, top_k=10**9) for at in draws]) == sample(
        logits, [0] * 50, [draw(at) for at in draws]
    )


def test_low_precision_logits_are_drawn_from_as_float32() -> None:
    logits = noise(1, 50).bfloat16()
    draws = [draw(at, temperature=0.7) for at in range(100)]
    assert sample(logits, [0] * 100, draws) == sample(logits.float(), [0] * 100, draws)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise_and_name_the_position(temperature: float, bad: float) -> None:
    logits = noise(2, WIDE)
    logits[1, 5] = bad
    assert sample(logits, [0], [draw(temperature=temperature)])  # the other row is sound
    with pytest.raises(FloatingPointError, match=r"position 9 \(row 1\)"):
        sample(logits, [0, 1], [draw(8, temperature=temperature), draw(9, temperature=temperature)])


def test_no_draws_give_no_tokens() -> None:
    assert sample(noise(1, 4), [], []) == []
