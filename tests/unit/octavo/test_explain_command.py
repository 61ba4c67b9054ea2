"""What `octavo explain` says of a worker."""

import pytest
from rich.console import Console

from gateway.client import WorkerExplanation
from gateway.core.routing import Cost
from octavo.commands.explain import costs, in_words
from octavo.ids import BlockId, Epoch, SequenceId, WorkerId
from octavo.records.insight import HitEnd, PromptExplanation


def found(end: HitEnd, reused: int, position: int, block: int | None = None) -> PromptExplanation:
    return PromptExplanation(
        epoch=Epoch(1),
        reused_tokens=reused,
        end=end,
        position=position,
        block=None if block is None else BlockId(block),
        leader=SequenceId(3) if end is HitEnd.BEING_COMPUTED else None,
    )


@pytest.mark.parametrize(
    ("explanation", "words"),
    [
        (
            found(HitEnd.DIFFERS, 20, 20, block=7),
            "20 of 31 tokens would be reused. At position 20 block 7 goes on with another token.",
        ),
        (
            found(HitEnd.DIFFERS, 16, 18, block=7),
            "16 of 31 tokens would be reused. At position 18 block 7 goes on with another token. "
            "The 2 tokens before it are too few to copy a block for, or no block is free.",
        ),
        (
            found(HitEnd.LAST_TOKEN, 30, 30),
            "30 of 31 tokens would be reused. All is remembered but the last token, which is always computed.",
        ),
        (
            found(HitEnd.NOT_PUBLISHED, 0, 0),
            "0 of 31 tokens would be reused. "
            "From position 0 on no full block is remembered: none was computed, or it was evicted or reset.",
        ),
        (
            found(HitEnd.BEING_COMPUTED, 16, 16),
            "16 of 31 tokens would be reused. "
            "Another request computes the block at position 16: this one would wait for it.",
        ),
    ],
)
def test_an_explanation_is_put_into_words(explanation: PromptExplanation, words: str) -> None:
    """S53, as a person reads it."""
    assert in_words(explanation, 31) == words


def test_every_term_that_a_worker_was_judged_by_is_shown_in_eighty_columns_and_explained() -> None:
    cost = Cost(prefill_tokens=123456, queued_tokens=300000, others_tokens=1999999, decode_tokens=5, memory_tokens=6)
    names = WorkerId("worker-0"), WorkerId("worker-1")
    judged = WorkerExplanation(worker_id=names[0], cache=None, predicted_cached_tokens=65536, cost=cost)
    unjudged = WorkerExplanation(worker_id=names[1], cache=None, predicted_cached_tokens=0, cost=None)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(costs([judged, unjudged], "worker-0"))
    said = capture.get()

    rows = [line.split() for line in said.splitlines() if line.startswith((" worker", "worker"))]
    assert rows == [
        ["worker", "remembered", "compute", "queued", "others", "decode", "memory", "in", "all"],
        ["worker-0", "65,536", "123,456", "300,000", "1,999,999", "5", "6", "2,423,466"],
    ]
    terms = ("remembered", "compute", "queued", "others", "decode", "memory")
    assert all(f"{term}: " in " ".join(said.split()) for term in terms)
