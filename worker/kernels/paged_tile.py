"""What the attention kernels share: one step of a softmax that runs over keys and values read through a block table.

A program holds M rows: a row is one query of one head, and all rows of a program read the same KV head of the same
table. A step takes TILE consecutive positions, whatever the block size: each position looks up its own block, so a
tile may cross many small blocks or lie inside a large one.

Three numbers a row are carried from step to step: its largest score (`peak`, in units of log2, as exp2 is the
instruction that there is), the sum of exp2(score - peak) (`total`), and the weighted sum of values (`acc`). Two halves
of a history can be computed apart and merged, which is what paged_decode and paged_shared do ("Online normalizer
calculation for softmax", Milakov and Gimelshein, 2018).

Loads of K *and* of V are masked: a slot that no position owns may hold NaN, and 0 * NaN is NaN. Offsets are 64-bit: a
pool may hold more than 2^31 elements.

A pool of float8 is loaded as words of two. Byte by byte a thread would get eight bytes of a value's row, not sixteen:
the compiler lays out an operand whose rows go along D in eights of elements, whatever their size. And it would fetch
each byte from shared memory alone, since what transposes a tile there works on 16 bits. So queries, keys, values and
sums come in *parts*: tuples of one tensor, or of two, the even elements of D and the odd ones. What has been multiplied
is put together at the end.
"""

# pyright: reportGeneralTypeIssues=false
# A kernel is Triton's language in Python's grammar.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def floats_of_e4m3(bits):
    """float8_e4m3fn as fp16, times 2^-8: uint8 -> fp16, exactly, with shifts alone, on any target.

    The exponent moves to the low bits of fp16's, whose bias is larger by 8; subnormal numbers stay right. Where all
    seven bits are set, which is NaN, one more in the last place carries into fp16's highest exponent bit: NaN as well.
    """
    wide = bits.to(tl.uint16)
    size = (wide & 0x7F) << 7
    return ((wide & 0x80) << 8 | size | (size + 0x80) & 0x4000).to(tl.float16, bitcast=True)


@triton.jit
def floats_of_e5m2(bits):
    """float8_e5m2 as fp16: it is the upper half of one."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def load_tile(at, mask, POOL: tl.constexpr, DOT: tl.constexpr):
    """Keys or values [TILE, D'] in the dtype that they are multiplied in, in parts, zero where masked.

    `at` points to what holds one number, or to words of two float8: the low bytes of those are the even elements of
    each row, and become the first part, the high bytes the odd ones.
    """
    words = tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)
    if POOL == "plain":
        parts = (words.to(DOT),)
    else:
        parts = (floats_of(words.to(tl.uint8), POOL).to(DOT), floats_of((words >> 8).to(tl.uint8), POOL).to(DOT))
    return parts


@triton.jit
def floats_of(bits, POOL: tl.constexpr):
    """The float8 of these bits in units of `pool_unit`: uint8 -> fp16, exactly."""
    if POOL == "e4m3":
        x = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif POOL == "e5m2":
        x = bits.to(tl.float8e5, bitcast=True).to(tl.float16)
    elif POOL == "e4m3 bits":
        x = floats_of_e4m3(bits)
    else:
        x = floats_of_e5m2(bits)
    return x


@triton.jit
def pool_unit(POOL: tl.constexpr):
    """What a number that `load_tile` gives must be multiplied by."""
    return 256.0 if POOL == "e4m3 bits" else 1.0


@triton.jit
def head_factor(scale_ptr, kv_head, POOL: tl.constexpr):
    """The scale of a KV head, if there is one, and the unit of its pool."""
    factor = pool_unit(POOL)
    if scale_ptr is not None:
        factor *= tl.load(scale_ptr + kv_head)
    return factor


@triton.jit
def parts_of(x, POOL: tl.constexpr):
    """Rows [M, D'] in the parts in which `load_tile` gives keys: all of it, or the even elements and the odd ones."""
    return (x,) if POOL == "plain" else tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def whole(parts):
    """What `parts_of` took apart."""
    return parts[0] if len(parts) == 1 else tl.interleave(parts[0], parts[1])


@triton.jit
def scores_of(q, k, PRECISION: tl.constexpr):
    """Products of rows and keys, both in parts: [M, D'], [TILE, D'] -> [M, TILE]."""
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
    if len(q) == 2:
        scores = tl.dot(q[1], tl.trans(k[1]), scores, input_precision=PRECISION)
    return scores


@triton.jit
def add_values(acc, fade, weights, v, PRECISION: tl.constexpr):
    """What earlier sums `acc` [M, D'] fade to, and weights [M, TILE] times values [TILE, D'], in parts."""
    sums = (tl.dot(weights, v[0], acc[0] * fade[:, None], input_precision=PRECISION),)
    if len(v) == 2:
        sums = (sums[0], tl.dot(weights, v[1], acc[1] * fade[:, None], input_precision=PRECISION))
    return sums


@triton.jit
def load_queries(q_ptr, at, element, stored, POOL: tl.constexpr, DOT: tl.constexpr):
    """Rows of queries [M, D'] in parts, zero where not `stored`; row r lies from `q_ptr + at[r]` on."""
    return parts_of(tl.load(q_ptr + at[:, None] + element[None, :], mask=stored, other=0.0).to(DOT), POOL)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, D_PADDED: tl.constexpr, POOL: tl.constexpr):
    """Peak, total and sums of rows before their first position."""
    acc = parts_of(tl.zeros((ROWS, D_PADDED), tl.float32), POOL)
    return tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32), acc


