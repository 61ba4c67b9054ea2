import pytest

from cache_manager.core.changes import Evicted, Published
from cache_manager.core.ledger import Ledger
from cache_manager.core.single_flight import WaitFor
from octavo.errors import InvalidRequest, PoolExhausted, UnknownSequence
from octavo.hashing import block_hashes
from octavo.ids import SequenceId
from octavo.records.attend import BlockCopy
from octavo.records.scope import Media, Scope
from tests.support.books import (
    EPOCH,
    append,
    compute,
    idle,
    open_ledger,
    pool_spec,
    state_of,
    tokens_of,
)

A, B, C, D, E, F = map(SequenceId, range(1, 7))


def hashes(tokens, salt=b""):
    spec = pool_spec()
    return block_hashes(spec.chain_root(Scope(salt=salt)).hash(), tokens, spec.block_size)


def held(ledger):
    return ledger.audit().held_blocks


class TestAttach:
    def test_a_cold_prompt_reuses_nothing(self):
        ledger = open_ledger()
        assert ledger.attach(A, tokens_of(0, 9)) == 0
        assert (ledger.length(A), ledger.blocks(A)) == (0, ())

    @pytest.mark.parametrize("blocks", [1, 2, 3])
    @pytest.mark.parametrize(("beyond", "fewer"), [(-1, 1), (0, 1), (1, 0)])
    def test_a_hit_is_the_full_blocks_before_the_last_token(self, blocks, beyond, fewer):
        """S5: boundary lengths kS-1, kS, kS+1; the second run computes from 1 to S tokens."""
        ledger = open_ledger()
        prompt = tokens_of(0, 4 * blocks + beyond)
        assert compute(ledger, A, prompt) == 0
        assert ledger.attach(B, prompt) == 4 * (blocks - fewer)
        assert 1 <= len(prompt) - ledger.length(B) <= 4
        ledger.check()

    @pytest.mark.parametrize(("shared", "hit"), [(15, 0), (16, 16), (17, 16), (31, 16)])
    def test_a_prefix_is_shared_in_whole_blocks_if_no_part_of_a_block_is_to_be_copied(self, shared, hit):
        """S4: shared prefixes of B-1, B, B+1, 2B-1 tokens (B = 16), each followed by five tokens of its own."""
        ledger = open_ledger(block_size=16, min_copy_tokens=0)
        compute(ledger, A, tokens_of(0, shared) + tokens_of(500, 5))
        assert ledger.attach(B, tokens_of(0, shared) + tokens_of(600, 5)) == hit
        assert idle(ledger).copies == ()

    @pytest.mark.parametrize(("prompt", "too_short"), [(3, 1), (4, 1), (5, 0)])
    def test_prompts_that_are_too_short_to_hit_are_counted(self, prompt, too_short):
        """S4: without a full block before its last token a prompt cannot hit, and the figures say so."""
        ledger = open_ledger()
        ledger.attach(A, tokens_of(0, prompt))
        assert ledger.stats().too_short_to_hit == too_short

    def test_a_hit_outlives_the_sequence_that_paid_for_it(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 9))
        blocks = ledger.blocks(A)
        ledger.free(A)
        assert ledger.attach(B, tokens_of(0, 9)) == 8
        assert ledger.blocks(B) == blocks[:2]

    def test_tenants_do_not_share(self):
        """S51, in the books: the same tokens under another salt are another chain."""
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 16), salt=b"x" * 32)
        assert ledger.attach(B, tokens_of(0, 16), Scope(salt=b"y" * 32)) == 0
        assert ledger.attach(C, tokens_of(0, 16)) == 0
        assert ledger.attach(D, tokens_of(0, 16), Scope(salt=b"x" * 32)) == 12

    def test_media_in_their_order_are_a_scope_of_their_own(self):
        ledger = open_ledger()
        one, other = (Scope(media=(Media(1, b"i" * 32), Media(at, b"j" * 32))) for at in (2, 5))
        assert ledger.attach(A, tokens_of(0, 6), one) == 0
        append(ledger, A, tokens_of(0, 6))
        assert (ledger.attach(B, tokens_of(0, 6), one), ledger.attach(C, tokens_of(0, 6), other)) == (4, 0)

    @pytest.mark.parametrize(
        ("positions", "reason"),
        [
            ((6,), r"media of sequence 1: position 6, wanted in \[0, 6\)"),
            ((3, 3), r"media of sequence 1: position 3, wanted in \[4, 6\)"),
            ((5, 2), r"media of sequence 1: position 2, wanted in \[6, 6\)"),
        ],
    )
    def test_media_out_of_their_order_are_refused(self, positions, reason):
        ledger = open_ledger()
        before = state_of(ledger)
        scope = Scope(media=tuple(Media(at, b"i" * 32) for at in positions))
        with pytest.raises(InvalidRequest, match=reason):
            ledger.attach(A, tokens_of(0, 6), scope)
        assert state_of(ledger) == before

    @pytest.mark.parametrize("spare", [0, 1, 2])
    def test_a_request_never_evicts_its_own_hit(self, spare):
        """S5: a prompt of exactly kB tokens, twice, in a pool of N = need blocks and a few more."""
        ledger = open_ledger(num_blocks=3 + spare)
        prompt = tokens_of(0, 12)
        compute(ledger, A, prompt)
        ledger.free(A)
        assert ledger.attach(B, prompt) == 8
        hit = ledger.blocks(B)
        ledger.reserve(B, 4)
        assert ledger.blocks(B)[:2] == hit
        ledger.commit(B, prompt[8:])
        ledger.check()
        ledger.free(B)
        assert ledger.attach(C, prompt) == 8

    def test_the_figures_count_hits(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 9))
        compute(ledger, B, tokens_of(0, 9))
        stats = ledger.stats()
        assert (stats.attached_sequences, stats.attached_tokens, stats.hit_tokens) == (2, 18, 8)


