"""The products of the fast road: plain, packed, in batches or in tiles, they are the same product."""

import logging
from typing import Any

import pytest
import torch

from worker.kernels import native_build, native_products
from worker.kernels.native_build import TILES, NativeUnavailable
from worker.model import linear
from worker.model.linear import Linear, MakeLinear

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
KINDS: dict[str, MakeLinear] = {
    "plain": linear.plain,
    "packed": linear.packed,
    "plain, in batches": linear.in_batches(linear.plain),
    "packed, in batches": linear.in_batches(linear.packed),
    "tiled": linear.tiled,
}
CASES = [(kind, dtype) for kind in KINDS for dtype in TOLERANCES if (kind, dtype) != ("tiled", torch.float32)]
kinds = pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)


def made(kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    try:
        return KINDS[kind](weight, bias)
    except NativeUnavailable as unavailable:
        pytest.skip(str(unavailable))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@kinds
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(80, 96), (64, 64), (33, 31), (1, 1), (31, 130)])
def test_a_product_is_that_of_the_numbers(
    kind: str, dtype: torch.dtype, biased: bool, columns: int, width: int
) -> None:
    weight, bias = random(columns, width, dtype=dtype), random(columns, dtype=dtype, seed=2) if biased else None
    multiply = made(kind, weight, bias)

    for rows in (0, 1, 16, 17, 31, 32, 33, 70, 600):
        x = random(rows, width, dtype=dtype, seed=1)
        out = multiply(x)

        wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert (out.dtype, out.shape) == (dtype, (rows, columns))
        assert ((out.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item() < TOLERANCES[dtype]


@pytest.mark.parametrize(("kind", "dtype"), [each for each in CASES if each[0] not in ("plain", "packed")], ids=str)
@pytest.mark.parametrize("width", [576, 1536])
def test_in_batches_or_tiles_a_row_has_the_same_bits_in_any_company(kind: str, dtype: torch.dtype, width: int) -> None:
    """S55: 1,536 elements are summed in another way alone than in company, by oneDNN in float32."""
    multiply = made(kind, random(64, width, dtype=dtype))
    x = random(70, width, dtype=dtype, seed=1)

    together = multiply(x)

    for row in (0, 1, 31, 32, 33, 69):
        assert torch.equal(multiply(x[row : row + 1])[0], together[row])
        assert torch.equal(multiply(x[row:])[0], together[row])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    multiply = made("tiled", random(1000, 64, dtype=torch.bfloat16))
    before, x = torch.get_num_threads(), random(300, 64, dtype=torch.bfloat16, seed=1)
    alone = [multiply(x[:rows]) for rows in (1, 300)]

    torch.set_num_threads(threads)
    try:
        together = [multiply(x[:rows]) for rows in (1, 300)]
    finally:
        torch.set_num_threads(before)

    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(80, 96), (33, 31), (1, 1), (17, 130)])
def test_a_product_in_tiles_can_leave_its_sums_unrounded(biased: bool, columns: int, width: int) -> None:
    """Of two logits that differ by less than bfloat16 tells apart, the higher is drawn."""
    weight, bias = (
        random(*shape, dtype=torch.bfloat16, seed=seed) for shape, seed in (((columns, width), 0), ((columns,), 2))
    )
    rounded = made("tiled", weight, bias if biased else None)
    unrounded = linear.unrounded(rounded)

    for rows in (1, 17, 33, 600):
        x = random(rows, width, dtype=torch.bfloat16, seed=1)
        sums = unrounded(x)
        wanted = x.double() @ weight.double().T + biased * bias.double()
        assert (sums.dtype, sums.shape) == (torch.float32, (rows, columns))
        assert ((sums.double() - wanted).norm() / wanted.norm()).item() < 1e-6
        assert torch.equal(sums.bfloat16(), rounded(x))


def test_a_product_that_cannot_leave_its_sums_is_taken_as_it_is() -> None:
    multiply = linear.plain(random(4, 4, dtype=torch.bfloat16))
    assert linear.unrounded(multiply) is multiply


