"""The chapter's allocator and prefix cache, written anew from its description: what the ledger is measured against.

Only the books, no tensors. As described: blocks in a deque with a reference count each; whole token prefixes as the
keys of an ordered dictionary that holds a reference of its own on every block it names; and eviction that walks this
dictionary from its oldest entry until enough blocks are free.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence


class ChapterBooks:
    """Block tables over one pool, and the prefixes that can be found in it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be had without an eviction."""
        return len(self._free)

    def attach(self, sequence: int, prompt: Sequence[int]) -> int:
        """Create a sequence on the longest known prefix. Returns the tokens reused; one is always left to compute."""
        table: list[int] = []
        for end in range(self._size, len(prompt), self._size):
            key = tuple(prompt[:end])
            block = self._prefixes.get(key)
            if block is None:
                break
            self._prefixes.move_to_end(key)
            self._references[block] += 1
            table.append(block)
        self._tables[sequence] = table
        self._lengths[sequence] = len(table) * self._size
        return self._lengths[sequence]

    def reserve(self, sequence: int, count: int) -> None:
        """Make positions [length, length + count) writable, evicting where blocks are short.

        No sequence is forked here, and only full blocks are found: nothing that is written to is ever shared.

        Raises:
            MemoryError: every block is in use.
        """
        table = self._tables[sequence]
        missing = -(-(self._lengths[sequence] + count) // self._size) - len(table)
        if missing > len(self._free):
            self._evict(missing)
        for _ in range(missing):
            table.append(self._allocate())

    def commit(self, sequence: int, count: int) -> None:
        """Count positions as written."""
        self._lengths[sequence] += count

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """Let the full blocks of a computed prompt be found."""
        table = self._tables[sequence]
        for index in range(len(tokens) // self._size):
            key = tuple(tokens[: (index + 1) * self._size])
            if key not in self._prefixes:
                self._references[table[index]] += 1
                self._prefixes[key] = table[index]

    def free(self, sequence: int) -> None:
        """Forget a sequence and give its references back."""
        for block in self._tables.pop(sequence):
            self._release(block)
        del self._lengths[sequence]

    def _evict(self, wanted: int) -> None:
        """Drop the oldest prefixes that no sequence uses, until `wanted` blocks are free."""
        for key in list(self._prefixes):
            if len(self._free) >= wanted:
                break
            block = self._prefixes[key]
            if self._references[block] == 1:
                del self._prefixes[key]
                self._release(block)

    def _allocate(self) -> int:
        if not self._free:
            raise MemoryError("the pool is exhausted")
        block = self._free.popleft()
        self._references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)
