"""Paged decode in Triton: sequences that have one new token, their histories cut into splits that run side by side.

One query reads its whole history, so a decode is as fast as memory; what a kernel can do is read every byte once, in
wide loads, from many programs. All query heads of a KV head share a program, and its history is cut into splits that
are merged afterwards by their log-sum-exp. Where a split ends depends on the sequence's own length alone, and a merge
adds in the order of the splits: a sequence's result has the same bits in any company.

Sources: blocks behind a table, "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(Kwon et al., 2023); splits and their merge, "Flash-Decoding for long-context inference" (Dao, Haziza, Massa and Sizov,
2023).

Grid of `_split_kernel`: (B, Hkv, splits); of `_merge_kernel`: (B, Hq). Programs of sequences with several new tokens
leave at once: paged_prefill computes those.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# A kernel is Triton's language in Python's grammar.

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from worker.kernels.launch import Call, decode_shape
from worker.kernels.paged_tile import LOG2_E, head_factor, load_queries, nothing_seen, sweep, unit_of_scores, whole

SHORTEST_SPLIT = tl.constexpr(256)
"""Positions; a program below takes longer to start than to read."""
LONG_SPLIT = tl.constexpr(512)
"""From 4,096 positions on: half as many results to merge, 3 % of the traffic at D 128 and 8 heads a group."""
MOST_SPLITS = tl.constexpr(32)
"""Of one sequence: enough, with 8 KV heads, to fill a large GPU with a single sequence."""
_MERGED_AT_ONCE = tl.constexpr(16)


@dataclass(frozen=True, slots=True)
class Partial:
    """Results of splits, to be merged; slots that a sequence has no split for stay unwritten and unread."""

    values: torch.Tensor
    """float32 [B, Hq, splits, D]."""
    lse: torch.Tensor
    """float32 [B, Hq, splits]: log2 of the sum of exp2 of the scores."""

    @classmethod
    def empty(cls, call: Call, splits: int) -> "Partial":
        """Room for `splits` of every sequence; for none where one split is all that there can be."""
        sequences = call.num_sequences if splits > 1 else 0
        values = torch.empty(sequences, call.q.shape[1], splits, call.q.shape[2], device=call.q.device)
        return cls(values, torch.empty(values.shape[:3], device=call.q.device))

    @property
    def splits(self) -> int:
        """Room of a sequence."""
        return self.values.shape[2]

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the kernels that write and merge them."""
        return {"partial_ptr": self.values, "lse_ptr": self.lse, "SPLITS": self.splits}


@triton.jit
def split_positions(span):
    """How many positions a split has, for a history of `span` positions; a power of two. The rule's only home."""
    split = SHORTEST_SPLIT
    while (split < LONG_SPLIT) & (split * 8 < span):
        split *= 2
    while split * MOST_SPLITS < span:
        split *= 2
    return split


