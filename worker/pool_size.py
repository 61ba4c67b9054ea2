"""How much memory the pool gets: what it was told, or on a GPU what is left there.

Once requests run, nothing but steps takes memory, and no step takes more than the largest one. So a GPU's pool may have
what is free when the model lies there, less what a largest step takes at its height, less a share that is left alone:
for the driver, for whoever else uses the device, and for what this arithmetic does not know.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.ids import BlockId, SequenceId
from octavo.records.sampling import SamplingParams
from worker.core.step import Chunk, Draw, StepPlan

CPU_BUDGET_BYTES = 512 << 20
"""A CPU has no memory of its own that would be free to take, so a worker there takes this much unless told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What no step exceeds."""

    step_tokens: int = 512
    sequences: int = 64
    sequence_tokens: int
    """Of the model."""


class Meter(Protocol):
    """The memory of a device, in bytes."""

    @property
    def total(self) -> int:
        """All that there is."""
        ...

    @property
    def free(self) -> int:
        """What nobody has, after this process gave back what it holds and does not use."""
        ...

    def taken_by(self, run: Callable[[], None]) -> int:
        """What `run` takes at its height, beside what was taken before."""
        ...


class CudaMeter:
    """The device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        """See Meter."""
        return torch.cuda.mem_get_info(self._device)[1]

    @property
    def free(self) -> int:
        """See Meter."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def taken_by(self, run: Callable[[], None]) -> int:
        """See Meter. torch keeps what it has taken until it is told otherwise: after `run`, that is the height of it.

        What is measured is the device, so kernels that were loaded and workspaces of libraries count as well.
        """
        before = self.free
        run()
        torch.cuda.synchronize(self._device)
        after = torch.cuda.mem_get_info(self._device)[0]
        return max(0, before - after)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What a profiling pass has found."""

    total_bytes: int
    free_bytes: int
    """With the model there, and no pool."""
    step_bytes: int
    """Of a largest step, at its height."""

    def budget(self, share: float) -> int:
        """Bytes of the pool, if the device is to be taken up to `share` of it.

        Raises:
            ValueError: nothing is left.
        """
        left_alone = self.total_bytes - int(share * self.total_bytes)
        budget = self.free_bytes - self.step_bytes - left_alone
        if budget <= 0:
            raise ValueError(
                f"no memory is left for the KV pool: of {self.total_bytes} bytes {self.free_bytes} are free, a largest "
                f"step takes {self.step_bytes}, and {left_alone} are left alone (gpu_memory_share {share})"
            )
        return budget


def profile(meter: Meter, largest: StepPlan, execute: Callable[[StepPlan], int]) -> DeviceMemory:
    """Run a largest step and see what it takes.

    Args:
        meter: of the device.
        largest: see `largest_step`.
        execute: runs it on a pool made for it, and returns the bytes of that pool, which is gone afterwards.
    """
    pools: list[int] = []
    taken = meter.taken_by(lambda: pools.append(execute(largest)))
    return DeviceMemory(total_bytes=meter.total, free_bytes=meter.free, step_bytes=max(0, taken - sum(pools)))


def largest_step(limits: Limits, block_size: int) -> StepPlan:
    """As many tokens as a step may have, of as many sequences, each of which draws in the way that takes most memory.

    Its blocks are those from 0 on, each used once.
    """
    sequences = min(limits.sequences, limits.step_tokens)
    each, more = divmod(limits.step_tokens, sequences)
    counts = [min(each + (at < more), limits.sequence_tokens) for at in range(sequences)]
    chunks: list[Chunk] = []
    first = 0
    for at, count in enumerate(counts):
        blocks = -(-count // block_size)
        draw = Draw(SamplingParams(temperature=1.0, top_p=0.9), 0, count)
        table = [BlockId(block) for block in range(first, first + blocks)]
        chunks.append(Chunk(sequence=SequenceId(at), start=0, tokens=(0,) * count, table=table, draws=(draw,)))
        first += blocks
    return StepPlan(tuple(chunks))


def blocks_of(plan: StepPlan) -> int:
    """Blocks that a pool must have for the plan."""
    return 1 + max(block for chunk in plan.chunks for block in chunk.table)
