"""The Triton kernels of `block_ops` do what it means, bit by bit; in the interpreter where no GPU is."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import fast_interpreter
from worker.kernels import block_ops

pytest.importorskip("triton")

from worker.kernels import block_ops_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
if DEVICE.type == "cpu":
    fast_interpreter.install()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def _pools(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(6, kv_heads, block_size, head_dim).to(dtype) for _ in range(2)]


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [*((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)), *product([torch.float32], FP8)],
    ids=str,
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(2, 8, 4), (3, 80, 1), (1, 64, 16)])
def test_a_write_puts_the_same_bits_into_the_same_slots(
    dtype: torch.dtype, pool_dtype: torch.dtype, scaled: bool, kv_heads: int, head_dim: int, block_size: int
) -> None:
    if scaled and pool_dtype not in FP8:
        pytest.skip("only pools of eight bits are scaled")
    expected = _pools(kv_heads, head_dim, block_size, pool_dtype)
    written = [pool.to(DEVICE, copy=True) for pool in expected]
    k, v = (torch.randn(kv_heads, 5, head_dim).to(dtype).transpose(0, 1) * 100 for _ in range(2))
    slots = torch.randperm(6 * block_size)[:5]
    scales = [torch.tensor([0.25, 2.0, 64.0])[:kv_heads] if scaled else None for _ in range(2)]

    block_ops.write(*expected, k, v, slots, k_scale=scales[0], v_scale=scales[1])
    moved = (None if scale is None else scale.to(DEVICE) for scale in scales)
    block_ops_triton.write(*written, k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), *moved)

    for pool, other in zip(expected, written, strict=True):
        assert torch.equal(_bits(pool), _bits(other))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_number_becomes_the_nearest_of_eight_bits(dtype: torch.dtype) -> None:
    """All numbers of the format, the middles between two of them, both neighbours of each, and what lies outside."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = codes[codes.isfinite()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    near = [x.nextafter(torch.full_like(x, way)) for x in (exact, middles) for way in (torch.inf, -torch.inf)]
    outside = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1e-30, -0.0])
    numbers = torch.cat([exact, middles, *near, outside])
    k = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 64)]).reshape(-1, 1, 64)
    expected, written = (torch.zeros(len(k), 1, 1, 64).to(dtype) for _ in range(2))
    slots = torch.arange(len(k))
    written = written.to(DEVICE)

    block_ops.write(expected, expected.clone(), k, k, slots)
    block_ops_triton.write(written, written.clone(), k.to(DEVICE), k.to(DEVICE), slots.to(DEVICE), None, None)

    assert torch.equal(expected.float().nan_to_num(1e6), written.cpu().float().nan_to_num(1e6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block", [(2, 4, 8), (1, 1, 3), (3, 7, 5), (4, 16, 64)])
def test_blocks_are_moved_whole(dtype: torch.dtype, block: tuple[int, ...]) -> None:
    """Blocks of an odd number of bytes go byte by byte, others in the widest words that fit."""
    here, there = (torch.randn(4, 6, *block).to(dtype).to(DEVICE) for _ in range(2))
    expected = _bits(there)

    buffer = block_ops_triton.gather(here, [5, 0, 2])
    block_ops_triton.scatter(there, [1, 3, 4], buffer)

    assert torch.equal(_bits(buffer), _bits(block_ops.gather_blocks(here.cpu(), [5, 0, 2])))
    expected[:, [1, 3, 4]] = _bits(here)[:, [5, 0, 2]]
    assert torch.equal(_bits(there), expected)


@given(st.permutations(range(6)), st.integers(1, 3))
def test_blocks_are_copied_in_all_planes(order: list[int], count: int) -> None:
    planes = torch.randn(4, 6, 2, 3, 8).to(DEVICE)
    sources, targets = order[:count], order[3 : 3 + count]
    expected = planes.clone()
    expected[:, targets] = planes[:, sources]

    block_ops_triton.copy(planes, sources, targets)

    assert torch.equal(planes, expected)


def test_blocks_beyond_two_to_the_31_elements_are_written_and_moved() -> None:
    """Pages of the CPU that nobody touches cost nothing; a GPU needs 4 GB."""
    block = (1, 1, 3)  # of an odd number of bytes: moved byte by byte, so that a word is an element
    far = 2**31 // 3 + 1
    k_pool, v_pool = (torch.empty(far + 2, *block, dtype=torch.float8_e5m2, device=DEVICE) for _ in range(2))
    k, v = (torch.tensor([[[1.0, -2.0, value]]], device=DEVICE) for value in (3.0, 4.0))

    block_ops_triton.write(k_pool, v_pool, k, v, torch.tensor([far], device=DEVICE), None, None)
    block_ops_triton.copy(k_pool[None], [far], [far + 1])
    moved = block_ops_triton.gather(k_pool[None], [far + 1])
    block_ops_triton.scatter(v_pool[None], [far + 1], moved)

    assert moved.float().flatten().tolist() == [1.0, -2.0, 3.0]
    assert v_pool[far:].float().flatten().tolist() == [1.0, -2.0, 4.0, 1.0, -2.0, 3.0]


def test_planes_whose_blocks_are_scattered_in_memory_are_refused() -> None:
    planes = torch.randn(2, 6, 4, 2, 8).transpose(2, 3)

    with pytest.raises(ValueError, match=r"a block has strides \(8, 16, 1\), wanted a contiguous one"):
        block_ops_triton.gather(planes, [0])
