"""Where a worker's keys lie in Redis."""

from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from octavo.ids import Epoch, WorkerId
from octavo.index_schema import claims_key, index_key


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
