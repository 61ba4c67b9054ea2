"""One step as the model sees it: a ragged batch of tokens, one after another, and where each lives in the pool."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import SharedPrefixes
from worker.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The new tokens of B sequences, T of them in all; the letters are those of `worker.kernels`."""

    ids: torch.Tensor
    """int64 [1, T]: the tokens, sequence by sequence."""
    positions: torch.Tensor
    """int64 [1, T]: of each token in its sequence."""
    slots: torch.Tensor
    """int64 [T]: where each token's keys and values go, block * S + offset."""
    tables: torch.Tensor
    """int32 [B, M]: the blocks of each sequence; entries past its length mean nothing."""
    lengths: torch.Tensor
    """int32 [B]: history and new tokens together."""
    query_starts: torch.Tensor
    """int32 [B + 1]: the rows where the sequences begin, and T."""
    logit_rows: torch.Tensor
    """int64 [R]: the rows whose logits are wanted."""
    shared: SharedPrefixes | None = None
    """Which decodes begin with the same blocks, where reading those once for all of them pays."""


Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """The same on the host, as it is laid out there; all int64."""

    ids: Ints
    """[T]."""
    positions: Ints
    """[T]."""
    slots: Ints
    """[T]."""
    tables: Ints
    """[B, M]."""
    lengths: Ints
    """[B]."""
    query_starts: Ints
    """[B + 1]."""
    logit_rows: Ints
    """[R]."""

    def one_by_one(self) -> "HostBatch":
        """The same with every token as a sequence of its own, which reads what those before it wrote.

        Kernels sum a lone token otherwise than one in a chunk; so they sum them all alike, however a prompt is cut.
        """
        counts = np.diff(self.query_starts)
        return replace(
            self,
            tables=np.repeat(self.tables, counts, axis=0),
            lengths=self.positions + 1,
            query_starts=np.arange(len(self.ids) + 1),
        )

    def on(self, device: torch.device, shared: SharedPrefixes | None) -> Batch:
        """Its tensors on a device."""

        def tensor(values: Ints, dtype: npt.DTypeLike = np.int64) -> torch.Tensor:
            return torch.from_numpy(values.astype(dtype, copy=False)).to(device, non_blocking=True)

        return Batch(
            ids=tensor(self.ids)[None],
            positions=tensor(self.positions)[None],
            slots=tensor(self.slots),
            tables=tensor(self.tables, np.int32),
            lengths=tensor(self.lengths, np.int32),
            query_starts=tensor(self.query_starts, np.int32),
            logit_rows=tensor(self.logit_rows),
            shared=shared,
        )


class Forward(Protocol):
    """A model on a paged pool: writes the batch's keys and values, then attends through the tables."""

    vocab_size: int

    def __call__(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Logits [R, V] of the rows asked for, in any floating dtype."""
        ...
