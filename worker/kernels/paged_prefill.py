"""Paged prefill in Triton: chunks of several new tokens, each over its history, all of a ragged batch in one launch.

A chunk's queries share the keys that they read, so a prefill is bound by arithmetic: a program takes as many rows as
fit (queries of all heads of a KV head's group), reads each tile of keys and values once for them, and masks only the
tiles that some row does not see.

Which sequence a program works for is found on the device, by searching `query_starts`: the grid has as many programs
as T new tokens of B sequences can need, those without work leave at once, and nothing is read back to the host. The
programs of a chunk go from its end to its beginning, as later queries see more and take longer.

Grid: (T // queries + B, Hkv). Sequences with one new token are left to paged_decode.

Source of the loop over keys: "FlashAttention-2" (Dao, 2023).
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# A kernel is Triton's language in Python's grammar.

import torch
import triton
import triton.language as tl

from worker.kernels.launch import Call, shared_shape
from worker.kernels.paged_tile import LOG2_E, head_factor, load_queries, nothing_seen, sweep, unit_of_scores, whole


@triton.jit
def _find_sequence(starts_ptr, sequences, program, QUERIES: tl.constexpr):
    """The last sequence whose first program, query_starts[b] // QUERIES + b, is not after this one."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // QUERIES + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sequences,
    scale,
    window,
    soft_cap,
    q_token_stride,
    q_head_stride,
    table_stride,
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
    """Attend ROWS // GROUP queries of one chunk, all heads of one group: row r is query r // GROUP, head r % GROUP."""
    QUERIES: tl.constexpr = ROWS // GROUP
    program, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = _find_sequence(starts_ptr, sequences, program, QUERIES)
    token = tl.load(starts_ptr + b)
    count = tl.load(starts_ptr + b + 1) - token
    last_first = tl.cdiv(count, QUERIES) - 1
    query = (last_first - (program - token // QUERIES - b)) * QUERIES
    if (count == 1) | (query < 0):
        return
    length = tl.load(lengths_ptr + b)
    history = length - count

    row, element = tl.arange(0, ROWS), tl.arange(0, D_PADDED)
    head = kv_head * GROUP + row % GROUP
    own = query + row // GROUP
    live = (row < QUERIES * GROUP) & (own < count)
    stored = live[:, None] & (element < D)[None, :]
    at = (token + own).to(tl.int64) * q_token_stride + head * q_head_stride
    q = load_queries(q_ptr, at, element, stored, POOL, DOT)
    peak, total, acc = nothing_seen(ROWS, D_PADDED, POOL)
    if sinks_ptr is not None:  # a position before all others: its score counts, its value is zero
        peak = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E
        total += 1.0
    score_unit = unit_of_scores(scale, soft_cap, k_scale_ptr, kv_head, POOL)

    # Row r sees [row_begin[r], row_end[r]); the program reads [begin, end); every row sees all of [inner, full).
    row_end = history + own + 1
    end = history + tl.minimum(query + QUERIES, count)
    full = (history + query + 1) // TILE * TILE
    k_ptr += kv_head * K_HEAD
    v_ptr += kv_head * V_HEAD
    table_ptr = tables_ptr + b.to(tl.int64) * table_stride
    if window is None:
        row_begin = tl.zeros((ROWS,), tl.int32)
        inner = 0
    else:
        row_begin = tl.maximum(row_end - window, 0)
        begin = tl.maximum(history + query + 1 - window, 0)
        begin = begin // S * S  # blocks before the window are not read
        inner = begin + tl.cdiv(tl.maximum(end - window, 0) - begin, TILE) * TILE
        inner = tl.minimum(tl.maximum(inner, begin), begin + tl.cdiv(end - begin, TILE) * TILE)
        full = inner + tl.maximum(history + query + 1 - inner, 0) // TILE * TILE
        peak, total, acc = sweep(
            q, peak, total, acc, k_ptr, v_ptr, table_ptr, begin, tl.minimum(inner, end), row_begin, row_end,
            score_unit, soft_cap, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, D, S, TILE, True, POOL, DOT, PRECISION,
        )  # fmt: skip
    peak, total, acc = sweep(
        q, peak, total, acc, k_ptr, v_ptr, table_ptr, inner, full, row_begin, row_end,
        score_unit, soft_cap, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, D, S, TILE, False, POOL, DOT, PRECISION,
    )  # fmt: skip
    peak, total, acc = sweep(
        q, peak, total, acc, k_ptr, v_ptr, table_ptr, full, end, row_begin, row_end,
        score_unit, soft_cap, K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, D, S, TILE, True, POOL, DOT, PRECISION,
    )  # fmt: skip
    out = whole(acc) / tl.where(live, total, 1.0)[:, None] * head_factor(v_scale_ptr, kv_head, POOL)
    at = ((token + own).to(tl.int64) * HQ + head) * D
    tl.store(out_ptr + at[:, None] + element[None, :], out.to(out_ptr.dtype.element_ty), mask=stored)


def prefill(call: Call, out: torch.Tensor) -> None:
    """Attend every sequence with more than one new token; the rows of others in `out` [T, Hq, D] stay as they are."""
    shape = shared_shape(call)
    programs = call.q.shape[0] // (shape.rows // call.group) + call.num_sequences
    _prefill_kernel[(programs, call.k_pool.shape[1])](
        **call.tensors(), out_ptr=out, sequences=call.num_sequences, **call.constants(shape)
    )
