"""`block_ops` on a GPU: each function is one launch, whatever the number of layers, tokens or blocks.

Grid of `_write_kernel`: (T,); of `_move_kernel`: (blocks, planes, pieces of a block).
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportOperatorIssue=false
# A kernel is Triton's language in Python's grammar.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from worker.kernels.arguments import FP8_DTYPES

_PIECE = 4096
"""Bytes that a program moves: eight times 16 of each of 32 threads."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FORMATS = {torch.float8_e4m3fn: (3, 7, 448.0), torch.float8_e5m2: (2, 15, 57344.0)}
"""Bits of the mantissa, bias of the exponent, largest number."""


@triton.jit
def float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 -> the bits of the nearest float8, even in a tie; the largest one beyond; NaN stays NaN.

    In integers, so that it is the same on every target: some have no such instruction, some round otherwise. A normal
    number rounds its float32 mantissa to the bits that stay, and a carry moves into the exponent as it should. A
    subnormal one is a multiple of the smallest: adding a power of two whose last bit is that multiple rounds to it.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    pushed = magnitude + SMALLEST * 8388608.0
    subnormal = pushed.to(tl.uint32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)


@triton.jit
def _write_one(
    x_ptr, pool_ptr, scale_ptr, token, block, offset, x_token, x_head,
    BLOCK: tl.constexpr, HEAD: tl.constexpr, SLOT: tl.constexpr,
    HKV: tl.constexpr, HKV_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One token's keys, or values, of all heads into its slot."""
    head, element = tl.arange(0, HKV_PADDED).to(tl.int64)[:, None], tl.arange(0, D_PADDED)[None, :]
    inside = (head < HKV) & (element < D)
    x = tl.load(x_ptr + token * x_token + head * x_head + element, mask=inside, other=0.0)
    if scale_ptr is not None:
        x = x.to(tl.float32) / tl.load(scale_ptr + head, mask=head < HKV, other=1.0)
    if MANTISSA is not None:
        x = float8_bits(x.to(tl.float32), MANTISSA, BIAS, LARGEST)
    at = pool_ptr + block * BLOCK + head * HEAD + offset * SLOT + element
    tl.store(at, x.to(pool_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    K_BLOCK: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    S: tl.constexpr,
    HKV: tl.constexpr,
    HKV_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write one token's keys and values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    block, offset = slot // S, slot % S
    _write_one(
        k_ptr, k_pool_ptr, k_scale_ptr, token, block, offset, k_token, k_head, K_BLOCK, K_HEAD, K_SLOT,
        HKV, HKV_PADDED, D, D_PADDED, MANTISSA, BIAS, LARGEST,
    )  # fmt: skip
    _write_one(
        v_ptr, v_pool_ptr, v_scale_ptr, token, block, offset, v_token, v_head, V_BLOCK, V_HEAD, V_SLOT,
        HKV, HKV_PADDED, D, D_PADDED, MANTISSA, BIAS, LARGEST,
    )  # fmt: skip


@triton.jit
def _move_kernel(
    source_ptr,
    target_ptr,
    source_blocks_ptr,
    target_blocks_ptr,
    SOURCE_PLANE: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    TARGET_PLANE: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Move one piece of one block of one plane; without a list of blocks the i-th is the i-th of a buffer."""
    i, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = i if source_blocks_ptr is None else tl.load(source_blocks_ptr + i)
    target = i if target_blocks_ptr is None else tl.load(target_blocks_ptr + i)
    word = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    content = tl.load(source_ptr + plane * SOURCE_PLANE + source * SOURCE_BLOCK + word, mask=word < WORDS)
    tl.store(target_ptr + plane * TARGET_PLANE + target * TARGET_BLOCK + word, content, mask=word < WORDS)


def write(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """`block_ops.write`; the arguments were checked. k_pool, v_pool [N, Hkv, S, D]; k, v [T, Hkv, D]; slots [T]."""
    if not len(slots):
        return
    _, kv_heads, block_size, head_dim = k_pool.shape
    mantissa, bias, largest = _FORMATS.get(k_pool.dtype, (None, None, None))
    if k_pool.dtype in FP8_DTYPES:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    _write_kernel[(len(slots),)](
        k_ptr=k,
        v_ptr=v,
        k_pool_ptr=k_pool,
        v_pool_ptr=v_pool,
        slots_ptr=slots.contiguous(),
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        K_BLOCK=k_pool.stride(0),
        K_HEAD=k_pool.stride(1),
        K_SLOT=k_pool.stride(2),
        V_BLOCK=v_pool.stride(0),
        V_HEAD=v_pool.stride(1),
        V_SLOT=v_pool.stride(2),
        S=block_size,
        HKV=kv_heads,
        HKV_PADDED=triton.next_power_of_2(kv_heads),
        D=head_dim,
        D_PADDED=triton.next_power_of_2(head_dim),
        MANTISSA=mantissa,
        BIAS=bias,
        LARGEST=largest,
        num_warps=4,
    )


def copy(planes: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy blocks of planes [P, N, ...]; no block is both a source and a target."""
    _move(planes, planes, sources, targets)


def gather(planes: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """`block_ops.gather_blocks`: planes [P, N, ...] -> [n, P, ...]."""
    shape = (len(blocks), planes.shape[0], *planes.shape[2:])
    buffer = torch.empty(shape, dtype=planes.dtype, device=planes.device)
    _move(planes, buffer.transpose(0, 1), blocks, None)
    return buffer


def scatter(planes: torch.Tensor, blocks: Sequence[int], buffer: torch.Tensor) -> None:
    """`block_ops.scatter_blocks`: buffer [n, P, ...] -> planes [P, N, ...]."""
    _move(buffer.transpose(0, 1), planes, None, blocks)


def _move(
    source: torch.Tensor, target: torch.Tensor, source_blocks: Sequence[int] | None, target_blocks: Sequence[int] | None
) -> None:
    """Blocks from [P, N, ...] to [P, N', ...], in the widest words that a block is made of."""
    source, target = _words(source), _words(target)
    planes, _, words = source.shape
    piece = _PIECE // source.dtype.itemsize
    blocks = source_blocks or target_blocks or ()
    lists = (
        None if numbers is None else torch.tensor(numbers, dtype=torch.int64, device=source.device)
        for numbers in (source_blocks, target_blocks)
    )
    _move_kernel[(len(blocks), planes, triton.cdiv(words, piece))](
        source,
        target,
        *lists,
        SOURCE_PLANE=source.stride(0),
        SOURCE_BLOCK=source.stride(1),
        TARGET_PLANE=target.stride(0),
        TARGET_BLOCK=target.stride(1),
        WORDS=words,
        PIECE=piece,
        num_warps=4,
    )


def _words(planes: torch.Tensor) -> torch.Tensor:
    """[P, N, ...] as [P, N, words]. Raises ValueError where the elements of a block do not lie side by side."""
    if not planes[:1, :1].flatten(1).is_contiguous() or not planes[0, 0].is_contiguous():
        raise ValueError(f"a block has strides {planes.stride()[2:]}, wanted a contiguous one")
    bytes_of_block = planes[0, 0].numel() * planes.dtype.itemsize
    word = next(word for word in _WORDS if bytes_of_block % word.itemsize == 0)
    return planes.flatten(2).view(torch.uint8).view(word)
