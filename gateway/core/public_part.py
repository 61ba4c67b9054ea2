"""How much of a prompt anybody may know: as much as it has in common with something that the operator calls public."""

from collections.abc import Iterable, Sequence
from itertools import takewhile


def public_tokens(prompt: Sequence[int], prefixes: Iterable[Sequence[int]]) -> int:
    """Leading tokens of `prompt` that are the leading tokens of one of `prefixes`."""
    return max((_in_common(prompt, prefix) for prefix in prefixes), default=0)


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
