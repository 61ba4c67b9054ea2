"""Where a worker's keys lie in Redis, and what is taken for an answer about them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot
from redis.exceptions import ResponseError

from octavo.ids import Epoch, WorkerId
from octavo.index_schema import IndexAnswer, claims_key, index_answer, index_key


@given(st.text("ab}{%7D:é", min_size=1, max_size=8), st.integers(1, 1 << 40))
@example("}", 1)
@example("{}", 1)
@example("a}b", 1)
def test_a_workers_index_and_its_claims_lie_at_one_node_whatever_it_is_called(name: str, epoch: int) -> None:
    """One script reads both."""
    worker = WorkerId(name)
    index, claims = index_key(worker, Epoch(epoch)), claims_key(worker, Epoch(epoch))
    assert index != claims
    assert key_slot(index.encode()) == key_slot(claims.encode())


@given(st.lists(st.text("ab}{%7D:1", max_size=5), min_size=2, max_size=2, unique=True))
def test_two_workers_never_share_a_key(names: list[str]) -> None:
    one, other = (index_key(WorkerId(name), Epoch(1)) for name in names)
    assert one != other


@pytest.mark.parametrize(
    "reply",
    [
        [],
        [1, 2],
        [1, 1, 1, 1],
        [b"1", 1, 1],
        [1, 1, None],
        [1, 1, ResponseError("odd")],
        [2, 1, 1],
        [-1, 1, 0],
        5,
        b"OK",
        None,
    ],
    ids=repr,
)
def test_what_is_not_three_counts_of_what_was_asked_is_no_answer(reply: object) -> None:
    """S47: whatever a server says, it costs hits; neither a request fails, nor the gateway that looks by itself."""
    assert index_answer(reply, asked=8) is None


def test_an_answer_says_what_is_held_and_what_is_coming_behind_it() -> None:
    assert index_answer([3, 0, 5], asked=5) == IndexAnswer(held=3, whole=False, coming=5)