class TestReserve:
    @pytest.mark.parametrize(("count", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
    def test_positions_get_blocks(self, count, blocks):
        """Boundary lengths kS-1, kS, kS+1."""
        ledger = open_ledger()
        ledger.attach(A, [1])
        ledger.reserve(A, count)
        assert len(ledger.blocks(A)) == blocks
        ledger.check()

    def test_the_rest_of_a_block_is_writable_without_being_asked_for(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 5))
        blocks = ledger.blocks(A)
        ledger.reserve(A, 3)
        assert ledger.blocks(A) == blocks
        with pytest.raises(InvalidRequest, match="end at 9, writable up to 8"):
            ledger.commit(A, [5, 6, 7, 8])
        ledger.commit(A, [5, 6, 7])
        ledger.check()

    def test_asking_again_changes_nothing(self):
        ledger = open_ledger()
        ledger.attach(A, [1])
        ledger.reserve(A, 6)
        before = state_of(ledger)
        ledger.reserve(A, 6)
        ledger.reserve(A, 2)
        assert state_of(ledger) == before

    def test_a_shortage_takes_nothing(self):
        ledger = open_ledger(num_blocks=2)
        ledger.attach(A, [1])
        before = state_of(ledger)
        with pytest.raises(PoolExhausted, match="wanted 3 blocks, 2 available"):
            ledger.reserve(A, 9)
        assert state_of(ledger) == before

    def test_a_shortage_of_the_copy_alone_takes_nothing(self):
        ledger = open_ledger(num_blocks=2)
        compute(ledger, A, tokens_of(0, 6))
        ledger.fork(A, [B])
        before = state_of(ledger)
        with pytest.raises(PoolExhausted, match="wanted 1 blocks, 0 available"):
            ledger.reserve(B, 1)
        assert state_of(ledger) == before

    def test_the_last_owner_writes_in_place(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 6))
        ledger.fork(A, [B])
        tail = ledger.blocks(A)[1]
        ledger.free(A)
        ledger.reserve(B, 1)
        assert ledger.blocks(B)[1] == tail
        assert idle(ledger).copies == ()

    def test_a_published_block_is_copied_even_for_its_last_owner(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 8))
        first, second = ledger.blocks(A)
        ledger.truncate(A, 6)
        append(ledger, A, [77])
        assert ledger.blocks(A) == (first, 2)
        assert idle(ledger).copies == (BlockCopy(second, 2),)
        assert ledger.stats().copied_blocks == 1
        ledger.check()
        assert ledger.attach(B, [*tokens_of(0, 8), 9]) == 8

    def test_full_blocks_are_never_copied(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 8))
        ledger.fork(A, [B])
        append(ledger, B, [77])
        assert ledger.blocks(B)[:2] == ledger.blocks(A)
        assert idle(ledger).copies == ()


