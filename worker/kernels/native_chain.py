"""Native calls one behind the other, with no Python between them: native/chain.cpp.

A call through Python costs 5 microseconds when all of it is in the caches, and five times that right after a product
has read its weight through them: of the 270 calls of a decode step of SmolLM2, as long as half the products. In a chain
the arguments of all are laid out first, while nothing drives Python out, and the interpreter's lock is free meanwhile.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from worker.kernels import native_build

SOURCE = native_build.SOURCES / "chain.cpp"

_CHAIN = struct.Struct("@Pq")
_CALL = struct.Struct("@2P")
"""`Chain` and `Call` of the C++ file."""
_ALIGNMENT = 8


class NativeFunction:
    """A function of native code that takes the address of its arguments, and returns 0 or what went wrong."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        """Find it."""
        function = getattr(library, name)
        function.argtypes = [ctypes.c_char_p]
        function.restype = ctypes.c_int
        self._call: Callable[[bytes], int] = function
        self.address: int = ctypes.cast(function, ctypes.c_void_p).value or 0

    def __call__(self, frame: bytes) -> int:
        """Call it with the arguments that `frame` is."""
        return self._call(frame)


class Call(NamedTuple):
    """A function and its arguments. Whoever makes one keeps what the arguments point to."""

    function: NativeFunction
    frame: bytes

    def __call__(self) -> int:
        """Make it now."""
        return self.function(self.frame)


@cache
def load() -> NativeFunction:
    """What runs a chain, compiled now if it never was on this machine.

    Raises:
        NativeUnavailable: it cannot be built here.
    """
    return NativeFunction(native_build.load(SOURCE, native_build.PLAIN), "octavo_run_chain")


class Chain:
    """Calls in their order."""

    def __init__(self) -> None:
        self._calls: list[tuple[Call, Callable[[int], Exception] | None]] = []

    def add(self, call: Call, failure: Callable[[int], Exception] | None = None) -> None:
        """Put one behind the others; `failure` tells what one of its outcomes but 0 means, None that it has none."""
        self._calls.append((call, failure))

    def run(self) -> None:
        """Make them all, or those up to the first that fails, and raise what that means."""
        frames, places = bytearray(), list[int]()
        for (_, frame), _ in self._calls:
            places.append(len(frames))
            frames += frame + bytes(-len(frame) % _ALIGNMENT)
        arguments = (ctypes.c_char * len(frames)).from_buffer(frames)
        start = ctypes.addressof(arguments)
        table = b"".join(
            _CALL.pack(call.function.address, start + place)
            for (call, _), place in zip(self._calls, places, strict=True)
        )
        calls = ctypes.create_string_buffer(table, len(table))
        done = load()(_CHAIN.pack(ctypes.addressof(calls), len(self._calls)))
        if done < len(self._calls):
            call, failure = self._calls[done]
            outcome = call()  # once more, by itself, for its reason
            raise failure(outcome) if failure else AssertionError(f"call {done} of a chain failed with {outcome}")
