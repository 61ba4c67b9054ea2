"""What a gateway counts of its requests."""

from dataclasses import dataclass, field

from octavo.durations import Durations

FIRST_TOKEN_BOUNDS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Of the histogram's buckets."""


@dataclass(slots=True)
class Counters:
    """Since the gateway's start."""

    requests: int = 0
    refused: int = 0
    """Before they were sent to a worker."""
    carried_over: int = 0
    """Times that a request went on at another worker."""
    outdated_hits: int = 0
    """Hits that were dropped, one for each request and worker: the worker left, came under a new epoch, or was reset
    while the index was asked."""
    predicted_cached_tokens: int = 0
    """Whole blocks: the prefix index knows no parts."""
    delivered_cached_tokens: int = 0
    """To the token: of each prompt up to a block less one token more than was predicted, of a block that was copied."""
    undelivered_cached_tokens: int = 0
    """Predicted and gone when the request's turn came, summed over the requests that found less than was predicted. The
    difference of the two above hides them behind what others found beyond their whole blocks."""
    time_to_first_token: Durations = field(default_factory=lambda: Durations(FIRST_TOKEN_BOUNDS_SECONDS))
    """From a request's arrival on; of every request that came to a token."""
