"""Which decodes of a step begin with the same blocks, and whether reading those once for all of them pays.

Sequences with a common prompt share its blocks. Attention that goes sequence by sequence reads them once for each;
when the common part is attended for all queries together, it is read once. What is saved is counted in positions:

    a group of k sequences with n common positions saves  (k - 1) * n - k * MEMBER_POSITIONS
    and the plan is worth its launch from                   LAUNCH_POSITIONS  on, over all groups.

A sequence is in one group at most. Tables that share at several depths (a system prompt, then a document) form a tree;
the groups chosen are those of its nodes that save most together.

This is a plan, made on the host once a step. It changes in which order a sum is taken, by what else is in the batch: a
deterministic worker makes none.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MEMBER_POSITIONS = 64
"""What a member costs more than alone: one more result to merge, and a program to start for its own part."""
LAUNCH_POSITIONS = 8192
"""What the launch of a kernel costs: 5 microseconds, in which a large GPU reads 24 MB, at 4 KB a position."""

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Groups of decodes, on the device; G groups."""

    members: torch.Tensor
    """int32 [members of all groups]: sequences, group by group."""
    member_starts: torch.Tensor
    """int32 [G + 1]: where each group's members begin, and their number."""
    group_positions: torch.Tensor
    """int32 [G]: how many positions the members of each group share."""
    positions: torch.Tensor
    """int32 [B]: the same for each sequence; 0 where it is in no group."""
    most_members: int
    most_positions: int


@dataclass(slots=True)
class _Node:
    """An interval of the sorted tables whose rows agree in their first `depth` blocks, while it is open."""

    start: int
    depth: int
    saved: int = 0
    """By the groups inside it that were chosen so far."""
    groups: tuple[tuple[int, int, int], ...] = ()
    """(first row, row behind the last, depth) of those."""


def plan(
    tables: Ints, lengths: Ints, query_starts: Ints, *, block_size: int, device: torch.device
) -> SharedPrefixes | None:
    """Group the decodes of a step by their first blocks: tables [B, M]; lengths [B]; query_starts [B + 1].

    Returns None where reading each sequence's blocks for itself costs less.
    """
    order, rows = _sorted_rows(tables, lengths, query_starts, block_size)
    saved, groups = _best_groups(_common_blocks(rows), block_size)
    if saved < LAUNCH_POSITIONS:
        return None
    shared = np.zeros(len(tables), np.int32)
    for start, end, depth in groups:
        shared[order[start:end]] = depth * block_size
    counts = [end - start for start, end, _ in groups]
    depths = [depth * block_size for *_, depth in groups]

    def ints(values: npt.ArrayLike) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(device, non_blocking=True)

    return SharedPrefixes(
        members=ints(np.concatenate([order[start:end] for start, end, _ in groups])),
        member_starts=ints(np.cumsum([0, *counts])),
        group_positions=ints(depths),
        positions=ints(shared),
        most_members=max(counts),
        most_positions=max(depths),
    )


def _sorted_rows(tables: Ints, lengths: Ints, query_starts: Ints, block_size: int) -> tuple[Ints, Ints]:
    """The decodes, so that those that begin alike are neighbours, and their tables as far as they may be shared.

    The block of the new token is a sequence's own. Entries from there on become numbers that no other row has.
    """
    order = np.flatnonzero(np.diff(query_starts) == 1).astype(np.int32)
    rows = tables[order].astype(">i4")
    own = np.arange(tables.shape[1]) >= ((lengths[order] - 1) // block_size)[:, None]
    rows = np.where(own, -1 - np.arange(len(order))[:, None], rows).astype(">i4")
    sorted_order = np.array(sorted(range(len(order)), key=lambda row: rows[row].tobytes()), np.int64)
    return order[sorted_order], rows[sorted_order]


def _common_blocks(rows: Ints) -> list[int]:
    """How many leading blocks each row has in common with the next; the last with none."""
    if not rows.size:
        return []
    differs = rows[:-1] != rows[1:]
    return [*differs.argmax(axis=1).tolist(), 0]  # every two rows differ somewhere: from their own blocks on


def _best_groups(common: list[int], block_size: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The groups that save most, and how many positions: over the tree of intervals that agree in a depth."""
    stack = [_Node(0, 0)]
    for row, depth in enumerate(common):
        start = row
        while stack[-1].depth > depth:
            closed = stack.pop()
            start = closed.start
            _choose(closed, row + 1, block_size)
            if stack[-1].depth < depth:
                stack.append(_Node(start, depth))
            stack[-1].saved += closed.saved
            stack[-1].groups += closed.groups
        if stack[-1].depth < depth:
            stack.append(_Node(start, depth))
    return stack[0].saved, stack[0].groups


def _choose(node: _Node, end: int, block_size: int) -> None:
    """Make one group of a whole interval where that saves more than the groups inside it."""
    members = end - node.start
    saved = (members - 1) * node.depth * block_size - members * MEMBER_POSITIONS
    if saved > node.saved:
        node.saved, node.groups = saved, ((node.start, end, node.depth),)
