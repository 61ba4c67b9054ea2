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


def test_a_chain_of_copies_behaves_as_one_after_the_other() -> None:
    pool = _pool()
    before = pool.clone()

    block_ops.copy_blocks([pool], [(0, 1), (1, 2), (3, 0), (0, 4)])

    assert torch.equal(pool, before[[3, 0, 0, 3, 3, 5]])


def test_every_pool_is_copied() -> None:
    pools = [_pool() for _ in range(4)]
    before = [pool.clone() for pool in pools]

    block_ops.copy_blocks(pools, [(2, 5)])

    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool, was[[0, 1, 2, 3, 4, 2]])


@given(st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)), max_size=10))
def test_any_copies_equal_copies_one_by_one(copies: list[tuple[int, int]]) -> None:
    pool = torch.arange(N, dtype=torch.float32)[:, None].clone()
    expected = list(range(N))
    for source, target in copies:
        expected[target] = expected[source]

    block_ops.copy_blocks([pool], copies)

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
        block_ops.copy_blocks([pool], copies)

    assert torch.equal(pool, before)
