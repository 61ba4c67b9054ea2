"""The best of several samples: all of them are held back to the end, and the likeliest are told.

Ranked by the mean logarithm of a token's probability, under the model's own distribution, so that a text is not
preferred for being short; of equals, the sample that was numbered first. A text without tokens comes last.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from math import inf

from gateway.core.events import Delta, Event, Finished


async def best_of(events: AsyncIterator[Event], wanted: int, *, tells_logprobs: bool) -> AsyncGenerator[Event]:
    """The same events with the best `wanted` samples alone, numbered by rank, one Delta each, before the last event.

    Args:
        events: of all samples, with the logprobs of every token; no sample speaks after the last one's end.
        wanted: at most as many as there are.
        tells_logprobs: whether the client asked for them.
    """
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    ends: list[Finished] = []
    async for event in events:
        match event:
            case Delta():
                deltas[event.sample].append(event)
            case Finished():
                ends.append(event)
            case _ if ends:  # the bill, behind the last sample's end
                for place, end in enumerate(sorted(ends, key=lambda end: _rank(end, deltas[end.sample]))[:wanted]):
                    yield _joined(place, deltas[end.sample], tells_logprobs=tells_logprobs)
                    yield replace(end, sample=place)
                yield event
            case _:
                yield event


def _rank(end: Finished, deltas: list[Delta]) -> tuple[float, int]:
    """Sorts the best first."""
    length = sum(len(delta.token_ids) for delta in deltas)
    if not length:
        return inf, end.sample
    assert end.cumulative_logprob is not None, f"sample {end.sample} came without logprobs"
    return -end.cumulative_logprob / length, end.sample


def _joined(place: int, deltas: list[Delta], *, tells_logprobs: bool) -> Delta:
    return Delta(
        place,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(logprobs for delta in deltas for logprobs in delta.logprobs) if tells_logprobs else (),
    )
