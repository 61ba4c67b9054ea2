"""The products of the fast road: plain, packed or in tiles, they are the same product."""

import logging
from typing import Any

import pytest
import torch

from worker.model import linear
from worker.model.linear import MakeLinear

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
KINDS: dict[str, MakeLinear] = {
    "plain": linear.plain,
    "packed": linear.packed,
    "plain, in tiles": linear.in_tiles(linear.plain),
    "packed, in tiles": linear.in_tiles(linear.packed),
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
kinds = pytest.mark.parametrize("kind", KINDS)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@kinds
@dtypes
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_a_product_is_that_of_the_numbers(kind: str, dtype: torch.dtype, biased: bool, rows: int) -> None:
    weight, x = random(80, 96, dtype=dtype), random(rows, 96, dtype=dtype, seed=1)
    bias = random(80, dtype=dtype, seed=2) if biased else None

    out = KINDS[kind](weight, bias)(x)

    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (out.dtype, out.shape) == (dtype, (rows, 80))
    assert ((out.double() - wanted).norm() / wanted.norm()).item() < TOLERANCES[dtype]


@dtypes
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "tiles" in kind])
@pytest.mark.parametrize("width", [576, 1536])
def test_in_tiles_a_row_has_the_same_bits_in_any_company(kind: str, dtype: torch.dtype, width: int) -> None:
    """S55: 1,536 elements are summed in another way alone than in company, by oneDNN in float32."""
    multiply = KINDS[kind](random(64, width, dtype=dtype), None)
    x = random(70, width, dtype=dtype, seed=1)

    together = multiply(x)

    for row in (0, 1, 31, 32, 33, 69):
        assert torch.equal(multiply(x[row : row + 1])[0], together[row])
        assert torch.equal(multiply(x[row:])[0], together[row])


def test_weights_are_packed_where_that_works_and_the_reason_is_told_where_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: Any) -> Any:
        raise AttributeError("no such operator")

    def wrong(weight: torch.Tensor, bias: torch.Tensor | None = None) -> linear.Linear:
        return linear.plain(weight, None)

    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        chosen = [linear.choose(device=CPU, dtype=torch.float32), linear.choose(device=CPU, dtype=torch.bfloat16)]
        elsewhere = linear.choose(device=torch.device("meta"), dtype=torch.float32)
        monkeypatch.setattr(linear, "packed", gone)
        without = linear.choose(device=CPU, dtype=torch.float32)
        monkeypatch.setattr(linear, "packed", wrong)
        distrusted = linear.choose(device=CPU, dtype=torch.float32)

    assert chosen == [KINDS["packed"]] * 2
    assert [elsewhere, without, distrusted] == [linear.plain] * 3
    reasons = [record.__dict__["reason"] for record in caplog.records]
    assert reasons[2:] == [
        "packed weights are oneDNN's, for CPUs; this is meta",
        "slower than packed weights: AttributeError: no such operator",
        "slower than packed weights: this torch multiplies them wrong",
    ]
