"""What several decodes share of their histories, attended once for all of them, in Triton (shared_prefix plans it).

A group's queries become the rows of one program, as those of a chunk do, so that one read of a block serves them all.
Nothing new happens afterwards: the results are splits like any other, and paged_decode merges them with the splits of
each sequence's own part. They come first, and the parts are cut by the same rule.

Sources: "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (Juravsky et al., 2024); "Cascade Inference:
Memory Bandwidth Efficient Shared Prefix Batch Decoding" (Ye et al., 2024).

Grid: (groups * programs of the largest group, Hkv, splits of the longest part).
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# A kernel is Triton's language in Python's grammar.

import triton
import triton.language as tl

from worker.kernels.launch import Call, shared_shape
from worker.kernels.paged_decode import Partial, most_splits, split_positions
from worker.kernels.paged_tile import head_factor, load_queries, nothing_seen, sweep, unit_of_scores, whole
from worker.kernels.shared_prefix import SharedPrefixes


@triton.jit
def _shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    sinks_ptr,
    members_ptr,
    member_starts_ptr,
    group_positions_ptr,
    partial_ptr,
    lse_ptr,
    k_scale_ptr,
    v_scale_ptr,
    group_programs,
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
    """Attend the queries of ROWS // GROUP members, all heads of one group, to one split of what they share.

    Row r is member r // GROUP, head r % GROUP. Lengths, sinks and window belong to the members' own parts.
    """
    MEMBERS: tl.constexpr = ROWS // GROUP
    group, kv_head, z = tl.program_id(0) // group_programs, tl.program_id(1).to(tl.int64), tl.program_id(2)
    positions = tl.load(group_positions_ptr + group)
    split = split_positions(positions)
    first = z * split
    first_member = tl.load(member_starts_ptr + group) + tl.program_id(0) % group_programs * MEMBERS
    last_member = tl.load(member_starts_ptr + group + 1)
    if (first >= positions) | (first_member >= last_member):
        return
    end = tl.minimum(first + split, positions)

    row, element = tl.arange(0, ROWS), tl.arange(0, D_PADDED)
    head = kv_head * GROUP + row % GROUP
    member = first_member + row // GROUP
    live = (row < MEMBERS * GROUP) & (member < last_member)
    b = tl.load(members_ptr + member, mask=live, other=0).to(tl.int64)
    token = tl.load(starts_ptr + b, mask=live, other=0).to(tl.int64)
    stored = live[:, None] & (element < D)[None, :]
    at = token * q_token_stride + head * q_head_stride
    q = load_queries(q_ptr, at, element, stored, POOL, DOT)
    peak, total, acc = nothing_seen(ROWS, D_PADDED, POOL)
    score_unit = unit_of_scores(scale, soft_cap, k_scale_ptr, kv_head, POOL)
    row_begin = tl.zeros((ROWS,), tl.int32)
    row_end = row_begin + positions
    table_ptr = tables_ptr + tl.load(members_ptr + first_member).to(tl.int64) * table_stride
    peak, total, acc = sweep(
        q, peak, total, acc, k_ptr + kv_head * K_HEAD, v_ptr + kv_head * V_HEAD, table_ptr,
        first, end, row_begin, row_end, score_unit, soft_cap,
        K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, D, S, TILE, True, POOL, DOT, PRECISION,
    )  # fmt: skip
    out = whole(acc) / total[:, None] * head_factor(v_scale_ptr, kv_head, POOL)
    at = (b * HQ + head) * SPLITS + z
    tl.store(partial_ptr + at[:, None] * D + element[None, :], out, mask=stored)
    tl.store(lse_ptr + at, peak + tl.log2(total), mask=live)


def attend_shared(call: Call, partial: Partial, shared: SharedPrefixes) -> None:
    """Write the results of the shared parts into `partial`, from its first split on; the plan is for this batch."""
    shape = shared_shape(call)
    group_programs = -(-shared.most_members // (shape.rows // call.group))
    grid = (len(shared.group_positions) * group_programs, call.k_pool.shape[1], most_splits(shared.most_positions))
    _shared_kernel[grid](
        **call.tensors(),
        **partial.arguments,
        **call.constants(shape),
        members_ptr=shared.members,
        member_starts_ptr=shared.member_starts,
        group_positions_ptr=shared.group_positions,
        group_programs=group_programs,
    )