class TestCommit:
    def test_a_block_is_published_when_it_is_full(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 7))
        assert ledger.take_changes() == (Published((hashes(range(4))[0],)),)
        append(ledger, A, [7])
        assert ledger.take_changes() == (Published((hashes(range(8))[1],)),)

    def test_what_is_published_is_listed_parents_first(self):
        ledger = open_ledger(num_blocks=3)
        compute(ledger, A, tokens_of(0, 8))
        compute(ledger, B, tokens_of(100, 4))
        ledger.free(A)
        ledger.reserve(B, 4)  # evicts the tail of A's chain
        assert set(ledger.published()) == {hashes(range(4))[0], hashes(tokens_of(100, 4))[0]}
        ledger.attach(A, tokens_of(0, 8))
        ledger.truncate(B, 4)
        append(ledger, A, tokens_of(4, 4))
        listed = ledger.published()
        assert set(listed) == {*hashes(range(8)), hashes(tokens_of(100, 4))[0]}
        assert listed.index(hashes(range(4))[0]) < listed.index(hashes(range(8))[1])

    def test_changes_are_taken_once(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 4))
        ledger.take_changes()
        assert ledger.take_changes() == ()

    def test_reserved_positions_are_not_published(self):
        ledger = open_ledger()
        ledger.attach(A, tokens_of(0, 9))
        ledger.reserve(A, 9)
        assert ledger.attach(B, tokens_of(0, 9)) == WaitFor(A)

    def test_an_equal_block_is_merged(self):
        ledger = open_ledger()
        for sequence in (A, B):  # neither prompt fills a block: that they go on alike is nobody's to foresee
            ledger.attach(sequence, tokens_of(0, 3))
        append(ledger, A, tokens_of(0, 9))
        append(ledger, B, tokens_of(0, 9))
        assert ledger.blocks(B)[:2] == ledger.blocks(A)[:2]
        assert held(ledger) == 4
        assert ledger.stats().merged_blocks == 2
        ledger.check()

    def test_merged_blocks_are_the_first_to_be_used_again(self):
        ledger = open_ledger()
        ledger.attach(A, tokens_of(0, 4))
        ledger.attach(B, tokens_of(0, 4))
        append(ledger, A, tokens_of(0, 4))
        ledger.reserve(B, 4)
        (own,) = ledger.blocks(B)
        ledger.commit(B, tokens_of(0, 4))
        assert next(ledger.free_list()) == own

    def test_a_merge_takes_a_cached_block_back(self):
        ledger = open_ledger()
        ledger.attach(B, tokens_of(0, 3))
        compute(ledger, A, tokens_of(0, 5))
        ledger.free(A)
        append(ledger, B, tokens_of(0, 5))
        assert ledger.audit().cached_blocks == 0
        ledger.check()

    def test_hits_are_right_even_when_all_hashes_are_the_same(self):
        ledger = Ledger(pool_spec(block_size=1), EPOCH, next_hash=lambda parent, tokens: bytes(32))
        compute(ledger, A, [5, 6, 7])
        assert ledger.attach(B, [5, 6, 8, 7]) == 2
        assert ledger.blocks(B) == ledger.blocks(A)[:2]
        ledger.check()


