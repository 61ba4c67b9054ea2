"""How many blocks fit into a budget, and that a pool is what its shape says."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_pool import KVPool, PoolShape

CPU = torch.device("cpu")


def _shape(dtype: torch.dtype = torch.bfloat16) -> PoolShape:
    return PoolShape(num_layers=3, kv_heads=2, block_size=16, head_dim=8, dtype=dtype)


def test_a_block_takes_keys_and_values_of_all_layers() -> None:
    assert _shape(torch.bfloat16).bytes_per_block == 3 * 2 * (2 * 16 * 8) * 2
    assert _shape(torch.float32).bytes_per_block == 3 * 2 * (2 * 16 * 8) * 4


def test_smollm2_fits_half_a_megabyte_or_so_into_a_block() -> None:
    smollm2 = PoolShape(num_layers=30, kv_heads=3, block_size=16, head_dim=64, dtype=torch.float32)

    assert smollm2.bytes_per_block == 737_280
    assert smollm2.blocks_within(1 << 30) == 1456


@given(st.integers(0, 10), st.integers(0, _shape().bytes_per_block - 1))
def test_a_budget_holds_as_many_blocks_as_fit_whole(blocks: int, rest: int) -> None:
    shape = _shape()

    assert shape.blocks_within((blocks + 1) * shape.bytes_per_block + rest) == blocks + 1


@pytest.mark.parametrize("budget", [-1, 0, 3071])
def test_a_budget_below_one_block_is_refused_with_both_numbers(budget: int) -> None:
    with pytest.raises(ValueError, match=f"the KV budget is {budget} bytes, one block takes 3072"):
        KVPool.within_budget(_shape(), budget, CPU)


def test_a_pool_has_two_tensors_a_layer_and_takes_what_it_says() -> None:
    pool = KVPool.within_budget(_shape(), 5 * 3072 + 100, CPU)

    tensors = [x for layer in range(3) for x in pool.layer(layer)]
    assert [tuple(x.shape) for x in tensors] == [(5, 2, 16, 8)] * 6
    assert {x.dtype for x in tensors} == {torch.bfloat16}
    assert all(x.is_contiguous() for x in tensors)
    assert pool.num_bytes == sum(x.nbytes for x in tensors) == 5 * 3072
    assert pool.capacity_tokens == 80


def test_a_write_reaches_one_layer() -> None:
    pool = KVPool(_shape(torch.float32), 2, CPU)
    k, v = torch.ones(1, 2, 8), torch.full((1, 2, 8), 2.0)

    pool.write(1, k, v, torch.tensor([17]))

    k_pool, v_pool = pool.layer(1)
    assert k_pool[1, :, 1].eq(1).all()
    assert v_pool[1, :, 1].eq(2).all()
    assert k_pool.sum() == 16
    assert pool.layer(0)[0].sum() == pool.layer(2)[1].sum() == 0


def test_a_copy_reaches_every_layer() -> None:
    pool = KVPool(_shape(torch.float32), 3, CPU)
    for layer in range(3):
        pool.write(layer, torch.full((1, 2, 8), layer + 1.0), torch.full((1, 2, 8), layer + 4.0), torch.tensor([5]))

    pool.copy_blocks([(0, 2)])

    for layer in range(3):
        for tensor in pool.layer(layer):
            assert torch.equal(tensor[2], tensor[0])
            assert tensor[2].any()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="the pool has 0 blocks, wanted at least 1"):
        KVPool(_shape(), 0, CPU)


def test_a_pool_that_memory_does_not_hold_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=f"the KV pool of {3072 << 40} bytes cannot be had on cpu"):
        KVPool(_shape(), 1 << 40, CPU)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_the_pool_may_lie_on_huge_pages() -> None:
    pool = KVPool.within_budget(_shape(), 8 << 20, CPU)
    middle = pool.planes.data_ptr() + pool.num_bytes // 2

    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= middle < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line

    assert " hg" in flags
