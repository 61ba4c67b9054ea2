"""Stop strings in a stream of text, wherever the stream is cut.

Invariant: what was released plus what is held back is the text so far, and what is held back is the longest end of
it that some stop string begins with. The string that is complete first wins; of two that end together, the longer.
So the outcome depends on the text only, never on how it was cut.
"""


class StopScanner:
    """Releases the text of one sample up to the first stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Look for any of `stops`, none of which is empty."""
        self.watches = bool(stops)
        """Whether there is anything to look for."""
        self._stops = stops
        self._held: str = ""
        self.stopped = False
        """A stop string was found; nothing is released any more."""

    def push(self, text: str) -> str:
        """The text that is now known to stand before any stop string."""
        if self.stopped:
            return ""
        if not self.watches:
            return text
        text = self._held + text
        found = min(((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped = True
            self._held = ""
            return text[: found[1]]
        keep = self._held_back(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _held_back(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
