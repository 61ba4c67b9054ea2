"""What writes into a pool: a step's new keys and values into their slots, and whole blocks, copied or moved.

Copies run before any write of their step: a block that is copied on write still holds what the copy must hold.
`planes` is a pool's memory as [P, N, Hkv, S, D]: the keys and the values of all layers, one plane each, so that a block
is moved in all of them at once. On a GPU every function is one launch (block_ops_triton); here is its meaning.
"""

from collections.abc import Sequence

import torch

from worker.kernels.arguments import FP8_DTYPES


def write(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write one layer's new keys and values, in the pool's dtype, each into its slot.

    A float8 pool holds the nearest number, and the largest for what lies beyond: one infinite key spoils all scores.

    Args:
        k_pool: [N, Hkv, S, D], changed in place.
        v_pool: [N, Hkv, S, D], changed in place.
        k: [T, Hkv, D]; any strides.
        v: [T, Hkv, D]; any strides.
        slots: int64 [T], block * S + offset of each token, all different.
        k_scale: float32 [Hkv]: a key is what the pool holds times its head's scale; 1 by default.
        v_scale: float32 [Hkv]: likewise.

    Raises:
        ValueError: a shape or a dtype does not fit, or (on the CPU) a slot lies outside the pool; nothing was written.
    """
    check_write(k_pool, v_pool, k, v, slots)
    check_slots(slots, num_slots=k_pool.shape[0] * k_pool.shape[2])
    check_scales(k_pool, k_scale=k_scale, v_scale=v_scale)
    if k_pool.device.type == "cuda":
        from worker.kernels import block_ops_triton

        block_ops_triton.write(k_pool, v_pool, k, v, slots, k_scale, v_scale)
        return
    block_size = k_pool.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_pool[blocks, :, offsets] = stored(k, k_pool.dtype, k_scale)
    v_pool[blocks, :, offsets] = stored(v, v_pool.dtype, v_scale)


def stored(x: torch.Tensor, dtype: torch.dtype, head_scale: torch.Tensor | None) -> torch.Tensor:
    """What a pool of `dtype` holds for keys or values x [T, Hkv, D]."""
    if head_scale is not None:
        x = x.float() / head_scale[:, None]
    if dtype in FP8_DTYPES:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


def copy_blocks(planes: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks in every plane, as if one pair after the other.

    Args:
        planes: [P, N, ...], changed in place.
        copies: (source, target) blocks, in order; a target may be the source of a later pair.

    Raises:
        ValueError: a block lies outside the pool; nothing was copied.
    """
    for name, blocks in (("source", [source for source, _ in copies]), ("target", [target for _, target in copies])):
        _check_blocks(f"copies: {name}", blocks, planes.shape[1])
    origins = _origins(copies)
    if not origins:
        return
    sources, targets = list(origins.values()), list(origins)
    if planes.device.type == "cuda" and not set(sources) & set(targets):
        from worker.kernels import block_ops_triton

        block_ops_triton.copy(planes, sources, targets)
        return
    scatter_blocks(planes, targets, gather_blocks(planes, sources))


def gather_blocks(planes: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Whole blocks, one after the other in one contiguous buffer, to be moved to another memory.

    Args:
        planes: [P, N, ...].
        blocks: n of the N.

    Returns:
        [n, P, ...]: all of a block lies together.

    Raises:
        ValueError: a block lies outside the pool.
    """
    _check_blocks("blocks", blocks, planes.shape[1])
    if planes.device.type == "cuda" and blocks:
        from worker.kernels import block_ops_triton

        return block_ops_triton.gather(planes, blocks)
    return planes[:, torch.tensor(blocks, dtype=torch.int64, device=planes.device)].transpose(0, 1).contiguous()


def scatter_blocks(planes: torch.Tensor, blocks: Sequence[int], buffer: torch.Tensor) -> None:
    """Put what `gather_blocks` gave, here or in a pool of the same shape elsewhere, into other blocks.

    Args:
        planes: [P, N, ...], changed in place.
        blocks: n of the N, all different.
        buffer: [n, P, ...], contiguous, of the same dtype and on the same device.

    Raises:
        ValueError: a block lies outside the pool or comes twice, or the buffer does not fit; nothing was written.
    """
    _check_blocks("blocks", blocks, planes.shape[1])
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"blocks has {len(blocks)} entries, {len(set(blocks))} of them different")
    _check_buffer(planes, len(blocks), buffer)
    if planes.device.type == "cuda" and blocks:
        from worker.kernels import block_ops_triton

        block_ops_triton.scatter(planes, blocks, buffer)
        return
    planes[:, torch.tensor(blocks, dtype=torch.int64, device=planes.device)] = buffer.transpose(0, 1)


def _origins(copies: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Target -> the block whose present content it ends up with. All sources can then be read before any write."""
    origins: dict[int, int] = {}
    for source, target in copies:
        origins[target] = origins.get(source, source)
    return {target: source for target, source in origins.items() if target != source}


def _check_blocks(name: str, blocks: Sequence[int], num_blocks: int) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise ValueError(f"{name} is block {block}, the pool has {num_blocks}")


def _check_buffer(planes: torch.Tensor, count: int, buffer: torch.Tensor) -> None:
    wanted = [count, planes.shape[0], *planes.shape[2:]]
    if list(buffer.shape) != wanted:
        raise ValueError(f"buffer is {list(buffer.shape)}, wanted {wanted}")
    if buffer.dtype != planes.dtype or buffer.device != planes.device:
        raise ValueError(f"buffer is {buffer.dtype} on {buffer.device}, the pool {planes.dtype} on {planes.device}")
    if not buffer.is_contiguous():
        raise ValueError(f"buffer has strides {buffer.stride()}, wanted a contiguous one")


def check_write(
    k_pool: torch.Tensor, v_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Refuse shapes, dtypes and devices of a `write` that do not fit one another; no value is read."""
    _, kv_heads, _, head_dim = k_pool.shape
    wanted = (slots.shape[0], kv_heads, head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != wanted:
            raise ValueError(f"{name} is {list(tensor.shape)}, wanted {list(wanted)}")
    if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype:
        raise ValueError(
            f"v_pool is {list(v_pool.shape)} of {v_pool.dtype}, k_pool {list(k_pool.shape)} of {k_pool.dtype}"
        )
    for name, tensor in (("v_pool", v_pool), ("k", k), ("v", v), ("slots", slots)):
        if tensor.device != k_pool.device:
            raise ValueError(f"{name} is on {tensor.device}, k_pool on {k_pool.device}")
    if slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype}, wanted torch.int64")


def check_slots(slots: torch.Tensor, *, num_slots: int) -> None:
    """Refuse slots outside a pool of N * S; on a GPU, where reading them would stall the step, none."""
    if slots.device.type == "cpu" and slots.numel():
        lowest, highest = (x.item() for x in slots.aminmax())
        if lowest < 0 or highest >= num_slots:
            raise ValueError(f"slots go from {lowest} to {highest}, the pool has {num_slots}")


def check_scales(k_pool: torch.Tensor, **scales: torch.Tensor | None) -> None:
    """Refuse scales that are not one float32 for each head of the pool [N, Hkv, S, D]."""
    wanted = (k_pool.shape[1],)
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.shape != wanted or scale.dtype != torch.float32 or scale.device != k_pool.device:
            raise ValueError(
                f"{name} is {list(scale.shape)} of {scale.dtype} on {scale.device}, "
                f"wanted {list(wanted)} of torch.float32 on {k_pool.device}"
            )