class TestFork:
    def test_children_alias_the_table(self):
        """S10, first half: a fork takes no block."""
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 13))
        ledger.fork(A, [B, C, D])
        assert ledger.blocks(B) == ledger.blocks(C) == ledger.blocks(D) == ledger.blocks(A)
        assert held(ledger) == 4
        ledger.check()

    @pytest.mark.parametrize("reserve", [0, 1])
    def test_four_children_of_a_freed_parent_take_one_block_each(self, reserve):
        """S10: a prompt of 2B+5 (B = 16), four forks, four different tokens, the parent freed first: 2 + 4 blocks."""
        ledger = open_ledger(block_size=16)
        prompt = tokens_of(0, 2 * 16 + 5)
        compute(ledger, A, prompt)
        children = [B, C, D, E]
        ledger.fork(A, children, reserve)
        ledger.free(A)
        for number, child in enumerate(children):
            append(ledger, child, [900 + number])
            ledger.check()
        assert held(ledger) == 2 + 4
        tails = {ledger.blocks(child)[2] for child in children}
        assert len(tails) == 4
        for child in children:
            ledger.free(child)
        audit = ledger.audit()
        assert (audit.held_blocks, audit.free_blocks + audit.cached_blocks) == (0, 16)

    @pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
    @pytest.mark.parametrize("reserve", [1, 4, 5])
    def test_every_child_can_write_what_was_reserved(self, length, reserve):
        """Boundary lengths kS-1, kS, kS+1."""
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, length))
        ledger.fork(A, [B, C], reserve)
        ledger.check()
        for child in (B, C):
            ledger.commit(child, tokens_of(100 * child, reserve))
            ledger.check()
        assert ledger.length(B) == ledger.length(C) == length + reserve

    def test_a_parent_must_reserve_again_before_it_writes_to_a_shared_tail(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 5))
        ledger.reserve(A, 2)
        ledger.fork(A, [B])
        with pytest.raises(InvalidRequest, match="end at 6, writable up to 5"):
            ledger.commit(A, [70])
        append(ledger, A, [70])
        assert ledger.blocks(A)[1] != ledger.blocks(B)[1]

    def test_a_fork_that_is_too_wide_fails_whole(self):
        """S28: five children that need a block each, three blocks."""
        ledger = open_ledger(num_blocks=5)
        compute(ledger, A, tokens_of(0, 6))
        before = state_of(ledger)
        with pytest.raises(PoolExhausted, match="wanted 5 blocks, 3 available"):
            ledger.fork(A, [B, C, D, E, F], 1)
        assert state_of(ledger) == before
        ledger.check()

    def test_a_child_hits_nothing_of_its_own_later_tokens(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 6))
        ledger.fork(A, [B])
        append(ledger, B, [60, 61])
        append(ledger, A, [70, 71])
        assert ledger.attach(C, [*tokens_of(0, 6), 60, 61, 1]) == 8
        assert ledger.blocks(C) == ledger.blocks(B)
        assert ledger.attach(D, [*tokens_of(0, 6), 70, 71, 1]) == 8
        assert ledger.blocks(D) == ledger.blocks(A)


