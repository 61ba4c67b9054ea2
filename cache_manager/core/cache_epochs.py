"""Which cache epoch each reset and each newcomer is given.

Invariants:
- Every number that is given for a reset is larger than all that were given or heard of before. It is at least the time
  in milliseconds, so managers that know nothing of one another agree on which reset was the later one.
- No worker is below the last reset that meant it: one that was away when it happened is reset when it comes back.

`now` is in seconds since 1970 and must not go back within a process.
"""

from octavo.errors import InvalidRequest
from octavo.ids import NEVER_RESET, CacheEpoch, WorkerId

MAX_CACHE_EPOCH = 1 << 63
"""It travels as u64; a worker that claims more would leave no room for the next reset."""


class CacheEpochs:
    """The numbers of one manager."""

    def __init__(self) -> None:
        self._last = NEVER_RESET
        """The largest that was given or heard of."""
        self._of_all = NEVER_RESET
        """The last reset of all workers."""
        self._of_one: dict[WorkerId, CacheEpoch] = {}
        """The last reset of one worker alone; as many as operators have asked for."""

    def raised(self, worker: WorkerId | None, now: float) -> CacheEpoch:
        """For a reset of one worker; None means all, those that are away included."""
        self._last = CacheEpoch(max(self._last + 1, int(now * 1000)))
        if worker is None:
            self._of_all = self._last
            self._of_one.clear()
        else:
            self._of_one[worker] = self._last
        return self._last

    def least(self, worker: WorkerId) -> CacheEpoch:
        """What the worker has to have been told by now."""
        return self._of_one.get(worker, self._of_all)

    def heard(self, claimed: CacheEpoch) -> CacheEpoch:
        """A worker says that it was told of `claimed`.

        Returns:
            The latest of all: for a worker in whose pool nothing is published, so that as many as possible have the
            same hash chains.
        """
        self._last = max(self._last, claimed)
        return self._last


def require_cache_epoch(claimed: CacheEpoch) -> None:
    """Raises InvalidRequest where a worker claims a number that cannot have been given."""
    if claimed > MAX_CACHE_EPOCH:
        raise InvalidRequest(f"register.cache_epoch: {claimed}, at most {MAX_CACHE_EPOCH} can have been given")
