"""Which token ids there are, and a quick way to tell that many of them are among them."""

from array import array
from collections.abc import Sequence

from octavo.hashing import TOKEN_BYTES, token_bytes

MAX_VOCAB_SIZE = 1 << 31

_FEW = 32
"""Tokens that are sooner compared one by one."""

_LANES = 256
"""Tokens judged by one addition."""


class Vocabulary:
    """The token ids [0, size).

    A prompt is judged whole where it arrives, and to compare a thousand tokens one by one costs as much as all else
    that an attach does. So they are read as one long number with a lane of 32 bits for each: below 2^31, a token plus
    (2^31 - size) has the top bit of its lane set if and only if it is no token, and never carries into the next lane.
    """

    def __init__(self, size: int) -> None:
        assert 0 < size <= MAX_VOCAB_SIZE, f"{size} token ids, at most {MAX_VOCAB_SIZE} can be told apart"
        self.size = size
        self._top_bits = _in_each_lane(1 << 31)
        self._lift = _in_each_lane((1 << 31) - size)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether all of them are tokens. Arrays are of u32."""
        if len(tokens) <= _FEW:
            return not tokens or (max(tokens) < self.size and (isinstance(tokens, array) or min(tokens) >= 0))
        try:
            raw = token_bytes(tokens)
        except OverflowError:
            return False
        return self.holds_bytes(raw)

    def holds_bytes(self, raw: bytes) -> bool:
        """Whether all of them are tokens, given as they are hashed."""
        width = _LANES * TOKEN_BYTES
        lanes = (int.from_bytes(raw[start : start + width], "little") for start in range(0, len(raw), width))
        return not any((some | (some + self._lift)) & self._top_bits for some in lanes)

    def first_stranger(self, tokens: Sequence[int]) -> int | None:
        """The first that is no token."""
        if self.holds(tokens):
            return None
        return next(token for token in tokens if not 0 <= token < self.size)


def _in_each_lane(value: int) -> int:
    return int.from_bytes(value.to_bytes(TOKEN_BYTES, "little") * _LANES, "little")
