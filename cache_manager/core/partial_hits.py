"""Sub-block reuse: the tokens of a prompt's next block that are worth a copy of another block.

After its longest run of published blocks a prompt often goes on like a published block for some tokens and then leaves
it: a chat turn that was cut off and goes on differently, a document behind a beginning that ends inside a block. Those
tokens are not computed again: the block is copied into one of the prompt's own, which goes on from there. The longer
the blocks, the more lies in this.

What is copied need not be published by the same sequence, nor be held by anyone. It can be evicted at once: its worker
makes the copy before any write of its next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cache_manager.core.block import Block, Parent
from cache_manager.core.block_pool import BlockPool
from cache_manager.core.prefix_index import PrefixIndex
from octavo.hashing import NO_SEAM, TOKEN_BYTES, Seam

DEFAULT_MIN_COPY_TOKENS = 4
"""A copy costs memory traffic for all positions of a block, whatever it saves. With SmolLM2 in float32 on one CPU core
a block of 16, 64, 256 positions is copied in 1.3, 2.0, 6.2 ms, and a prompt token is computed in 1.9 ms: four
tokens pay for any of them. Fewer are what prompts have in common by chance or by their chat template."""


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A published block that begins like the next block of a prompt."""

    source: Block
    tokens: int
    """Leading ones that both have in common, fewer than a block."""


class PartialHits:
    """Finds what can be copied in one worker's books; changes nothing."""

    def __init__(self, pool: BlockPool, index: PrefixIndex, block_size: int, min_copy_tokens: int) -> None:
        """Fewer tokens than `min_copy_tokens` are not worth a copy; 0: nothing is."""
        self._pool = pool
        self._index = index
        self._width = block_size * TOKEN_BYTES
        self._min_copy_tokens = min_copy_tokens

    def find(self, parent: Parent, prompt: bytes, hits: Sequence[Block], seam: Seam = NO_SEAM) -> PartialHit | None:
        """What to copy for the block after the hits of a prompt, the last of which is `parent`.

        `prompt` is all of it, as it is hashed. None when nothing begins alike for long enough, or when there is no
        block for the copy besides the hits and what would be copied from.
        """
        rest = self.rest_of_block(prompt, len(hits))
        if not 0 < self._min_copy_tokens <= len(rest) // TOKEN_BYTES:
            return None
        closest = self.closest(parent, rest, len(hits), seam)
        if closest is None:
            return None
        source, tokens = closest
        if tokens < self._min_copy_tokens:
            return None
        wanted = sum(not block.references for block in (*hits, source))
        return PartialHit(source, tokens) if self._pool.num_available > wanted else None

    def closest(self, parent: Parent, rest: bytes, block: int, seam: Seam) -> tuple[Block, int] | None:
        """The published block that begins most like the rest of a prompt's block, and how many tokens they share.

        At the seam there is none: a private block begins with a salt, and a part of it is not worth the care.
        """
        return None if block == seam.block else self._index.branches.closest(parent, rest)

    def rest_of_block(self, prompt: bytes, blocks: int) -> bytes:
        """The tokens of the block after the first `blocks`, without the prompt's last, which must be computed."""
        start = blocks * self._width
        return prompt[start : min(start + self._width, len(prompt) - TOKEN_BYTES)]