@triton.jit
def unit_of_scores(scale, soft_cap, k_scale_ptr, kv_head, POOL: tl.constexpr):
    """What products of queries and keys are multiplied by: in units of log2, unless a soft cap comes in between."""
    unit = scale * head_factor(k_scale_ptr, kv_head, POOL)
    if soft_cap is None:
        unit *= LOG2_E
    return unit


@triton.jit
def sweep(
    q,
    peak,
    total,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    row_begin,
    row_end,
    score_unit,
    soft_cap,
    K_BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_SLOT: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    POOL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Step over positions [begin, end): q [M, D'], peak and total [M], acc [M, D'] in parts -> the last three.

    D' is D padded to a power of two. Row r sees [row_begin[r], row_end[r]). Without MASKED every row sees every
    position, and they are whole tiles. `k_ptr` and `v_ptr` point to the KV head, `table_ptr` to the row of the table.
    """
    WORDS: tl.constexpr = q[0].shape[1]
    WORDS_OF_ROW: tl.constexpr = D // len(q)
    word = tl.arange(0, WORDS)[None, :]
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        if MASKED:
            block = tl.load(table_ptr + position // S, mask=position < end, other=0).to(tl.int64)
            readable = (position < end)[:, None] & (word < WORDS_OF_ROW)
        else:
            block = tl.load(table_ptr + position // S).to(tl.int64)
            readable = None if WORDS_OF_ROW == WORDS else word < WORDS_OF_ROW
        offset = (position % S).to(tl.int64)
        k = load_tile(k_ptr + (block * K_BLOCK + offset * K_SLOT)[:, None] + word, readable, POOL, DOT)
        scores = scores_of(q, k, PRECISION) * score_unit
        if soft_cap is not None:  # c * tanh(x / c), as 1 - 2 / (e^2x + 1): no special case where e^2x is infinite
            scores = soft_cap * (LOG2_E - 2 * LOG2_E / (tl.exp2(scores * (2 * LOG2_E / soft_cap)) + 1))
        if MASKED:
            visible = (position[None, :] >= row_begin[:, None]) & (position[None, :] < row_end[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if MASKED else new_peak  # not -inf - -inf, a NaN
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        v = load_tile(v_ptr + (block * V_BLOCK + offset * V_SLOT)[:, None] + word, readable, POOL, DOT)
        acc = add_values(acc, fade, weights.to(DOT), v, PRECISION)
        peak, total = new_peak, total * fade + tl.sum(weights, 1)
    return peak, total, acc
