"""Which token ids there are, and a quick way to tell that many of them are among them."""

from array import array
from collections.abc import Sequence

from octavo.hashing import TOKEN_BYTES, token_bytes, tokens_of_bytes

MAX_VOCAB_SIZE = 1 << 31

_FEW = 32
"""Tokens that are sooner compared one by one."""

_BELOW, _EQUAL, _ABOVE = 0, 1, 0x80
"""How a byte of a token compares with the size's of the same weight; only the last is not ASCII."""


class Vocabulary:
    """The token ids [0, size).

    A prompt is judged whole where it arrives, and to compare a thousand tokens one by one costs as much as all else
    that an attach does. So all bytes of one weight are cut out at once and compared with the size's: above the size's
    highest byte there is nothing, and one below that settles most tokens. Where some are equal, the bytes of the next
    weight are; tokens that begin like the size in both are compared as numbers.
    """

    def __init__(self, size: int) -> None:
        assert 0 < size <= MAX_VOCAB_SIZE, f"{size} token ids, at most {MAX_VOCAB_SIZE} can be told apart"
        self.size = size
        self._highest = (size.bit_length() - 1) // 8
        """Where in a token the byte lies that is the size's highest."""
        highest, next_lower = (size << 8 >> 8 * self._highest).to_bytes(2)  # 0 where there is no lower one
        self._compare_highest = _comparison(highest)
        self._reaches_next = bytes(byte >= next_lower for byte in range(256))

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
        nothing = bytes(len(raw) // TOKEN_BYTES)
        for place in range(self._highest + 1, TOKEN_BYTES):
            if raw[place::TOKEN_BYTES] != nothing:
                return False
        compared = raw[self._highest :: TOKEN_BYTES].translate(self._compare_highest)
        if not compared.isascii():
            return False
        return _EQUAL not in compared or self._holds_equal(raw, compared)

    def _holds_equal(self, raw: bytes, compared: bytes) -> bool:
        """The same, where the highest bytes of some tokens are `_EQUAL` to the size's and none is above."""
        if self._highest == 0:
            return False
        reaching = raw[self._highest - 1 :: TOKEN_BYTES].translate(self._reaches_next)
        undecided = int.from_bytes(compared) & int.from_bytes(reaching)
        return not undecided or max(tokens_of_bytes(raw)) < self.size

    def first_stranger(self, tokens: Sequence[int]) -> int | None:
        """The first that is no token."""
        if self.holds(tokens):
            return None
        return next(token for token in tokens if not 0 <= token < self.size)


def _comparison(byte: int) -> bytes:
    """For `bytes.translate`: each byte's comparison with this one."""
    return bytes(_BELOW if other < byte else _EQUAL if other == byte else _ABOVE for other in range(256))
