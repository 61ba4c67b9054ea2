"""Client <-> gateway, as far as a record of ours is in it."""

from enum import Enum


class IndexState(Enum):
    """What a gateway's look-up in the prefix index is worth. This is where the three words are defined."""

    EXACT = "exact"
    """Every worker that was asked about was answered about within the budget, from a copy that its manager calls whole:
    what is not there was not published, but for changes on their way."""
    DEGRADED = "degraded"
    """Some workers were answered about so, but not all: of the others, what was found counts and may be too little."""
    FALLBACK = "fallback"
    """Nothing was learned, or nobody was asked, since Redis has not answered lately: all workers count as no hits."""
