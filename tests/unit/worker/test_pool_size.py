"""What a pool gets on a GPU: what is left beside the model, a largest step, and a share that is left alone."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.step import StepPlan
from worker.pool_size import DeviceMemory, Limits, blocks_of, largest_step, profile

GIB = 1 << 30
COUNTS = st.integers(1, 200)


def test_the_pool_gets_what_model_and_step_and_the_share_left_alone_leave() -> None:
    memory = DeviceMemory(total_bytes=80 * GIB, free_bytes=60 * GIB, step_bytes=2 * GIB)

    assert memory.budget(0.75) == (60 - 2 - 20) * GIB
    assert memory.budget(1.0) == (60 - 2) * GIB


@given(st.integers(1, 1 << 40), st.floats(0, 1), st.floats(0, 0.5), st.floats(0.01, 1))
def test_pool_and_step_never_take_a_device_beyond_its_share(total: int, free: float, step: float, share: float) -> None:
    memory = DeviceMemory(total_bytes=total, free_bytes=int(free * total), step_bytes=int(step * total))
    try:
        budget = memory.budget(share)
    except ValueError:
        return
    taken = total - memory.free_bytes
    assert budget > 0
    assert taken + memory.step_bytes + budget <= share * total + 1


def test_where_nothing_is_left_all_four_numbers_are_told() -> None:
    memory = DeviceMemory(total_bytes=1000, free_bytes=150, step_bytes=51)

    with pytest.raises(ValueError, match=r"of 1000 bytes 150 are free, .* takes 51, and 100 are left alone .* 0\.9\)"):
        memory.budget(0.9)


@given(COUNTS, COUNTS, COUNTS, st.sampled_from([1, 7, 16]))
def test_a_largest_step_is_as_large_as_a_step_may_be(
    tokens: int, sequences: int, sequence_tokens: int, block_size: int
) -> None:
    limits = Limits(step_tokens=tokens, sequences=sequences, sequence_tokens=sequence_tokens)

    plan = largest_step(limits, block_size)

    counts = [len(chunk.tokens) for chunk in plan.chunks]
    assert len(counts) == min(sequences, tokens)
    assert sum(counts) == tokens or max(counts) == sequence_tokens
    assert sum(counts) <= tokens
    assert all(len(chunk.draws) == 1 for chunk in plan.chunks)
    blocks = [block for chunk in plan.chunks for block in chunk.table]
    assert sorted(blocks) == list(range(blocks_of(plan)))
    assert all(len(chunk.table) * block_size >= chunk.end for chunk in plan.chunks)


class FakeMeter:
    """A device that says what it is told to."""

    total, free = 1000, 700

    def __init__(self, taken: int) -> None:
        self._taken = taken

    def taken_by(self, run: Callable[[], None]) -> int:
        run()
        return self._taken


@pytest.mark.parametrize(("taken", "step"), [(90, 60), (20, 0)])
def test_the_profiled_steps_own_pool_is_not_counted_as_the_steps(taken: int, step: int) -> None:
    plan = largest_step(Limits(sequence_tokens=512), 16)
    ran: list[StepPlan] = []

    def execute(wanted: StepPlan) -> int:
        ran.append(wanted)
        return 30

    assert profile(FakeMeter(taken), plan, execute) == DeviceMemory(total_bytes=1000, free_bytes=700, step_bytes=step)
    assert ran == [plan]