def test_tiles_read_rows_where_they_lie() -> None:
    multiply = made("tiled", random(40, 64, dtype=torch.bfloat16))
    wide = random(9, 200, dtype=torch.bfloat16, seed=1)
    for x in (wide[::2, 3:67], random(64, 9, dtype=torch.bfloat16, seed=2).T):
        assert torch.equal(multiply(x), multiply(x.contiguous()))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 63, dtype=torch.bfloat16), r"x is \[2, 63\] of torch.bfloat16 on cpu, wanted \[T, 64\]"),
        (torch.zeros(64, dtype=torch.bfloat16), r"x is \[64\] "),
        (torch.zeros(2, 64), r"x is \[2, 64\] of torch.float32"),
        (torch.zeros(2, 64, dtype=torch.bfloat16, device="meta"), r"on meta, wanted \[T, 64\] of bfloat16 on the CPU"),
    ],
    ids=["width", "axes", "dtype", "device"],
)
def test_tiles_refuse_what_they_cannot_multiply(x: torch.Tensor, message: str) -> None:
    multiply = made("tiled", random(40, 64, dtype=torch.bfloat16))

    with pytest.raises(ValueError, match=message):
        multiply(x)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(4, 8), None, "weight is torch.float32 on cpu, the tiles want bfloat16 on the CPU"),
        (torch.zeros(8, dtype=torch.bfloat16), None, "weight has 1 axes, wanted 2"),
        (torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4), "bias is torch.float32 on cpu"),
        (torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(5).bfloat16(), r"bias is \[5\], wanted \[4\]"),
    ],
    ids=["dtype", "axes", "dtype of the bias", "bias"],
)
def test_tiles_refuse_weights_that_do_not_fit(weight: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    made("tiled", torch.zeros(1, 1, dtype=torch.bfloat16))  # skips where there are none

    with pytest.raises(ValueError, match=message):
        linear.tiled(weight, bias)


def test_a_cpu_without_tiles_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "cpu_features", lambda: frozenset(TILES.features) - {"amx_bf16", "amx_tile"})
    native_products.load.cache_clear()

    with pytest.raises(NativeUnavailable, match="this CPU lacks amx_bf16, amx_tile"):
        native_products.load()


def test_the_fastest_products_that_work_are_chosen_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: Any) -> Any:
        raise AttributeError("no such operator")

    def lacking(*_: Any) -> Any:
        raise NativeUnavailable("this CPU lacks amx_tile")

    def wrong(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return linear.plain(weight, None)

    def chosen(dtype: torch.dtype, device: torch.device = CPU) -> MakeLinear:
        return linear.choose(device=device, dtype=dtype)

    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        first, elsewhere = chosen(torch.float32), chosen(torch.float32, torch.device("meta"))
        monkeypatch.setattr(linear, "tiled", linear.plain)
        trusted = chosen(torch.bfloat16)
        monkeypatch.setattr(linear, "tiled", lacking)
        without_tiles = chosen(torch.bfloat16)
        monkeypatch.setattr(linear, "packed", gone)
        without_both = chosen(torch.bfloat16)
        monkeypatch.setattr(linear, "packed", wrong)
        distrusted = chosen(torch.bfloat16)

    assert [first, elsewhere, trusted] == [KINDS["packed"], linear.plain, linear.plain]
    assert [without_tiles, without_both, distrusted] == [KINDS["packed"], linear.plain, linear.plain]
    reasons = [record.__dict__["reason"] for record in caplog.records]
    lacks = "this CPU lacks amx_tile"
    assert reasons[0].startswith("weights in oneDNN's order; not in matrix tiles: ")
    assert reasons[1:] == [
        "weights are kept in another order on CPUs; this is meta",
        "bfloat16 in the CPU's matrix tiles",
        "weights in oneDNN's order; not in matrix tiles: " + lacks,
        f"slower than weights in another order: no such operator; {lacks}",
        f"slower than weights in another order: they are multiplied wrong; {lacks}",
    ]


def test_deterministic_products_that_are_so_by_themselves_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "tiled", lambda weight, bias: linear.plain(weight, bias))

    assert linear.choose(device=CPU, dtype=torch.bfloat16, deterministic=True) is linear.tiled
    assert linear.choose(device=torch.device("meta"), dtype=torch.float64, deterministic=True) is not linear.plain
