"""Attention through block tables: one interface, several implementations with the same meaning.

Shapes are written with these letters, here and in every module of the package:

    B   sequences of a step              Hq   query heads
    T   new tokens of a step, of all     Hkv  key/value heads; Hq / Hkv query heads read each of them
        sequences one after another      D    elements of a head
    N   blocks of the pool               S    positions of a block
    M   entries of a row of `tables`

`reference` is the meaning; every other implementation is held to it by tests/contract/test_attention.py.
Modules that need a compiler or Triton are imported when they are chosen, never before.
"""

import logging
from typing import Protocol, Unpack, runtime_checkable

import torch

from worker.kernels.arguments import Option, Options, Prepared, check_batch, options_of
from worker.kernels.shared_prefix import SharedPrefixes

__all__ = [
    "Attend",
    "AttendStep",
    "Option",
    "Options",
    "SharedPrefixes",
    "check_batch",
    "choose",
    "options_of",
    "prepare",
]

log = logging.getLogger("octavo.worker")


class Attend(Protocol):
    """Causal attention of a ragged batch of prefill chunks and decodes over paged keys and values."""

    def __call__(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """Attend every new token to its sequence's history and to the new tokens up to itself.

        The keys and values of the new tokens are in the pool already. No implementation lets a sequence's result
        depend on what slots beyond its length hold, nor on its company in the batch, unless `shared` tells it to use
        that.

        Args:
            q: [T, Hq, D] of float32, bfloat16 or float16, the queries of sequence b in rows query_starts[b] to
                query_starts[b + 1].
            k_pool: [N, Hkv, S, D] of those or of float8_e4m3fn or float8_e5m2; any strides, but the elements of a
                head lie side by side (and, of float8 in Triton, D and the strides are even).
            v_pool: [N, Hkv, S, D], likewise.
            tables: int32 [B, M]; entry i is the block of positions i * S to (i + 1) * S. Entries past a sequence's
                length are not read.
            lengths: int32 [B], history and new tokens together; a sequence's queries are its last positions.
            query_starts: int32 [B + 1], from 0 to T; every sequence has at least one query.
            scale: factor of the scores, usually D ** -0.5.
            **options: `window`, `soft_cap`, `sinks`, `k_scale`, `v_scale`, `shared`; see `Options`.

        Returns:
            [T, Hq, D], contiguous, in q's dtype.

        Raises:
            ValueError: an argument does not fit the others; the message names it with both numbers. What the
                values of `tables`, `lengths` and `query_starts` point to is checked for tensors on the CPU only,
                as on a GPU it would stall the step: there, call `check_batch` on the host's copies once a step.
        """
        ...


class AttendStep(Protocol):
    """`Attend` for one step, checked when it was prepared, and called once a layer."""

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with one layer's queries [T, Hq, D] -> [T, Hq, D], contiguous.

        Raises:
            ValueError: q is not like what was prepared for, or a value of the plan is out of its range.
            IndexError: the pool has no such layer.
        """
        ...


@runtime_checkable
class _Preparing(Protocol):
    """An implementation that gains from knowing a step before its layers."""

    def prepare(
        self,
        planes: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        query_starts: torch.Tensor,
        scale: float,
        *,
        q_like: torch.Tensor,
        **options: Unpack[Options],
    ) -> AttendStep: ...


def prepare(
    attend: Attend,
    planes: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    q_like: torch.Tensor,
    **options: Unpack[Options],
) -> AttendStep:
    """Tell an implementation once what all layers of a step share: checks cost as much as a small layer's attention.

    Args:
        attend: the implementation.
        planes: [2 L, N, Hkv, S, D], keys and values of every layer in turn.
        tables: as for `Attend`, like `lengths`, `query_starts`, `scale` and the options.
        lengths: likewise.
        query_starts: likewise.
        scale: likewise.
        q_like: every layer's queries have its shape, strides and dtype; its values are not read.
        **options: likewise, for all layers.

    Raises:
        ValueError: as `Attend`, of what is known so far.
    """
    if isinstance(attend, _Preparing):
        return attend.prepare(planes, tables, lengths, query_starts, scale, q_like=q_like, **options)
    like = Prepared.of(q_like, planes)

    def step(layer: int, q: torch.Tensor) -> torch.Tensor:
        like.check(layer, q)
        pools = planes[2 * layer], planes[2 * layer + 1]
        return attend(q, *pools, tables, lengths, query_starts, scale, **options)

    return step


def choose(
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
    options: frozenset[Option] = frozenset(),
) -> Attend:
    """Pick the fastest implementation that takes such calls here, and log which and why, once.

    Every implementation says what it takes, and the next in line is asked where it does not: native code, then torch,
    on a CPU; Triton, then the reference, on a GPU. A call that asks for more than was told here raises ValueError;
    none computes something else in silence.

    Args:
        device: where the pool lies.
        dtype: of the queries.
        head_dim: D.
        kv_dtype: of the pool; the queries' own by default.
        options: those that any call will ask for.
    """
    if device.type == "cuda":
        return _choose_cuda(device, dtype, kv_dtype or dtype, head_dim, options)
    if device.type != "cpu":
        from worker.kernels import reference

        return _announce(reference.attend, "reference", device, f"slower: no kernel is written for {device.type}")
    return _choose_cpu(device, dtype, kv_dtype or dtype, head_dim, options)


def _choose_cuda(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, options: frozenset[Option]
) -> Attend:
    from worker.kernels import reference

    try:
        from worker.kernels import triton_attend
    except ImportError as missing:  # torch's CUDA builds bring Triton where there is one for the system
        return _announce(reference.attend, "reference", device, f"slower than Triton: {missing}")
    if (reason := triton_attend.supports(dtype, kv_dtype, head_dim, options)) is not None:
        return _announce(reference.attend, "reference", device, f"slower than Triton: {reason}")
    return _announce(triton_attend.attend, "triton", device, "kernels for this GPU, compiled as they are needed")


def _choose_cpu(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, options: frozenset[Option]
) -> Attend:
    from worker.kernels import native, torch_cpu
    from worker.kernels.native_build import NativeUnavailable, usable_levels

    try:
        attend = native.load(dtype, kv_dtype, head_dim, options)
    except NativeUnavailable as unavailable:
        return _announce(torch_cpu.attend, "torch", device, f"slower than native: {unavailable}")
    return _announce(attend, "native", device, f"compiled for {usable_levels()[0].name} instructions")


def _announce(attend: Attend, backend: str, device: torch.device, reason: str) -> Attend:
    log.info("attention_backend", extra={"backend": backend, "device": str(device), "reason": reason})
    return attend
