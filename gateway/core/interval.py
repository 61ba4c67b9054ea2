"""How often a request is told its tokens: each as it comes, or several together, which costs the gateway less.

A message costs many times what a token in it does, so a gateway relays several times as many tokens a second where a
message has a few. vLLM calls the number `stream_interval`; so does this.
"""

MAX_INTERVAL = 1024
"""Tokens of a message."""

WHOLE_INTERVAL = 16
"""Of an answer that nobody reads before it is whole."""


class Interval:
    """When the tokens of one request are told. A sample's first one is, at once."""

    def __init__(self, tokens: int) -> None:
        """Then as soon as a sample has so many to tell; its end needs no such reason."""
        self._tokens = tokens
        self._untold: dict[int, int] = {}
        """Tokens of each sample that has begun."""

    def due(self, sample: int, count: int) -> bool:
        """Whether it is time to tell: a sample has so many tokens more."""
        if self._tokens == 1:
            return True
        untold = self._untold.get(sample, self._tokens - 1) + count
        self._untold[sample] = untold
        return untold >= self._tokens

    def told(self) -> None:
        """All that there was has been told."""
        for sample in self._untold:
            self._untold[sample] = 0
