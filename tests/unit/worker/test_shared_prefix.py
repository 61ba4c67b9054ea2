"""Which decodes are grouped, held against every choice there is."""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.kernels import shared_prefix
from worker.kernels.shared_prefix import LAUNCH_POSITIONS, MEMBER_POSITIONS, SharedPrefixes

S = 16
CPU = torch.device("cpu")


def _plan(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], counts: Sequence[int] | None = None
) -> SharedPrefixes | None:
    width = max(map(len, tables))
    rows = np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int32)
    starts = np.cumsum([0, *(counts or [1] * len(tables))]).astype(np.int32)
    return shared_prefix.plan(rows, np.array(lengths, np.int32), starts, block_size=S, device=CPU)


def _groups(plan: SharedPrefixes | None) -> dict[frozenset[int], int]:
    """The members of each group, and how many positions they share."""
    if plan is None:
        return {}
    starts = plan.member_starts.tolist()
    members = [frozenset(plan.members[a:b].tolist()) for a, b in pairwise(starts)]
    return dict(zip(members, plan.group_positions.tolist(), strict=True))


def _sharing(members: int, blocks: int, first_own: int = 10_000, prompt: int = 0) -> list[list[int]]:
    """Tables of sequences that begin with the same blocks, and have one of their own."""
    return [[*range(prompt, prompt + blocks), first_own + member] for member in range(members)]


def test_sequences_with_a_common_prompt_are_one_group() -> None:
    tables = [*_sharing(20, 100), [5000, 5001]]

    plan = _plan(tables, [100 * S + 3] * 20 + [S + 1])

    assert plan is not None
    assert _groups(plan) == {frozenset(range(20)): 100 * S}
    assert plan.positions.tolist() == [100 * S] * 20 + [0]
    assert (plan.most_members, plan.most_positions) == (20, 100 * S)


def test_two_prompts_are_two_groups() -> None:
    tables = [*_sharing(8, 100), *_sharing(8, 150, first_own=20_000, prompt=500)]

    assert _groups(_plan(tables, [100 * S + 1] * 8 + [150 * S + 1] * 8)) == {
        frozenset(range(8)): 100 * S,
        frozenset(range(8, 16)): 150 * S,
    }


def test_of_two_depths_the_one_that_saves_more_is_chosen() -> None:
    few_blocks = [[*range(2), *range(100 * (1 + half), 100 * (1 + half) + 90)] for half in range(2)]
    tables = [[*few_blocks[row // 10], 1000 + row] for row in range(20)]
    lengths = [92 * S + 1] * 20

    assert set(_groups(_plan(tables, lengths)).values()) == {92 * S}, "two groups of ten, 92 blocks deep"

    shallow = [[*range(90), 200 + row // 10, 1000 + row] for row in range(20)]
    assert _groups(_plan(shallow, [91 * S + 1] * 20)) == {frozenset(range(20)): 90 * S}, "one of twenty, 90 deep"


def test_the_block_of_the_new_token_is_never_shared() -> None:
    """Two tables may be the same to the end, just after a fork: where they write is not shared."""
    plan = _plan([list(range(100))] * 10, [100 * S] * 10)

    assert _groups(plan) == {frozenset(range(10)): 99 * S}


def test_chunks_are_in_no_group() -> None:
    plan = _plan(_sharing(20, 100), [100 * S + 3] * 20, counts=[1] * 10 + [2] * 10)

    assert _groups(plan) == {frozenset(range(10)): 100 * S}


@pytest.mark.parametrize("blocks", [0, 1, 8])
def test_what_saves_too_little_is_not_planned(blocks: int) -> None:
    assert (20 - 1) * blocks * S < LAUNCH_POSITIONS
    assert _plan(_sharing(20, blocks), [blocks * S + 1] * 20) is None


def test_a_step_without_decodes_has_no_plan() -> None:
    assert _plan([[0, 1], [0, 1]], [20, 20], counts=[2, 3]) is None


def _saved(members: int, blocks: int) -> int:
    return (members - 1) * blocks * S - members * MEMBER_POSITIONS


def _best(tables: list[list[int]], depth: int = 0) -> int:
    """What any set of groups can save: each node of the tree of tables either is one, or leaves it to its children."""
    longer = sorted(table for table in tables if len(table) > depth)
    below = (list(rows) for _, rows in groupby(longer, key=lambda table: table[depth]))
    inner = sum(_best(rows, depth + 1) for rows in below if len(rows) > 1)
    return max(inner, _saved(len(tables), depth), 0)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=12))
def test_no_choice_of_groups_saves_more(paths: list[list[int]]) -> None:
    """Each step of a path is 40 blocks, named by the whole path up to it, as a prefix of a prompt is."""
    tables = [
        [hash((tuple(path[: step + 1]), block)) % 10**9 for step in range(len(path)) for block in range(40)]
        for path in paths
    ]
    rows = [[*table, 2 * 10**9 + number] for number, table in enumerate(tables)]

    groups = _groups(_plan(rows, [len(table) * S + 1 for table in tables]))

    best = _best(tables)
    saved = sum(_saved(len(members), positions // S) for members, positions in groups.items())
    assert saved == (best if best >= LAUNCH_POSITIONS else 0)
    for members, positions in groups.items():
        assert len({tuple(rows[member][: positions // S]) for member in members}) == 1, "they do begin alike"
    assert sum(map(len, groups)) == len(frozenset().union(*groups)), "a sequence is in one group at most"
