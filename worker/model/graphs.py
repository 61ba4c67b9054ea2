"""Decode steps as graphs: on a GPU, launching a small step's kernels one by one takes longer than running them.

A graph repeats what was recorded, at the same addresses and in the same shapes. So decodes run in batches of a few
sizes (`bucket_sizes`), each recorded once at start, and read their step from buffers that stay where they are. Rows
that a batch has too many of are *idle*: token 0 at position 0 of a block that nobody is ever granted. All write the
same there, and nobody reads what comes of them.

What a graph cannot repeat runs as ever: prefills, and steps that read common blocks once for all.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worker.kv_pool import KVPool
from worker.model.batch import Batch, Forward, HostBatch

log = logging.getLogger("octavo.worker")

Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Takes a function that reads and writes fixed tensors only; returns one that does the same again.

What that one returns holds until it is called again.
"""

_FINE = 8
"""Up to here batches double, then they grow by this much: at most so many rows less one are idle."""


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Sizes of batches so that every number of decodes up to `most` fits into one of them."""
    doubling = [1 << power for power in range(_FINE.bit_length()) if 1 << power < most]
    return (*doubling, *range(2 * _FINE, most, _FINE), most)


def again(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The capture of a device without graphs: just call it again."""
    return run


class CudaCapture:
    """Records CUDA graphs, all in one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record `run`. Raises RuntimeError if it does what a graph cannot repeat, such as reading a value back."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles kernels and chooses products, which must not happen in a recording
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = run()
        self._memory = self._memory or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """The decode steps of one model over one pool."""

    def __init__(
        self, forward: Forward, pool: KVPool, device: torch.device, capture: Capture, *, most: int, longest: int
    ) -> None:
        """Record every size of batch.

        Args:
            forward: the model.
            pool: with an idle block.
            device: of both.
            capture: how to record.
            most: sequences in a step.
            longest: positions of a sequence.

        Raises:
            RuntimeError: the model does what a graph cannot repeat.
        """
        assert pool.idle_block is not None, "the pool has no idle block"
        block_size = pool.shape.block_size
        self._sizes = bucket_sizes(most)
        self._idle, self._idle_slot = pool.idle_block, pool.idle_block * block_size

        def ints(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._ids, self._positions, self._slots = ints(most), ints(most), ints(most)
        self._tables = ints(most, -(-longest // block_size), dtype=torch.int32)
        self._lengths = ints(most, dtype=torch.int32)
        self._rows = torch.arange(most + 1, device=device)
        self._starts = self._rows.int()
        self._slots.fill_(self._idle_slot)  # nothing but idle rows to begin with
        self._lengths.fill_(1)
        self._tables[:, 0] = self._idle
        with torch.inference_mode():
            self._graphs = {
                size: capture(lambda size=size: forward(self._batch(size), pool)) for size in reversed(self._sizes)
            }

    def takes(self, batch: HostBatch) -> bool:
        """Whether the step is one of decodes that all draw, no more and no longer than were foreseen."""
        count, width = batch.tables.shape
        rows = len(batch.ids) == count == len(batch.logit_rows)
        return rows and count <= self._sizes[-1] and width <= self._tables.shape[1]

    def logits(self, batch: HostBatch) -> torch.Tensor:
        """Run a step that it `takes`: logits [B, V], which hold until the next one."""
        count = len(batch.ids)
        size = next(size for size in self._sizes if size >= count)
        self._fill(batch, size)
        return self._graphs[size]()[:count]

    def _batch(self, size: int) -> Batch:
        """The first rows of the buffers."""
        return Batch(
            ids=self._ids[None, :size],
            positions=self._positions[None, :size],
            slots=self._slots[:size],
            tables=self._tables[:size],
            lengths=self._lengths[:size],
            query_starts=self._starts[: size + 1],
            logit_rows=self._rows[:size],
        )

    def _fill(self, batch: HostBatch, size: int) -> None:
        """Put a step into the first `size` rows of the buffers; those that it does not have are idle."""
        count, width = batch.tables.shape
        idle = size - count
        tables = np.pad(batch.tables, ((0, idle), (0, 0))).astype(np.int32)
        tables[count:, 0] = self._idle
        self._tables[:size, :width].copy_(torch.from_numpy(tables), non_blocking=True)
        for buffer, values, of_idle in (
            (self._ids, batch.ids, 0),
            (self._positions, batch.positions, 0),
            (self._slots, batch.slots, self._idle_slot),
            (self._lengths, batch.lengths, 1),
        ):
            padded = np.pad(values, (0, idle), constant_values=of_idle)
            buffer[:size].copy_(torch.from_numpy(padded), non_blocking=True)
