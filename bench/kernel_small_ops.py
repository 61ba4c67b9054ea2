"""The small operations of a Llama layer, native beside torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from worker.kernels.small_ops import SmallOps, TorchSmallOps, choose
from worker.kv_pool import KVPool, PoolShape

TOKENS = (1, 32)
"""Of a step: one sequence that decodes, or thirty-two."""
CPU = torch.device("cpu")

Runner = Callable[[int], torch.Tensor]
"""Takes a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCase:
    """One step of a model; by default in the sizes of SmolLM2."""

    tokens: int
    dtype: torch.dtype
    hidden: int = 576
    mlp: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    layers: int = 30


def small_cases() -> list[SmallCase]:
    """Steps of both sizes in both dtypes."""
    return [SmallCase(tokens=tokens, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) for tokens in TOKENS]


def small_races(case: SmallCase) -> Iterator[tuple[str, Mapping[str, Runner]]]:
    """The name of each operation, and what computes it: `native` (what `choose` picks here) and `torch`."""
    everybody: dict[str, SmallOps] = {"native": choose(device=CPU, dtype=case.dtype), "torch": TorchSmallOps()}
    for name, runner in (("norm", _norm), ("rope_write", _rope_write), ("silu_mul", _silu_mul)):
        yield name, {who: runner(case, ops) for who, ops in everybody.items()}


def _norm(case: SmallCase, ops: SmallOps) -> Runner:
    x, weight = torch.randn(case.tokens, case.hidden).to(case.dtype), torch.ones(case.hidden, dtype=case.dtype)
    residual = torch.zeros_like(x)
    return lambda _: ops.rms_norm(x, weight, 1e-5, residual=residual)


def _rope_write(case: SmallCase, ops: SmallOps) -> Runner:
    """A projection is turned at position 512 and later, into a block of each sequence, by a step prepared before."""
    block_size, tokens = 16, case.tokens
    shape = PoolShape(
        num_layers=case.layers,
        kv_heads=case.kv_heads,
        block_size=block_size,
        head_dim=case.head_dim,
        dtype=case.dtype,
    )
    pool = KVPool(shape, tokens, CPU)
    packed = torch.randn(tokens, (case.heads + 2 * case.kv_heads) * case.head_dim).to(case.dtype)
    angles = torch.rand(1024, case.head_dim)
    positions = torch.arange(512, 512 + tokens)
    slots = torch.arange(tokens) * block_size
    step = ops.prepare_rope(
        pool.planes, angles.cos(), angles.sin(), positions, slots, heads=case.heads, dtype=case.dtype
    )
    return lambda layer: step(layer, packed)


def _silu_mul(case: SmallCase, ops: SmallOps) -> Runner:
    gate_up = torch.randn(case.tokens, 2 * case.mlp).to(case.dtype)
    return lambda _: ops.silu_mul(gate_up)
