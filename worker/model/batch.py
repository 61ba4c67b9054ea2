"""One step as the model sees it: a ragged batch of tokens, one after another, and where each lives in the pool."""

from dataclasses import dataclass
from typing import Protocol

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


class Forward(Protocol):
    """A model on a paged pool: writes the batch's keys and values, then attends through the tables."""

    vocab_size: int

    def __call__(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """Logits [R, V] of the rows asked for, in any floating dtype."""
        ...
