"""What can go wrong between the parts, named for what happened.

    OctavoError
    ├── InvalidRequest          the caller must change it
    ├── Unauthenticated         the caller must show a key that is known
    ├── UnknownSequence         the caller may forget it
    ├── UnknownWorker           no such worker in the fleet
    ├── UnknownModel            there is no model of this name
    ├── NoWorker                nobody serves the model just now
    ├── Overloaded              the caller may wait, or preempt and retry
    │   ├── PoolExhausted       too few blocks
    │   ├── QueueFull           too many requests wait, or it would wait too long
    │   └── QuotaExceeded       the tenant has had what it may have for now
    ├── StaleEpoch              the caller must register again
    ├── Superseded              another process has taken the caller's place: it must leave
    ├── Draining                the caller should go elsewhere
    └── WorkerLost              the worker of a running request is gone

Each takes a message, which names the field and both numbers: "wanted 3 blocks, 1 available". Those that may pass say
after how many seconds it is worth asking again.
A call that raises one of these has changed nothing. `octavo.status` is the only table that maps them to gRPC.
"""


class OctavoError(Exception):
    """Anything a caller can act on."""

    retry_after_seconds: float | None = None
    """When it may be worth asking again; None where that changes nothing."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        """Say what happened; `retry_after_seconds` where it is known better than the class knows it."""
        super().__init__(message)
        if retry_after_seconds is not None:
            self.retry_after_seconds = retry_after_seconds


class InvalidRequest(OctavoError):
    """The request cannot be served as it is."""


class Unauthenticated(OctavoError):
    """The call shows no API key that is known."""


class UnknownSequence(OctavoError):
    """The sequence is not, or no longer, in the books."""


class UnknownWorker(OctavoError):
    """The worker is not in the fleet."""


class UnknownModel(OctavoError):
    """There is no model of this name."""


class NoWorker(OctavoError):
    """The model is known, and no worker serves it just now: one may come, or come back."""

    retry_after_seconds = 1.0


class Overloaded(OctavoError):
    """There is no room now; there may be later."""

    retry_after_seconds = 1.0


class PoolExhausted(Overloaded):
    """The pool has fewer free blocks than the call needs."""


class QueueFull(Overloaded):
    """As many requests wait as may wait."""


class QuotaExceeded(Overloaded):
    """The tenant has had as many requests or tokens as it may have for now."""


class StaleEpoch(OctavoError):
    """The message belongs to a registration that is over."""


class Superseded(OctavoError):
    """Another process registered later under the same worker id; this one must not register again."""


class Draining(OctavoError):
    """The service finishes what it has and takes nothing new."""

    retry_after_seconds = 1.0


class WorkerLost(OctavoError):
    """The worker that ran the request is gone."""

    retry_after_seconds = 1.0
