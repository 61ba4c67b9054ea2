"""A part of a pool, as people write it: `25%` of whatever the pool has, or `512MiB`, `2GB`, `1000000` bytes."""

import re
from dataclasses import dataclass
from decimal import Decimal

_FORM = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>%|[KMGT]?i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPart:
    """So many per cent of a pool's blocks and as many as so many bytes hold, together; one of the two is 0."""

    percent: Decimal = Decimal(0)
    num_bytes: int = 0

    def blocks(self, num_blocks: int, block_bytes: int) -> int:
        """Whole blocks, at most all of the pool. Bytes come to none where the size of a block is not known (0)."""
        of_bytes = self.num_bytes // block_bytes if block_bytes else 0
        return min(num_blocks, int(self.percent * num_blocks / 100) + of_bytes)


NOTHING = PoolPart()


def parse_pool_part(text: str) -> PoolPart:
    """The part of which the text speaks. Raises ValueError that shows it."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"wanted a part of a pool, as 25% or 512MiB, got {text!r}")
    number, unit = Decimal(match["number"]), (match["unit"] or "B").lower()
    if unit != "%":
        base = 1024 if "i" in unit else 1000
        return PoolPart(num_bytes=int(number * base ** _POWERS[unit.rstrip("b").rstrip("i")]))
    if number > 100:
        raise ValueError(f"wanted at most 100%, got {text!r}")
    return PoolPart(percent=number)
