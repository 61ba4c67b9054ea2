"""The keys and values of one worker: for every layer two tensors of blocks, and how many blocks fit.

The worker is the truth about what these tensors hold; who may use which block is the cache manager's book.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.kernels import block_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What one block is made of."""

    num_layers: int
    kv_heads: int
    block_size: int
    """Positions of a block."""
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `block_size` positions in all layers."""
        elements = self.num_layers * self.kv_heads * self.block_size * self.head_dim
        return 2 * elements * self.dtype.itemsize

    def blocks_within(self, budget_bytes: int) -> int:
        """How many blocks fit into a budget.

        Raises:
            ValueError: not even one does.
        """
        if budget_bytes < self.bytes_per_block:
            raise ValueError(f"the KV budget is {budget_bytes} bytes, one block takes {self.bytes_per_block}")
        return budget_bytes // self.bytes_per_block


class KVPool:
    """Per layer `k_pool` and `v_pool` [N, Hkv, S, D], all of one allocation; written by `kernels.block_ops` only.

    A pool of float8 holds the nearest number to each, with no scale: keys and values lie well within its range.
    A block that nobody has written holds zeros, but nothing may rely on it: attention never reads it.
    """

    def __init__(
        self, shape: PoolShape, num_blocks: int, device: torch.device, *, has_idle_block: bool = False
    ) -> None:
        """Take the memory of `num_blocks` blocks, and of one that nobody is granted if there is an idle one.

        Raises:
            ValueError: there is no block, or not so much memory.
        """
        if num_blocks < 1:
            raise ValueError(f"the pool has {num_blocks} blocks, wanted at least 1")
        self.shape = shape
        self.num_blocks = num_blocks
        self.idle_block = num_blocks if has_idle_block else None
        """Behind the others; for rows of a step that stand for nobody."""
        size = (shape.num_layers, 2, num_blocks + has_idle_block, shape.kv_heads, shape.block_size, shape.head_dim)
        # Zeros: on a CPU this touches the pages, so memory that is not there fails now.
        try:
            storage = torch.empty(size, dtype=shape.dtype, device=device)
            _ask_for_huge_pages(storage)
            storage.zero_()
        except RuntimeError as error:  # torch has no class of its own for memory that a CPU lacks
            wanted = num_blocks * shape.bytes_per_block
            raise ValueError(f"the KV pool of {wanted} bytes cannot be had on {device}") from error
        self.planes = storage.flatten(0, 1)
        """All of it, [2 * L, N, Hkv, S, D], an idle block included, as `kernels.block_ops` moves whole blocks."""
        self._layers = tuple((layer[0], layer[1]) for layer in storage)

    @classmethod
    def within_budget(
        cls, shape: PoolShape, budget_bytes: int, device: torch.device, *, has_idle_block: bool = False
    ) -> "KVPool":
        """As many blocks as fit into `budget_bytes`, an idle one beside them.

        Raises:
            ValueError: not even one does.
        """
        return cls(shape, shape.blocks_within(budget_bytes), device, has_idle_block=has_idle_block)

    @property
    def capacity_tokens(self) -> int:
        """Positions of all blocks."""
        return self.num_blocks * self.shape.block_size

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return self.num_blocks * self.shape.bytes_per_block

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k_pool, v_pool)` of one layer, each [N, Hkv, S, D], an idle block included."""
        return self._layers[index]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write one layer's new keys and values [T, Hkv, D] into `slots`, int64 [T]; see `block_ops.write`."""
        block_ops.write(*self._layers[layer], k, v, slots)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target), in order, in all layers; see `block_ops.copy_blocks`."""
        block_ops.copy_blocks(self.planes, copies)


def _ask_for_huge_pages(storage: torch.Tensor) -> None:
    """Let Linux back memory that nobody has touched yet with pages of 2 MB, where it does so on request.

    Blocks lie scattered, so with pages of 4 KB nearly each of them costs a walk through the page table.
    """
    huge_pages = getattr(mmap, "MADV_HUGEPAGE", None)
    if storage.device.type != "cpu" or huge_pages is None:
        return
    end = (storage.data_ptr() + storage.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < end:  # advice: a kernel without huge pages refuses it, and nothing is lost
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), huge_pages)
