"""The matrix products of the fast road: x [T, K] times a weight [N, K], with or without a bias, in one call.

`F.linear` puts a weight into the order that a CPU multiplies in at every call; kept in that order, a decode of SmolLM2
takes two thirds of the time. Two libraries know such an order, and each is tried before it is trusted: our own products
in matrix tiles (native_products), for bfloat16 on CPUs that have them, and oneDNN's, whose two functions are private to
torch. Where neither will do, there is `F.linear`.
"""

import logging
from collections.abc import Callable

import torch
from torch.nn.functional import linear, pad

from worker.kernels import native_products
from worker.kernels.native_build import NativeUnavailable

log = logging.getLogger("octavo.worker")

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [T, K] -> [T, N]."""

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Takes a weight [N, K] and a bias [N] or None; what it makes need not keep the weight."""

_ROWS_HINT = 32
"""oneDNN orders the weight for about so many rows; that order serves every number of them as well."""

_BATCH_ROWS = 32
"""A crowd of decodes at once; a lone one then costs about twice its time."""


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Keep the weight as it is. Any device and dtype."""
    return lambda x: linear(x, weight, bias)


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Keep a copy of the weight in oneDNN's order.

    Raises:
        AttributeError: this torch has no such functions.
        RuntimeError: oneDNN does not take the weight.
    """
    multiply = torch.ops.mkldnn._linear_pointwise.default
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return lambda x: multiply(x, blocked, bias, "none", [], "")


def tiled(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Keep a copy of the weight in the order of the CPU's matrix tiles. A row has the same bits in any company.

    Raises:
        NativeUnavailable: this machine has no such tiles, or no code for them.
        ValueError: the weight is not bfloat16.
    """
    return native_products.load().product(weight, bias)


def unrounded(product: Linear) -> Linear:
    """The same product with results in float32, if it sums in float32 and can leave it at that; else the product.

    A logit of 16 in bfloat16 is one of steps of an eighth: two tokens are equally likely that are not, and the one with
    the lower id is drawn.
    """
    return product.unrounded() if isinstance(product, native_products.NativeProduct) else product


def in_batches(make: MakeLinear) -> MakeLinear:
    """Multiply so many rows at a time, the last ones filled up: a row's bits then depend on nothing but the row.

    Libraries choose how to cut and sum by the number of rows, so a row alone and a row in company differ in rounding.
    """

    def make_batched(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        multiply = make(weight, bias)

        def batched(x: torch.Tensor) -> torch.Tensor:
            filled = pad(x, (0, 0, 0, -len(x) % _BATCH_ROWS))
            return torch.cat([multiply(rows) for rows in filled.split(_BATCH_ROWS)])[: len(x)]

        return batched

    return make_batched


def choose(*, device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> MakeLinear:
    """Pick the fastest products that work here, and log which and why, once.

    Args:
        device: where the products are computed.
        dtype: of weights and activations.
        deterministic: give a row the same bits in any company; see `in_batches`.
    """
    make = _choose(device, dtype)
    return in_batches(make) if deterministic and make is not tiled else make


def _choose(device: torch.device, dtype: torch.dtype) -> MakeLinear:
    if device.type != "cpu":
        return _announce(plain, "F.linear", f"weights are kept in another order on CPUs; this is {device.type}")
    if (untiled := _distrust(tiled, dtype)) is None:
        return _announce(tiled, "tiled", "bfloat16 in the CPU's matrix tiles")
    if (unpacked := _distrust(packed, dtype)) is None:
        return _announce(packed, "packed", f"weights in oneDNN's order; not in matrix tiles: {untiled}")
    return _announce(plain, "F.linear", f"slower than weights in another order: {unpacked}; {untiled}")


def _distrust(make: MakeLinear, dtype: torch.dtype) -> str | None:
    """None, or why not to multiply so: a product that is known, of small whole numbers, is tried."""
    weight = (torch.arange(48 * 32) % 7 - 3).view(48, 32).to(dtype)
    bias, x = weight[:, 0].contiguous(), weight[:5].contiguous()
    try:
        product = make(weight, bias)(x)
    except (AttributeError, RuntimeError, NativeUnavailable, ValueError) as failure:
        return str(failure).partition("\n")[0]
    wanted = (x.double() @ weight.double().T + bias.double()).to(dtype)
    return None if torch.equal(product, wanted) else "they are multiplied wrong"


def _announce(make: MakeLinear, backend: str, reason: str) -> MakeLinear:
    log.info("linear_backend", extra={"backend": backend, "reason": reason})
    return make
