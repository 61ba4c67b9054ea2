"""What `octavo explain` says of a worker."""

import pytest

from octavo.commands.explain import cost_in_words, in_words
from octavo.ids import BlockId, Epoch, SequenceId
from octavo.records import HitEnd, PromptExplanation
from octavo.v1 import gateway_pb2


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
            "The 2 tokens before are too few to copy a block for, or no block is free.",
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


def test_the_terms_of_a_worker_are_put_into_words() -> None:
    cost = gateway_pb2.RoutingCost(prefill=1200, queued=30, others=40, decode=5, memory=6, total=1281)
    said = cost_in_words(gateway_pb2.WorkerExplanation(worker_id="a", predicted_cached_tokens=64, cost=cost))
    assert said == (
        "1,281 tokens of work: 1,200 to compute, 30 queued before it, 40 for what that costs others, 5 for decoding, "
        "6 for memory; 64 expected to be remembered."
    )
