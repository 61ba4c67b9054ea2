"""Which of several samples a client hears of, and when."""

from collections.abc import AsyncIterator, Sequence

from gateway.core.best_of import best_of
from gateway.core.events import Delta, Event, Finished, Started, Usage
from octavo.ids import WorkerId
from octavo.records.serve import FinishReason, TokenLogprobs

STARTED = Started(request_id="r", worker_id=WorkerId("w"), prompt_tokens=3, predicted_cached_tokens=0)
BILL = Usage(
    prompt_tokens=3,
    cached_tokens=0,
    output_tokens=6,
    worker_id=WorkerId("w"),
    time_to_first_token_seconds=0.1,
    total_seconds=0.2,
)


def grew(sample: int, *logprobs: float) -> Delta:
    """A letter of the sample's own for each token."""
    letters = "abcdef"[sample] * len(logprobs)
    return Delta(sample, letters, (sample,) * len(logprobs), tuple(map(TokenLogprobs, logprobs)))


def ended(sample: int, cumulative: float = 0.0) -> Finished:
    return Finished(sample, FinishReason.LENGTH, cumulative)


async def told(events: Sequence[Event], wanted: int, *, tells_logprobs: bool = False) -> list[Event]:
    async def source() -> AsyncIterator[Event]:
        for event in events:
            yield event

    return [event async for event in best_of(source(), wanted, tells_logprobs=tells_logprobs)]


async def test_the_likeliest_a_token_are_told_by_rank_before_the_bill() -> None:
    events = [
        STARTED,
        grew(0, -2.0),
        grew(1, -1.0, -1.0),
        grew(2, -3.0),
        ended(0, -2.0),
        grew(1, -1.0),
        ended(2, -3.0),
        ended(1, -3.0),
        BILL,
    ]
    assert await told(events, 2) == [
        STARTED,
        Delta(0, "bbb", (1, 1, 1)),
        Finished(0, FinishReason.LENGTH, -3.0),
        Delta(1, "a", (0,)),
        Finished(1, FinishReason.LENGTH, -2.0),
        BILL,
    ]


async def test_of_equals_the_first_is_told_and_a_text_without_tokens_comes_last() -> None:
    events = [STARTED, ended(0), grew(2, -1.0), grew(1, -1.0), ended(2, -1.0), ended(1, -1.0), BILL]
    texts = [event.text for event in await told(events, 3) if isinstance(event, Delta)]
    assert texts == ["b", "c", ""]


async def test_logprobs_that_were_asked_for_stay() -> None:
    events = [STARTED, grew(0, -1.0), ended(0, -1.0), grew(1, -0.5), ended(1, -0.5), BILL]
    (delta,) = [event for event in await told(events, 1, tells_logprobs=True) if isinstance(event, Delta)]
    assert delta == Delta(0, "b", (1,), (TokenLogprobs(-0.5),))


async def test_a_text_that_ended_before_its_first_token_comes_last_without_a_logprob() -> None:
    events = [STARTED, grew(1, -5.0), Finished(0, FinishReason.STOP), ended(1, -5.0), BILL]

    told_of_one = await told(events, 1)

    assert [event.text for event in told_of_one if isinstance(event, Delta)] == ["b"]
