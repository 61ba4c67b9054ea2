"""What a prompt will find at a worker: what the index says, and what this gateway has sent there."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet import Fleet
from gateway.core.in_flight import Hit, PromptBlocks, Sent, shared_blocks
from octavo.ids import WorkerId
from octavo.records.scope import Scope
from tests.support.fleets import news, pool, snapshot, worker

BLOCK = 16
HOST = worker("host")
A, B = WorkerId("a"), WorkerId("b")


def blocks_of(*tokens: int, salt: bytes = b"") -> PromptBlocks:
    return PromptBlocks(tokens, Scope(salt=salt))


def hit(tokens: int, *sent: Sent, indexed: int = 0) -> Hit:
    """Of a prompt 0, 1, 2, ..."""
    return blocks_of(*range(tokens)).hit(HOST, indexed, sent)


def sent(tokens: int, *, computed: bool = False, salt: bytes = b"") -> Sent:
    return Sent(blocks_of(*range(tokens), salt=salt).of(HOST), computed)


def test_what_was_sent_and_is_not_computed_yet_is_coming() -> None:
    assert hit(100, sent(70)) == Hit(0, 4 * BLOCK, sharers=1)


def test_what_was_sent_and_is_computed_is_there_before_the_index_says_so() -> None:
    assert hit(100, sent(70, computed=True)) == Hit(4 * BLOCK, 0, sharers=1)


def test_the_longest_of_all_counts_and_what_is_coming_stands_behind_what_is_there() -> None:
    assert hit(100, sent(40, computed=True), sent(90), sent(20), indexed=3 * BLOCK) == Hit(
        3 * BLOCK, 2 * BLOCK, sharers=1
    )


def test_the_index_may_know_more_than_this_gateway() -> None:
    assert hit(100, sent(40), indexed=5 * BLOCK) == Hit(5 * BLOCK, 0)


def test_what_other_gateways_sent_is_coming_too_and_never_there() -> None:
    prompt = blocks_of(*range(100))
    assert prompt.hit(HOST, 2 * BLOCK, (), 5 * BLOCK) == Hit(2 * BLOCK, 3 * BLOCK)
    known = prompt.hit(HOST, 0, [sent(70, computed=True)], 2 * BLOCK)
    assert known == Hit(4 * BLOCK, 0, sharers=1), "we know more than they"


def test_those_who_are_there_and_begin_with_all_that_is_there_are_counted() -> None:
    stranger = Sent(blocks_of(*range(1000, 1100)).of(HOST), computed=True)
    beside = [sent(70, computed=True), sent(100), sent(40), stranger]
    assert hit(70, *beside) == Hit(4 * BLOCK, 0, sharers=2)
    assert hit(100, *beside, indexed=6 * BLOCK) == Hit(6 * BLOCK, 0, sharers=1)
    assert hit(100, stranger) == Hit(0, 0)


def test_a_claim_alone_makes_a_worker_a_holder() -> None:
    fleet, prompt = Fleet(), blocks_of(*range(100))
    fleet.apply(snapshot(worker("a"), worker("b")), now=0.0, manager="m")
    assert fleet.hits(prompt, fleet.workers, {}, {B: 3 * BLOCK}) == {B: Hit(0, 3 * BLOCK)}


def test_the_last_token_is_always_left_to_compute() -> None:
    """S5."""
    assert hit(2 * BLOCK, sent(2 * BLOCK)) == Hit(0, BLOCK, sharers=1)


def test_what_another_tenant_sent_counts_for_nothing() -> None:
    assert hit(100, sent(100, salt=b"s" * 32)) == Hit(0, 0)


def test_pools_of_different_models_have_different_blocks() -> None:
    prompt = blocks_of(*range(100))
    assert shared_blocks(prompt.of(HOST), prompt.of(worker("other", spec=pool(dtype="bfloat16")))) == 0
    assert len(prompt.of(worker("other", spec=pool(block_size=32)))) == 3


def test_what_was_sent_to_a_worker_before_its_reset_counts_for_nothing_after_it() -> None:
    """S9."""
    fleet, prompt = Fleet(), blocks_of(*range(100))
    before, after = worker("a"), worker("a", cache_epoch=7)
    fleet.apply(snapshot(before), now=0.0, manager="m")
    fleet.reserve(before, prompt_tokens=100, cached_tokens=0, output_tokens=1, blocks=prompt.of(before))
    assert fleet.hits(prompt, fleet.workers) == {A: Hit(0, 6 * BLOCK, sharers=1)}
    fleet.apply(news(after), now=1.0, manager="m")
    assert fleet.hits(prompt, fleet.workers) == {A: Hit(0, 0)}


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6))
def test_two_prompts_share_the_blocks_up_to_their_first_difference(one: list[int], other: list[int]) -> None:
    host = worker("host", spec=pool(block_size=1))
    agree = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    expected = min(len(one), len(other)) if agree is None else agree
    assert shared_blocks(blocks_of(*one).of(host), blocks_of(*other).of(host)) == expected


def test_a_prompt_is_remembered_where_it_was_sent_until_it_ends() -> None:
    fleet, prompt = Fleet(), blocks_of(*range(100))
    fleet.apply(snapshot(worker("a"), worker("b")), now=0.0, manager="m")
    reservation = fleet.reserve(
        worker("a"), prompt_tokens=100, cached_tokens=0, output_tokens=10, blocks=prompt.of(HOST)
    )
    assert fleet.hits(prompt, fleet.workers) == {A: Hit(0, 6 * BLOCK, sharers=1)}
    fleet.prefilled(reservation)
    assert fleet.hits(prompt, fleet.workers, {B: BLOCK}) == {A: Hit(6 * BLOCK, sharers=1), B: Hit(BLOCK)}
    fleet.release(reservation)
    assert fleet.hits(prompt, fleet.workers, {B: BLOCK}) == {B: Hit(BLOCK)}


def test_a_new_process_of_a_worker_knows_nothing_of_what_the_old_one_was_sent() -> None:
    fleet, prompt = Fleet(), blocks_of(*range(100))
    fleet.apply(snapshot(worker("a")), now=0.0, manager="m")
    fleet.reserve(worker("a"), prompt_tokens=100, cached_tokens=0, output_tokens=10, blocks=prompt.of(HOST))
    fleet.apply(news(worker("a", epoch=2, incarnation=2)), now=1.0, manager="m")
    assert fleet.hits(prompt, fleet.workers) == {}