class TestTruncateAndFree:
    @pytest.mark.parametrize("length", [0, 3, 4, 5, 7, 8, 9])
    def test_a_truncated_sequence_goes_on(self, length):
        """Boundary lengths kS-1, kS, kS+1."""
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 9))
        ledger.truncate(A, length)
        ledger.check()
        append(ledger, A, tokens_of(500, 6))
        ledger.check()
        assert ledger.length(A) == length + 6

    def test_truncation_to_the_same_length_gives_reserved_blocks_back(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 4))
        ledger.reserve(A, 9)
        ledger.truncate(A, 4)
        assert held(ledger) == 1

    def test_writing_the_same_tokens_again_merges_into_the_block_left_behind(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 8))
        before = ledger.blocks(A)
        ledger.truncate(A, 6)
        append(ledger, A, [6, 7])
        assert ledger.blocks(A) == before
        ledger.check()

    def test_a_chain_dies_from_its_tail(self):
        """S30: a chain of 20 blocks under pressure; hits count up to the first block that is gone."""
        ledger = open_ledger(num_blocks=20)
        prompt = tokens_of(0, 80)
        compute(ledger, A, prompt)
        chain = ledger.blocks(A)
        ledger.free(A)
        ledger.take_changes()
        for evicted in range(1, 6):
            sequence = SequenceId(100 + evicted)
            ledger.attach(sequence, [900 + evicted])
            ledger.reserve(sequence, 1)
            assert ledger.blocks(sequence) == (chain[-evicted],)
            assert ledger.take_changes() == (Evicted((hashes(prompt)[-evicted],)),)
            assert ledger.attach(A, [*prompt, 1][:80]) == min(76, 80 - 4 * evicted)
            ledger.free(A)
            ledger.check()
        assert ledger.stats().evicted_blocks == 5

    def test_what_was_never_published_is_used_again_first(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 6))
        compute(ledger, B, tokens_of(100, 6))
        tails = [ledger.blocks(A)[1], ledger.blocks(B)[1]]
        published = [ledger.blocks(A)[0], ledger.blocks(B)[0]]
        ledger.free(A)
        ledger.free(B)
        order = list(ledger.free_list())
        assert order[:2] == tails[::-1]
        assert order[-2:] == published

    def test_a_hit_makes_a_chain_young_again(self):
        ledger = open_ledger(num_blocks=4)
        compute(ledger, A, tokens_of(0, 8))
        ledger.free(A)
        compute(ledger, B, tokens_of(100, 8))
        ledger.free(B)
        ledger.attach(A, tokens_of(0, 9))
        ledger.free(A)
        compute(ledger, C, tokens_of(200, 8))
        assert ledger.attach(D, tokens_of(0, 9)) == 8
        assert ledger.attach(E, tokens_of(100, 9)) == 0

    def test_nothing_is_freed_twice(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 6))
        ledger.free(A)
        before = state_of(ledger)
        with pytest.raises(UnknownSequence, match="sequence 1 is not in the books"):
            ledger.free(A)
        assert state_of(ledger) == before
        ledger.check()


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda ledger: ledger.attach(A, [1]), "sequence 1 is in the books already"),
            (lambda ledger: ledger.attach(C, []), r"tokens of sequence 3: 0 of them, from 1 to 64"),
            (lambda ledger: ledger.attach(C, [1] * 65), r"tokens of sequence 3: 65 of them, from 1 to 64"),
            (lambda ledger: ledger.attach(C, [5, 1000]), "token id 1000, vocab_size is 1000"),
            (lambda ledger: ledger.attach(C, [-1, 5]), "token id -1, vocab_size is 1000"),
            (
                lambda ledger: ledger.attach(C, [1], retain_seconds=-1),
                "retain_seconds of sequence 3: -1, wanted",
            ),
            (lambda ledger: ledger.attach(C, [1], retain_seconds=604801), "604801, wanted from 0 to 604800"),
            (lambda ledger: ledger.reserve(A, -1), "count reserved for sequence 1: wanted -1"),
            (lambda ledger: ledger.commit(A, [1, 2, 3]), "tokens of sequence 1: end at 9, writable up to 8"),
            (lambda ledger: ledger.commit(A, [1, 1000]), "token id 1000, vocab_size is 1000"),
            (lambda ledger: ledger.truncate(A, 7), "length of sequence 1: wanted 7, it has 6"),
            (lambda ledger: ledger.truncate(A, -1), "length of sequence 1: wanted -1, it has 6"),
            (lambda ledger: ledger.fork(A, [B]), "sequence 2 is in the books already"),
            (lambda ledger: ledger.fork(A, [A]), "sequence 1 is in the books already"),
            (lambda ledger: ledger.fork(A, [C, C]), "sequence 3 is in the books already"),
            (lambda ledger: ledger.fork(A, []), "children of sequence 1: wanted 0"),
            (lambda ledger: ledger.fork(A, [C], -2), "count reserved for sequence 1: wanted -2"),
        ],
    )
    def test_a_wrong_request_names_the_field_and_changes_nothing(self, call, message):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 6))
        ledger.reserve(A, 2)
        compute(ledger, B, tokens_of(100, 6))
        before = state_of(ledger)
        with pytest.raises(InvalidRequest, match=message):
            call(ledger)
        assert state_of(ledger) == before

    @pytest.mark.parametrize(
        "call",
        [
            lambda ledger: ledger.reserve(E, 1),
            lambda ledger: ledger.commit(E, [1]),
            lambda ledger: ledger.truncate(E, 0),
            lambda ledger: ledger.fork(E, [F]),
            lambda ledger: ledger.free(E),
            lambda ledger: ledger.length(E),
            lambda ledger: ledger.blocks(E),
        ],
    )
    def test_an_unknown_sequence_is_named_and_nothing_changes(self, call):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 6))
        before = state_of(ledger)
        with pytest.raises(UnknownSequence, match="sequence 5"):
            call(ledger)
        assert state_of(ledger) == before

    @pytest.mark.parametrize("field", ["num_blocks", "block_size", "vocab_size"])
    @pytest.mark.parametrize("value", [0, -1, (1 << 31) + 1])
    def test_an_impossible_pool_is_refused(self, field, value):
        with pytest.raises(InvalidRequest, match=f"{field}: {value}, from 1 to"):
            open_ledger(**{field: value})


