"""What writes into a pool: a step's new keys and values into their slots, and copies of whole blocks.

Copies run before any write of their step: a block that is copied on write still holds what the copy must hold.
"""

from collections.abc import Iterable, Sequence

import torch


def write(k_pool: torch.Tensor, v_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write one layer's new keys and values, in the pool's dtype, each into its slot.

    Args:
        k_pool: [N, Hkv, S, D], changed in place.
        v_pool: [N, Hkv, S, D], changed in place.
        k: [T, Hkv, D]; any strides.
        v: [T, Hkv, D]; any strides.
        slots: int64 [T], block * S + offset of each token, all different.

    Raises:
        ValueError: a shape or a dtype does not fit, or (on the CPU) a slot lies outside the pool; nothing was written.
    """
    _check_write(k_pool, v_pool, k, v, slots)
    block_size = k_pool.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_pool[blocks, :, offsets] = k.to(k_pool.dtype)
    v_pool[blocks, :, offsets] = v.to(v_pool.dtype)


def copy_blocks(pools: Iterable[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks in every pool tensor, as if one pair after the other.

    Args:
        pools: tensors [N, ...], changed in place: the K and V pools of all layers.
        copies: (source, target) blocks, in order; a target may be the source of a later pair.

    Raises:
        ValueError: a block lies outside a pool; nothing was copied.
    """
    pools = tuple(pools)
    _check_copies(pools, copies)
    origins = _origins(copies)
    for pool in pools:
        sources, targets = (torch.tensor(list(x), device=pool.device) for x in (origins.values(), origins))
        if len(targets):
            pool[targets] = pool[sources]


def _origins(copies: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Target -> the block whose present content it ends up with. All sources can then be read before any write."""
    origins: dict[int, int] = {}
    for source, target in copies:
        origins[target] = origins.get(source, source)
    return {target: source for target, source in origins.items() if target != source}


def _check_copies(pools: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    num_blocks = min((pool.shape[0] for pool in pools), default=0)
    for pair in copies:
        for name, block in zip(("source", "target"), pair, strict=True):
            if not 0 <= block < num_blocks:
                raise ValueError(f"copies: {name} is block {block}, the pool has {num_blocks}")


def _check_write(
    k_pool: torch.Tensor, v_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    num_blocks, kv_heads, block_size, head_dim = k_pool.shape
    wanted = (slots.shape[0], kv_heads, head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != wanted:
            raise ValueError(f"{name} is {list(tensor.shape)}, wanted {list(wanted)}")
    if v_pool.shape != k_pool.shape:
        raise ValueError(f"v_pool is {list(v_pool.shape)}, k_pool {list(k_pool.shape)}")
    if slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype}, wanted torch.int64")
    if slots.device.type == "cpu" and slots.numel():
        lowest, highest = (x.item() for x in slots.aminmax())
        if lowest < 0 or highest >= num_blocks * block_size:
            raise ValueError(f"slots go from {lowest} to {highest}, the pool has {num_blocks * block_size}")
