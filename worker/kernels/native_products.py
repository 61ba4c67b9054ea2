"""Products of bfloat16 in a CPU's matrix tiles: native/products.cpp, compiled at first use and called by ctypes."""

import copy
import ctypes
import struct
from functools import cache

import torch
from torch.nn.functional import pad

from worker.kernels import native_build
from worker.kernels.native import address
from worker.kernels.native_build import TILES, NativeUnavailable
from worker.kernels.native_chain import Call, NativeFunction

SOURCE = native_build.SOURCES / "products.cpp"

_PRODUCT = struct.Struct("@5Pq5i")
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
        self._multiply = NativeFunction(library, "octavo_multiply")
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
    """x [T, K] -> x times the weight, plus the bias, [T, N]: a row's bits are the same in any company."""

    dtype = torch.bfloat16
    """Of the results."""

    def __init__(
        self, multiply: NativeFunction, parallel: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Take a sound weight and bias; `multiply` is the C++ function, `parallel` starts its threads."""
        self._multiply, self._parallel = multiply, parallel
        self.columns, self.width = weight.shape
        self._weight = in_tiles(weight)
        self._bias = None if bias is None else pad(bias.float(), (0, -len(bias) % _PANEL))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Raises:
            ValueError: x is no bfloat16 [T, K] in a CPU's memory.
        """
        if x.dim() != 2 or x.shape[1] != self.width or x.dtype is not torch.bfloat16 or not x.is_cpu:
            raise ValueError(
                f"x is {list(x.shape)} of {x.dtype} on {x.device}, wanted [T, {self.width}] of bfloat16 on the CPU"
            )
        rows = len(x)
        if missing := -self.width % _DEPTH:
            x = pad(x, (0, missing))
        elif x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((rows, self.columns), dtype=self.dtype)
        self._call(x, out)()
        return out

    def unrounded(self) -> "NativeProduct":
        """The same product of the same weight, whose results are the sums themselves, float32."""
        twin = copy.copy(self)
        twin.dtype = torch.float32
        return twin

    @property
    def takes_rows_as_they_lie(self) -> bool:
        """Whether `into` can be used: K is a multiple of what a tile holds of a row."""
        return not self.width % _DEPTH

    def into(self, x: torch.Tensor, out: torch.Tensor) -> Call:
        """The call that multiplies x [T, K] into `out` [T, N], both contiguous; see `takes_rows_as_they_lie`."""
        assert self.takes_rows_as_they_lie, f"rows of {self.width}, wanted a multiple of {_DEPTH}"
        assert (x.shape[1], out.shape) == (self.width, (len(x), self.columns)), (x.shape, out.shape)
        assert out.dtype is self.dtype, f"out is {out.dtype}, wanted {self.dtype}"
        return self._call(x, out)

    def _call(self, x: torch.Tensor, out: torch.Tensor) -> Call:
        return Call(
            self._multiply,
            _PRODUCT.pack(
                x.data_ptr(),
                self._weight.data_ptr(),
                out.data_ptr(),
                address(self._bias),
                self._parallel,
                x.stride(0),
                len(x),
                self.columns,
                x.shape[1],
                torch.get_num_threads(),
                self.dtype is torch.float32,
            ),
        )


def in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] in the order of the C++ file, filled up with zeros: [panels, steps, 2, 16, 16, 2].

    The axes are panels of 32 rows, steps of 32 elements; then a panel's halves, pairs of elements, rows of the half,
    and the elements of a pair.
    """
    rows, width = weight.shape
    whole = pad(weight, (0, -width % _DEPTH, 0, -rows % _PANEL))
    parts = whole.view(whole.shape[0] // _PANEL, 2, _PANEL // 2, whole.shape[1] // _DEPTH, _DEPTH // 2, 2)
    return parts.permute(0, 3, 1, 4, 2, 5).clone(memory_format=torch.contiguous_format)
