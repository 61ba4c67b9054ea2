"""How much one gateway takes on, and how long anything may take."""

from dataclasses import dataclass, field

from gateway.core.request import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Each is a setting of its own (gateway/settings.py)."""

    remembered_tokens: int = 4 << 20
    """Of earlier answers, whose very tokens are used when their text comes again; 4 bytes each."""
    limits: Limits = field(default_factory=Limits)
    stream_interval: int = 1
    """Tokens of a message where the request does not say."""
    max_running: int = 256
    max_waiting: int = 1024
    max_wait_seconds: float = 30.0
    """For a place to run in, and a worker to run at."""
    max_request_seconds: float = 3600.0
    """For a whole request whose client named no deadline."""
    max_attempts: int = 5
    """Workers that may be lost under a request in a row, without a token in between."""
    max_standstill_seconds: float = 30.0
    """For a worker, when a request that was let in finds none."""