def most_splits(capacity: int) -> int:
    """Splits that a history of at most `capacity` positions can have: what the grid and the partial results hold."""
    if capacity <= SHORTEST_SPLIT.value * 8:
        return max(1, -(-capacity // SHORTEST_SPLIT.value))
    return max(8, min(MOST_SPLITS.value, -(-capacity // LONG_SPLIT.value)))


@triton.jit
def _own_part(length, window, shared_ptr, b, S: tl.constexpr):
    """Of one sequence: its first visible position, where its splits begin, and how many results precede theirs.

    Splits begin with a block: those before the window are not read, and those shared with others are done already.
    """
    begin = 0 if window is None else tl.maximum(length - window, 0)
    origin = begin // S * S
    done = 0
    if shared_ptr is not None:
        origin = tl.load(shared_ptr + b)
        done = tl.cdiv(origin, split_positions(origin))
    return begin, origin, done


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    shared_ptr,
    scale,
    window,
    soft_cap,
    q_token_stride,
    q_head_stride,
    table_stride,
    SPLITS,
    K_BLOCK: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    HQ: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    S: tl.constexpr,
    TILE: tl.constexpr,
    POOL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend the GROUP query heads of a KV head to one split of a history; ROWS >= GROUP pads for the tensor core.

    With one split the result goes to `out`, else its share of each head to `partial` [B, Hq, SPLITS, D] and the
    log2 of its weight to `lse` [B, Hq, SPLITS].
    """
    b, kv_head, z = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(starts_ptr + b).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    begin, origin, done = _own_part(length, window, shared_ptr, b, S)
    split = split_positions(length - origin)
    first = origin + z * split
    if (first >= length) | (tl.load(starts_ptr + b + 1) - token > 1):
        return
    end = tl.minimum(first + split, length)

    row, element = tl.arange(0, ROWS), tl.arange(0, D_PADDED)
    head = kv_head * GROUP + row
    live = row < GROUP
    stored = live[:, None] & (element < D)[None, :]
    at = token * q_token_stride + head * q_head_stride
    q = load_queries(q_ptr, at, element, stored, POOL, DOT)
    peak, total, acc = nothing_seen(ROWS, D_PADDED, POOL)
    if sinks_ptr is not None:  # noqa: SIM102 - the one is decided when compiling, the other when running
        if z == 0:  # a sink is a position before all others: its score counts, its value is zero
            peak = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E
            total += 1.0
    score_unit = unit_of_scores(scale, soft_cap, k_scale_ptr, kv_head, POOL)
    row_begin = tl.zeros((ROWS,), tl.int32) + begin
    row_end = tl.zeros((ROWS,), tl.int32) + length
    peak, total, acc = sweep(
        q, peak, total, acc, k_ptr + kv_head * K_HEAD, v_ptr + kv_head * V_HEAD, tables_ptr + b * table_stride,
        first, end, row_begin, row_end, score_unit, soft_cap,
        K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, D, S, TILE, True, POOL, DOT, PRECISION,
    )  # fmt: skip
    out = whole(acc) / total[:, None] * head_factor(v_scale_ptr, kv_head, POOL)
    if done + tl.cdiv(length - origin, split) == 1:
        at = (token * HQ + head) * D
        tl.store(out_ptr + at[:, None] + element[None, :], out.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        at = (b * HQ + head) * SPLITS + done + z
        tl.store(partial_ptr + at[:, None] * D + element[None, :], out, mask=stored)
        tl.store(lse_ptr + at, peak + tl.log2(total), mask=live)


@triton.jit
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    shared_ptr,
    window,
    SPLITS,
    HQ: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    S: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add up the splits of one head, AT_ONCE at a time, however many the grid has: the order is the sequence's own."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(starts_ptr + b).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    _, origin, done = _own_part(length, window, shared_ptr, b, S)
    count = done + tl.cdiv(length - origin, split_positions(length - origin))
    if (count == 1) | (tl.load(starts_ptr + b + 1) - token > 1):
        return
    element, share = tl.arange(0, D_PADDED), tl.arange(0, AT_ONCE)
    base = (b * HQ + head) * SPLITS
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((D_PADDED,), tl.float32)
    for first in range(0, count, AT_ONCE):
        live = first + share < count
        at = base + first + share
        lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"))
        stored = live[:, None] & (element < D)[None, :]
        partial = tl.load(partial_ptr + at[:, None] * D + element[None, :], mask=stored, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weight, fade = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
        acc = acc * fade + tl.sum(partial * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        peak = new_peak
    at = (token * HQ + head) * D + element
    tl.store(out_ptr + at, (acc / total).to(out_ptr.dtype.element_ty), mask=element < D)


def decode(call: Call, out: torch.Tensor, partial: Partial, shared: torch.Tensor | None) -> None:
    """Attend every sequence that has one new token; the rows of others in `out` [T, Hq, D] stay as they are.

    Args:
        call: its arguments were checked.
        out: [T, Hq, D], contiguous, in q's dtype.
        partial: room for `most_splits` of the tables' capacity, and for the splits of shared parts.
        shared: int32 [B], how many leading positions of each sequence are in `partial` already; None: of no sequence.
    """
    shape, tensors = decode_shape(call), call.tensors()
    constants = call.constants(shape)
    common = {"out_ptr": out, "shared_ptr": shared, **partial.arguments}
    grid = (call.num_sequences, call.k_pool.shape[1], most_splits(call.capacity))
    _split_kernel[grid](**tensors, **common, **constants)
    if partial.splits > 1:
        read = {name: tensors[name] for name in ("lengths_ptr", "starts_ptr", "window")}
        sizes = {name: constants[name] for name in ("HQ", "D", "D_PADDED", "S")}
        _merge_kernel[(call.num_sequences, call.q.shape[1])](
            **read, **common, **sizes, AT_ONCE=_MERGED_AT_ONCE, num_warps=4
        )
