"""Writing into slots and copying blocks, against loops that do one element at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.kernels import block_ops

N, HKV, S, D = 6, 2, 4, 8


def _pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, HKV, S, D).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_token_lands_in_its_slot_and_nowhere_else(dtype: torch.dtype) -> None:
    k_pool, v_pool = _pool(dtype), _pool(dtype)
    k, v = torch.randn(3, HKV, D), torch.randn(3, HKV, D)
    slots = [5 * S + 3, 0, 2 * S + 1]
    expected_k, expected_v = k_pool.clone(), v_pool.clone()
    for token, slot in enumerate(slots):
        expected_k[slot // S, :, slot % S] = k[token].to(dtype)
        expected_v[slot // S, :, slot % S] = v[token].to(dtype)

    block_ops.write(k_pool, v_pool, k, v, torch.tensor(slots))

    assert torch.equal(k_pool, expected_k)
    assert torch.equal(v_pool, expected_v)


def test_strided_keys_are_written_as_they_read() -> None:
    """A model hands over [1, Hkv, T, D]; its transposed view is what is written."""
    k_pool, v_pool = _pool(), _pool()
    k = torch.randn(1, HKV, 3, D)[0].transpose(0, 1)

    block_ops.write(k_pool, v_pool, k, k, torch.tensor([1, 2, 3]))

    assert torch.equal(k_pool[0, :, 1:4].transpose(0, 1), k)


def test_writing_no_token_changes_nothing() -> None:
    k_pool = _pool()
    before = k_pool.clone()

    block_ops.write(k_pool, k_pool, torch.empty(0, HKV, D), torch.empty(0, HKV, D), torch.empty(0, dtype=torch.int64))

    assert torch.equal(k_pool, before)


TWO = torch.zeros(2, HKV, D)
FIRST_TWO = torch.tensor([0, 1])
BAD_WRITES = {
    "k": (torch.zeros(2, HKV, D + 1), TWO, FIRST_TWO, r"k is \[2, 2, 9\], wanted \[2, 2, 8\]"),
    "v": (TWO, TWO[:1], FIRST_TWO, r"v is \[1, 2, 8\], wanted \[2, 2, 8\]"),
    "dtype": (TWO, TWO, FIRST_TWO.int(), "slots is torch.int32, wanted torch.int64"),
    "past the end": (TWO, TWO, torch.tensor([0, N * S]), "slots go from 0 to 24, the pool has 24"),
    "k device": (TWO.to("meta"), TWO, FIRST_TWO, "k is on meta, k_pool on cpu"),
    "negative": (TWO, TWO, torch.tensor([-1, 0]), "slots go from -1 to 0, the pool has 24"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_a_write_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    k, v, slots, message = BAD_WRITES[case]
    k_pool, v_pool = _pool(), _pool()
    before = k_pool.clone(), v_pool.clone()

    with pytest.raises(ValueError, match=message):
        block_ops.write(k_pool, v_pool, k, v, slots)

    assert torch.equal(k_pool, before[0])
    assert torch.equal(v_pool, before[1])


BAD_SCALES = {
    "k_scale": (
        {"k_scale": torch.ones(3)},
        r"k_scale is \[3\] of torch.float32 on cpu, wanted \[2\] of torch.float32 on cpu",
    ),
    "v_scale": ({"v_scale": torch.ones(2).half()}, r"v_scale is \[2\] of torch.float16 on cpu, wanted \[2\]"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_a_scale_that_does_not_fit_is_refused(case: str) -> None:
    scales, message = BAD_SCALES[case]

    with pytest.raises(ValueError, match=message):
        block_ops.write(_pool(), _pool(), TWO, TWO, FIRST_TWO, **scales)


def test_a_chain_of_copies_behaves_as_one_after_the_other() -> None:
    pool = _pool()
    before = pool.clone()

    block_ops.copy_blocks(pool[None], [(0, 1), (1, 2), (3, 0), (0, 4)])

    assert torch.equal(pool, before[[3, 0, 0, 3, 3, 5]])


def test_a_block_is_copied_in_every_plane() -> None:
    planes = torch.stack([_pool() for _ in range(4)])
    before = planes.clone()

    block_ops.copy_blocks(planes, [(2, 5)])

    assert torch.equal(planes, before[:, [0, 1, 2, 3, 4, 2]])


@pytest.mark.parametrize("blocks", [[], [3], [5, 0, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_blocks_move_to_another_pool_and_nothing_else_changes(dtype: torch.dtype, blocks: list[int]) -> None:
    here, there = torch.randn(4, N, HKV, S, D).to(dtype), torch.randn(4, 9, HKV, S, D).to(dtype)
    before, targets = there.clone().view(torch.uint8), [8, 1, 4][: len(blocks)]

    buffer = block_ops.gather_blocks(here, blocks)
    block_ops.scatter_blocks(there, targets, buffer)

    assert buffer.is_contiguous()
    assert list(buffer.shape) == [len(blocks), 4, HKV, S, D]
    before[:, targets] = here.view(torch.uint8)[:, blocks]
    assert torch.equal(there.view(torch.uint8), before)


PLANES = torch.zeros(4, N, HKV, S, D)
BUFFER = torch.zeros(2, 4, HKV, S, D)
BAD_SCATTERS = {
    "outside": ([0, N], BUFFER, "blocks is block 6, the pool has 6"),
    "twice": ([1, 1], BUFFER, "blocks has 2 entries, 1 of them different"),
    "shape": ([0, 1, 2], BUFFER, r"buffer is \[2, 4, 2, 4, 8\], wanted \[3, 4, 2, 4, 8\]"),
    "dtype": ([0, 1], BUFFER.half(), "buffer is torch.float16 on cpu, the pool torch.float32 on cpu"),
    "strides": ([0, 1], BUFFER.mT.contiguous().mT, "buffer has strides .*, wanted a contiguous one"),
}


@pytest.mark.parametrize("case", BAD_SCATTERS)
def test_a_scatter_that_does_not_fit_is_refused(case: str) -> None:
    blocks, buffer, message = BAD_SCATTERS[case]

    with pytest.raises(ValueError, match=message):
        block_ops.scatter_blocks(PLANES, blocks, buffer)


def test_a_gather_outside_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks is block -1, the pool has 6"):
        block_ops.gather_blocks(PLANES, [0, -1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_pool_of_eight_bits_holds_the_nearest_number_and_never_infinity(dtype: torch.dtype) -> None:
    k_pool, v_pool = _pool(dtype), _pool(dtype)
    k = torch.tensor([1.0, 1.06, -3.3, 1e9, -1e9, torch.inf, 0.0, -0.0]).expand(1, HKV, D)
    largest = torch.finfo(dtype).max
    nearest = {torch.float8_e4m3fn: [1.0, 1.0, -3.25], torch.float8_e5m2: [1.0, 1.0, -3.5]}[dtype]

    block_ops.write(k_pool, v_pool, k, -k, torch.tensor([7]))

    expected = torch.tensor([*nearest, largest, -largest, largest, 0.0, -0.0])
    assert torch.equal(k_pool[1, :, 3].float(), expected.expand(HKV, D))
    assert torch.equal(v_pool[1, :, 3].float(), -expected.expand(HKV, D))


def test_a_scaled_pool_holds_what_its_scale_makes_the_key_again() -> None:
    k_pool, v_pool = _pool(torch.float8_e4m3fn), _pool(torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5, 4.0]), torch.tensor([100.0, 0.01])
    k, v = torch.randn(3, HKV, D), torch.randn(3, HKV, D) * v_scale[:, None]

    block_ops.write(k_pool, v_pool, k, v, torch.tensor([0, 1, 2]), k_scale=k_scale, v_scale=v_scale)

    for pool, scale, x in ((k_pool, k_scale, k), (v_pool, v_scale, v)):
        meant = pool[0, :, :3].float().transpose(0, 1) * scale[:, None]
        assert ((meant - x).abs() <= x.abs() / 16 + scale[:, None] * 2**-10).all()


@given(st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)), max_size=10))
def test_any_copies_equal_copies_one_by_one(copies: list[tuple[int, int]]) -> None:
    pool = torch.arange(N, dtype=torch.float32)[:, None].clone()
    expected = list(range(N))
    for source, target in copies:
        expected[target] = expected[source]

    block_ops.copy_blocks(pool[None], copies)

    assert pool[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(0, 1), (N, 2)], "source is block 6, the pool has 6"),
        ([(0, 1), (2, -1)], "target is block -1, the pool has 6"),
    ],
)
def test_a_copy_outside_the_pool_is_refused_and_nothing_was_copied(copies: list[tuple[int, int]], message: str) -> None:
    pool = _pool()
    before = pool.clone()

    with pytest.raises(ValueError, match=message):
        block_ops.copy_blocks(pool[None], copies)

    assert torch.equal(pool, before)