def blocks_of(ledger, *wanted):
    """The blocks of these numbers, as the parts of the books know them."""
    return [ledger._pool.blocks[number] for number in wanted]


class TestAudit:
    def test_the_books_of_a_busy_pool_are_counted(self):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 9))
        compute(ledger, B, tokens_of(100, 9))
        ledger.free(B)
        audit = ledger.audit()
        assert (audit.free_blocks, audit.cached_blocks, audit.held_blocks) == (11, 2, 3)
        assert (audit.num_blocks, audit.sequences, audit.epoch, audit.violation) == (16, 1, EPOCH, "")

    @pytest.mark.parametrize(
        ("spoil", "violation"),
        [
            (lambda ledger: ledger._pool.share(ledger._pool.blocks[:1]), "block 0 has 2 references, 1 tables name it"),
            (
                lambda ledger: ledger._index.forget(ledger._pool.blocks[1:2]),
                "pool and index differ on whether block 1 is published",
            ),
            (
                lambda ledger: ledger._tables[A].blocks.append(ledger._pool.blocks[0]),
                "sequence 1: a block stands twice in its table",
            ),
            (
                lambda ledger: setattr(ledger._tables[A], "room", 99),
                "length 9, room 99, blocks for 12",
            ),
            (lambda ledger: setattr(ledger._tables[A], "published", 3), "3 blocks published, 2 full"),
            (lambda ledger: setattr(ledger._tables[A], "forgotten", True), "2 blocks published, and it is forgotten"),
            (
                lambda ledger: ledger._tables[A].tokens.__setitem__(0, 9),
                "block 0 is not published under this sequence's hash",
            ),
            (
                lambda ledger: ledger._pool.publish(ledger._pool.blocks[2:3]),
                "block 2 is to be written, and others can see it",
            ),
        ],
    )
    def test_the_auditor_finds_what_was_spoilt(self, spoil, violation):
        ledger = open_ledger()
        compute(ledger, A, tokens_of(0, 9))
        ledger.reserve(A, 1)
        ledger.check()
        spoil(ledger)
        assert violation in ledger.audit().violation
        with pytest.raises(AssertionError):
            ledger.check()

    def test_the_auditor_finds_a_head_that_would_go_before_its_tail(self):
        ledger = open_ledger(num_blocks=2)
        compute(ledger, A, tokens_of(0, 8))
        ledger._pool.release(blocks_of(ledger, 0, 1))
        ledger._tables.clear()
        assert "block 0 would be evicted before block 1" in ledger.audit().violation
