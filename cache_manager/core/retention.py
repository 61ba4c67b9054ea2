"""Blocks that requests have asked to keep for a while: what waits for its time to be up, and in which order.

`retain_seconds` of a request holds for its whole chain, so a parent is asked for until its child is, or longer. Of the
blocks of one account that wait, those whose time is up first leave first, and of several such those that came first,
which are the tails of their chains. So a block always leaves before its parent does.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping

from cache_manager.core.block import Block


class Retention:
    """Until when blocks are to be kept, and those that wait for it, each for an account. Times are in seconds."""

    def __init__(self, num_accounts: int) -> None:
        self.ends: dict[Block, float] = {}
        """Of every block that was asked for and is published, waiting or not. For reading."""
        self._waits: dict[Block, tuple[float, int, int]] = {}
        """Of those that wait: until when, their place among those of the same time, and for which account."""
        self._lines: list[list[tuple[float, int, Block]]] = [[] for _ in range(num_accounts)]
        """Of each account a heap of (until, place, block). Who has left may still stand in it."""
        self._counts = [0] * num_accounts
        self._places = 0
        self.next_end = math.inf
        """No block that waits is to be kept no longer before that time."""

    def __len__(self) -> int:
        """Blocks that wait."""
        return len(self._waits)

    def waiting(self, account: int) -> int:
        """Blocks of an account that wait."""
        return self._counts[account]

    def ask(self, blocks: Iterable[Block], until: float) -> None:
        """Leading blocks of a chain, all of them published, are to be kept until then."""
        for block in blocks:
            self.ends[block] = max(until, self.ends.get(block, until))

    def until(self, block: Block) -> float:
        """Until when the block is to be kept; a time long ago if nobody asked for it."""
        return self.ends.get(block, 0.0)

    def forget(self, blocks: Iterable[Block]) -> None:
        """Nothing is published in these blocks any more."""
        for block in blocks:
            self.ends.pop(block, None)

    def wait(self, block: Block, account: int) -> None:
        """A block begins to wait."""
        self._places += 1
        until = self.ends[block]
        self._waits[block] = (until, self._places, account)
        self._counts[account] += 1
        self.next_end = min(until, self.next_end)
        heapq.heappush(self._lines[account], (until, self._places, block))

    def leave(self, block: Block) -> bool:
        """A block waits no longer, because it has an owner again. Returns whether it did wait."""
        if block not in self._waits:
            return False
        _, _, account = self._waits.pop(block)
        self._counts[account] -= 1
        line = self._lines[account]
        if len(line) > 2 * self._counts[account] + 64:
            line[:] = filter(self._still_waits, line)
            heapq.heapify(line)
        return True

    def first_end(self, account: int) -> float:
        """When the first of an account's waiting blocks is to be kept no longer."""
        line = self._lines[account]
        while line and not self._still_waits(line[0]):
            heapq.heappop(line)
        return line[0][0] if line else math.inf

    def take(self, account: int) -> Block:
        """The first of an account's waiting blocks; there is one. It waits no longer."""
        assert self.first_end(account) < math.inf, f"nothing waits for account {account}"
        _, _, block = heapq.heappop(self._lines[account])
        del self._waits[block]
        self._counts[account] -= 1
        return block

    def take_over(self, account: int, now: float) -> Iterator[Block]:
        """Take the waiting blocks of an account whose time is up."""
        while self.first_end(account) <= now:
            yield self.take(account)

    def blocks(self) -> list[Block]:
        """Those that wait, in no order."""
        return list(self._waits)

    def copy(self, twins: Mapping[Block, Block]) -> "Retention":
        """Another one in which the twins of the blocks that wait do so."""
        twin = Retention(len(self._lines))
        for block, (until, place, account) in self._waits.items():
            twin.ends[twins[block]] = until
            twin._waits[twins[block]] = (until, place, account)
            heapq.heappush(twin._lines[account], (until, place, twins[block]))
        twin._counts = self._counts[:]
        twin._places, twin.next_end = self._places, self.next_end
        return twin

    def _still_waits(self, entry: tuple[float, int, Block]) -> bool:
        until, place, block = entry
        return self._waits.get(block, (until, 0))[:2] == (until, place)
