"""What may be asked of sampling and of a search for beams: ranges that gateway and worker both hold to.

Presence and frequency penalties and biases have the ranges of OpenAI's API. Those of the repetition penalty keep every
logit finite.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from octavo.errors import InvalidRequest
from octavo.records.sampling import BeamSearch

MAX_TOP_LOGPROBS = 20
"""Of the likeliest tokens, listed at one position."""
MAX_LOGIT_BIASES = 1024
"""Tokens with one, of a request."""


class Knobs(Protocol):
    """The numbers that shape a distribution, wherever they stand."""

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def min_p(self) -> float: ...  # noqa: D102
    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102
    @property
    def presence_penalty(self) -> float: ...  # noqa: D102
    @property
    def frequency_penalty(self) -> float: ...  # noqa: D102


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (  # all false for NaN
    ("temperature", lambda value: 0 <= value < inf, "at least 0 and finite"),
    ("top_k", lambda value: value >= 0, "at least 0"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("repetition_penalty", lambda value: 0.0625 <= value <= 16, "from 0.0625 to 16"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
)


def require_knobs(knobs: Knobs, within: str = "") -> None:
    """Raises InvalidRequest for a number that is out of its range; `within` stands before the field's name."""
    for field, holds, wanted in _RANGES:
        value = getattr(knobs, field)
        if not holds(value):
            raise InvalidRequest(f"{within}{field}: {value:.9g}, wanted {wanted}")


def require_biases(biases: Iterable[tuple[int, float]], within: str = "") -> None:
    """Raises InvalidRequest for too many of them, or one out of range. The vocabulary is another's affair."""
    biases = tuple(biases)
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"{within}logit_bias: {len(biases)} tokens, at most {MAX_LOGIT_BIASES}")
    for token, bias in biases:
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"{within}logit_bias[{token}]: {bias:.9g}, wanted from -100 to 100")


def require_top_logprobs(field: str, count: int | None) -> None:
    """Raises InvalidRequest for more of the likeliest tokens than are listed."""
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{field}: {count}, wanted from 0 to {MAX_TOP_LOGPROBS}")


def require_beam(beam: BeamSearch, *, samples: int, temperature: float, logprobs: int | None, most: int) -> None:
    """Raises InvalidRequest where that is no search: too few or too many beams, or something that only draws have."""
    if not 1 <= beam.width <= most:
        raise InvalidRequest(f"beam.width: {beam.width}, wanted from 1 to {most}")
    if samples > beam.width:
        raise InvalidRequest(f"n: {samples} with beam.width {beam.width}, wanted at most as many")
    if not -8 <= beam.length_penalty <= 8:
        raise InvalidRequest(f"beam.length_penalty: {beam.length_penalty:.9g}, wanted from -8 to 8")
    if beam.exhaustive and beam.early_stopping:
        raise InvalidRequest("beam.exhaustive: true with beam.early_stopping, wanted one of them at most")
    if temperature != 0:
        raise InvalidRequest(f"temperature: {temperature:.9g} with beam, wanted 0: a search draws nothing")
    if logprobs is not None:
        told = "of a search only each text's cumulative_logprob is told, and that over gRPC"
        raise InvalidRequest(f"logprobs: {logprobs} with beam, wanted none: {told}")
