"""Why a prompt finds what it finds: what an attach would answer now, and where and why the hit would end.

Reads the books and changes nothing: no order of eviction, no figure.
"""

from collections.abc import Sequence

from cache_manager.core.block import Block, Parent
from cache_manager.core.partial_hits import PartialHits
from cache_manager.core.prefix_index import PrefixIndex
from cache_manager.core.single_flight import SingleFlight
from octavo.hashing import NO_SEAM, TOKEN_BYTES, Seam, hit_candidates
from octavo.ids import BlockHash, Epoch
from octavo.records.insight import HitEnd, PromptExplanation


class Explainer:
    """Looks prompts up in one worker's books."""

    def __init__(self, epoch: Epoch, index: PrefixIndex, flights: SingleFlight, partial_hits: PartialHits) -> None:
        self._epoch = epoch
        self._index = index
        self._flights = flights
        self._partial_hits = partial_hits

    def explain(self, root: BlockHash, prompt: bytes, block_size: int, seam: Seam = NO_SEAM) -> PromptExplanation:
        """What the books hold of a prompt of at least one token, as it is hashed, whose chain begins at `root`."""
        limit = hit_candidates(len(prompt) // TOKEN_BYTES, block_size)
        hits, missing = self._index.longest_prefix(root, prompt, limit, seam)
        leader = self._flights.leader(missing) if missing is not None and len(hits) < limit else None
        if leader is not None:
            reused = len(hits) * block_size
            return PromptExplanation(
                epoch=self._epoch, reused_tokens=reused, end=HitEnd.BEING_COMPUTED, position=reused, leader=leader
            )
        return self._turned_away(hits[-1] if hits else root, prompt, hits, block_size, seam)

    def _turned_away(
        self, parent: Parent, prompt: bytes, hits: Sequence[Block], block_size: int, seam: Seam
    ) -> PromptExplanation:
        """The same, where nobody computes the block after the hits, the last of which is `parent`."""
        copied = self._partial_hits.find(parent, prompt, hits, seam)
        rest = self._partial_hits.rest_of_block(prompt, len(hits))
        block, common = self._partial_hits.closest(parent, rest, len(hits), seam) or (None, 0)
        if common == len(rest) // TOKEN_BYTES:
            end = HitEnd.LAST_TOKEN
        else:
            end = HitEnd.NOT_PUBLISHED if block is None else HitEnd.DIFFERS
        return PromptExplanation(
            epoch=self._epoch,
            reused_tokens=len(hits) * block_size + (0 if copied is None else copied.tokens),
            end=end,
            position=len(hits) * block_size + common,
            block=block.number if block is not None and end is HitEnd.DIFFERS else None,
        )
