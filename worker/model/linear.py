"""The matrix products of the fast road: x [T, K] times a weight [N, K], with or without a bias, in one call.

On a CPU oneDNN multiplies by weights that lie in its own blocked order. `F.linear` puts them into it at every call;
packed once, a decode of SmolLM2 takes two thirds of the time. The two functions that pack and multiply are private to
torch, so they are tried before they are trusted, and where they are gone or refuse, there is `F.linear`.
"""

import logging
from collections.abc import Callable

import torch
from torch.nn.functional import linear, pad

log = logging.getLogger("octavo.worker")

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [T, K] -> [T, N]."""

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Takes a weight [N, K] and a bias [N] or None; what it makes need not keep the weight."""

_ROWS_HINT = 32
"""oneDNN orders the weight for about so many rows; that order serves every number of them as well."""

_TILE_ROWS = 32
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


def in_tiles(make: MakeLinear) -> MakeLinear:
    """Multiply so many rows at a time, the last ones filled up: a row's bits then depend on nothing but the row.

    Libraries choose how to cut and sum by the number of rows, so a row alone and a row in company differ in rounding.
    """

    def make_tiled(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        multiply = make(weight, bias)

        def tiled(x: torch.Tensor) -> torch.Tensor:
            filled = pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
            return torch.cat([multiply(tile) for tile in filled.split(_TILE_ROWS)])[: len(x)]

        return tiled

    return make_tiled


def choose(*, device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> MakeLinear:
    """Pick packed weights where they work, and log which and why, once.

    Args:
        device: where the products are computed.
        dtype: of weights and activations.
        deterministic: give a row the same bits in any company; see `in_tiles`.
    """
    make = _choose(device, dtype)
    return in_tiles(make) if deterministic else make


def _choose(device: torch.device, dtype: torch.dtype) -> MakeLinear:
    if device.type != "cpu":
        return _announce(plain, "F.linear", f"packed weights are oneDNN's, for CPUs; this is {device.type}")
    if (reason := _distrust(dtype)) is not None:
        return _announce(plain, "F.linear", f"slower than packed weights: {reason}")
    return _announce(packed, "packed", "weights in oneDNN's order")


def _distrust(dtype: torch.dtype) -> str | None:
    """None, or why not to pack: a product that is known, of small whole numbers, is tried."""
    weight = (torch.arange(48 * 32) % 7 - 3).view(48, 32).to(dtype)
    bias, x = weight[:, 0].contiguous(), weight[:5].contiguous()
    try:
        product = packed(weight, bias)(x)
    except (AttributeError, RuntimeError) as failure:
        return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    wanted = (x.double() @ weight.double().T + bias.double()).to(dtype)
    return None if torch.equal(product, wanted) else "this torch multiplies them wrong"


def _announce(make: MakeLinear, backend: str, reason: str) -> MakeLinear:
    log.info("linear_backend", extra={"backend": backend, "reason": reason})
    return make
