"""Products of bfloat16 in a CPU's matrix tiles: native/products.cpp, compiled at first use and called by ctypes."""

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import pad

from worker.kernels import native_build
from worker.kernels.native import address
from worker.kernels.native_build import TILES, NativeUnavailable

SOURCE = native_build.SOURCES / "products.cpp"

_PRODUCT = struct.Struct("@5Pq4i")
"""`Product` of the C++ file."""
_PANEL = 32
"""Rows of a weight that are multiplied together."""
_DEPTH = 32
"""Elements of each that are."""


@cache
def load() -> "NativeProducts":
    """The native products, compiled now if they never were on this machine.

    Raises:
        NativeUnavailable: this CPU has no matrix tiles, the system keeps them back, or they cannot be built here.
    """
    if missing := sorted(set(TILES.features) - native_build.cpu_features()):
        raise NativeUnavailable(f"this CPU lacks {', '.join(missing)}")
    library = native_build.load(SOURCE, TILES)
    if not library.octavo_permit_tiles():
        raise NativeUnavailable("the system does not let this process use matrix tiles")
    return NativeProducts(library)


class NativeProducts:
    """Makes products."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._multiply = library.octavo_multiply
        self._multiply.argtypes = [ctypes.c_char_p]
        self._multiply.restype = None
        self._parallel = native_build.openmp_parallel()

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> "NativeProduct":
        """Keep a copy of the weight in the order of the tiles.

        Args:
            weight: bfloat16 [N, K].
            bias: bfloat16 [N].

        Raises:
            ValueError: a shape, dtype or device does not fit.
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has {weight.dim()} axes, wanted 2")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and (tensor.dtype is not torch.bfloat16 or tensor.device.type != "cpu"):
                raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, the tiles want bfloat16 on the CPU")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias is {list(bias.shape)}, wanted {list(weight.shape[:1])}")
        return NativeProduct(self._multiply, self._parallel, weight, bias)


class NativeProduct:
    """x [T, K] -> x times the weight, plus the bias, [T, N]: bfloat16, a row's bits the same in any company."""

    def __init__(
        self, multiply: Callable[[bytes], None], parallel: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Take a sound weight and bias; `multiply` is the C++ function, `parallel` starts its threads."""
        self._multiply, self._parallel = multiply, parallel
        self._columns, self._width = weight.shape
        self._weight = in_tiles(weight)
        self._bias = None if bias is None else pad(bias.float(), (0, -len(bias) % _PANEL))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Raises:
            ValueError: x is no bfloat16 [T, K] in a CPU's memory.
        """
        if x.dim() != 2 or x.shape[1] != self._width or x.dtype is not torch.bfloat16 or not x.is_cpu:
            raise ValueError(
                f"x is {list(x.shape)} of {x.dtype} on {x.device}, wanted [T, {self._width}] of bfloat16 on the CPU"
            )
        rows, missing = len(x), -self._width % _DEPTH
        if missing:
            x = pad(x, (0, missing))
        elif x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((rows, self._columns), dtype=torch.bfloat16)
        self._multiply(
            _PRODUCT.pack(
                x.data_ptr(),
                self._weight.data_ptr(),
                out.data_ptr(),
                address(self._bias),
                self._parallel,
                x.stride(0),
                rows,
                self._columns,
                self._width + missing,
                torch.get_num_threads(),
            )
        )
        return out


def in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] in the order of the C++ file, filled up with zeros: [panels, steps, 2, 16, 16, 2].

    The axes are panels of 32 rows, steps of 32 elements; then a panel's halves, pairs of elements, rows of the half,
    and the elements of a pair.
    """
    rows, width = weight.shape
    whole = pad(weight, (0, -width % _DEPTH, 0, -rows % _PANEL))
    parts = whole.view(whole.shape[0] // _PANEL, 2, _PANEL // 2, whole.shape[1] // _DEPTH, _DEPTH // 2, 2)
    return parts.permute(0, 3, 1, 4, 2, 5).clone(memory_format=torch.contiguous_format)
