"""Who makes room for whom: floors, retention, probation. What holds for all of them is played by the machine below."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.core.accounts import Allowance, Allowances
from cache_manager.core.books import empty_books
from cache_manager.core.changes import Evicted, Published
from cache_manager.core.eviction import EvictionPolicy
from cache_manager.core.ledger import Ledger
from octavo.errors import PoolExhausted
from octavo.hashing import block_hashes, next_hash
from octavo.ids import NOBODY, TenantTag
from octavo.records.scope import PLAIN
from tests.support.books import EPOCH, append, pool_spec, tokens_of

NOTHING = Allowance()
ACME, BOLT = TenantTag(b"acme...."), TenantTag(b"bolt....")


def open_books(num_blocks, *, ratio=1, others=NOTHING, **named):
    """Books of blocks of 4, with what `acme` and `bolt` are owed."""
    tags = {"acme": ACME, "bolt": BOLT}
    allowances = Allowances(named={tags[name]: allowance for name, allowance in named.items()}, others=others)
    spec = pool_spec(num_blocks=num_blocks)
    policy = EvictionPolicy(ratios=(ratio,), allowances=allowances)
    return Ledger(spec, EPOCH, books=empty_books(spec, next_hash, policy))


class Guests:
    """Prompts that come and go, one after another, in books that are checked after each."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.last = 0

    def visit(self, tokens, tenant=NOBODY, retain_seconds=0):
        """Returns how many tokens were found."""
        self.last += 1
        found = self.ledger.attach(self.last, tokens, PLAIN, tenant, retain_seconds)
        append(self.ledger, self.last, tokens[found:])
        self.ledger.free(self.last)
        self.ledger.check()
        return found

    def sweep(self, documents, tokens_each, tenant=NOBODY, retain_seconds=0):
        """So many documents, none like another one."""
        for _ in range(documents):
            start = 100 + self.last * tokens_each % 800
            self.visit(tokens_of(start, tokens_each), tenant, retain_seconds)

    def found(self, tokens, tenant=NOBODY):
        """How many tokens would be found now; nothing is computed."""
        self.last += 1
        found = self.ledger.attach(self.last, tokens, PLAIN, tenant)
        self.ledger.free(self.last)
        return found


class TestProbation:
    def test_a_sweep_washes_out_what_was_used_once_and_not_what_was_found_again(self):
        guests = Guests(open_books(16, ratio=4))
        hot = tokens_of(0, 17)
        guests.visit(hot)
        guests.visit(hot)
        guests.sweep(4, 20)
        assert guests.found(hot) == 16

    def test_plain_lru_lets_the_same_sweep_wash_out_everything(self):
        guests = Guests(open_books(16, ratio=1))
        hot = tokens_of(0, 17)
        guests.visit(hot)
        guests.visit(hot)
        guests.sweep(4, 20)
        assert guests.found(hot) == 0

    def test_what_was_found_again_goes_too_when_nobody_asks_for_it(self):
        guests = Guests(open_books(16, ratio=4))
        hot = tokens_of(0, 17)
        guests.visit(hot)
        guests.visit(hot)
        guests.sweep(16, 20)
        assert guests.found(hot) == 0


class TestFloors:
    def test_a_sweep_leaves_another_tenant_its_floor(self):
        """S34: a chat with a long prefix, and 32 documents of somebody else in between."""
        guests = Guests(open_books(64, acme=Allowance(floor_blocks=26)))
        chat = tokens_of(0, 100)
        guests.visit(chat, ACME)
        guests.sweep(32, 40, BOLT)
        assert guests.visit([*chat, *tokens_of(900, 30)], ACME) == 100

    def test_above_its_floor_a_tenant_gives_up_its_tails_first(self):
        """S34: a floor for a part of the prefix keeps the beginning."""
        guests = Guests(open_books(64, acme=Allowance(floor_blocks=10)))
        chat = tokens_of(0, 100)
        guests.visit(chat, ACME)
        guests.sweep(32, 40, BOLT)
        assert guests.found(chat, ACME) == 40

    def test_without_a_floor_the_sweep_takes_all(self):
        guests = Guests(open_books(64))
        chat = tokens_of(0, 100)
        guests.visit(chat, ACME)
        guests.sweep(32, 40, BOLT)
        assert guests.found(chat, ACME) == 0

    def test_a_tenant_above_its_floor_again_gives_up_what_it_had_kept(self):
        guests = Guests(open_books(16, acme=Allowance(floor_blocks=4)))
        first, second = tokens_of(0, 17), tokens_of(40, 17)
        guests.visit(first, ACME)
        guests.sweep(8, 20, BOLT)
        guests.visit(second, ACME)
        guests.sweep(8, 20, BOLT)
        assert (guests.found(first, ACME), guests.found(second, ACME)) == (0, 16)

    def test_a_floor_is_given_up_when_there_is_nothing_else(self):
        ledger = open_books(8, acme=Allowance(floor_blocks=8))
        guests = Guests(ledger)
        guests.visit(tokens_of(0, 32), ACME)
        guests.visit(tokens_of(100, 32), BOLT)
        assert guests.found(tokens_of(100, 32)) == 28

    def test_a_tenant_above_its_floor_goes_before_one_at_its_floor(self):
        guests = Guests(open_books(8, acme=Allowance(floor_blocks=4), bolt=Allowance(floor_blocks=2)))
        guests.visit(tokens_of(0, 16), ACME)
        guests.visit(tokens_of(100, 16), BOLT)
        guests.visit(tokens_of(200, 8))
        assert (guests.found(tokens_of(0, 17), ACME), guests.found(tokens_of(100, 17), BOLT)) == (16, 8)


class TestRetention:
    def test_a_retained_prompt_outlives_a_sweep_until_its_time_is_up(self):
        guests = Guests(open_books(16, others=Allowance(retained_blocks=4)))
        prompt = tokens_of(0, 17)
        guests.visit(prompt, retain_seconds=60)
        guests.sweep(8, 20)
        guests.ledger.tell_time(59.0)
        guests.sweep(8, 20)
        assert guests.ledger.usage().put_off_blocks == 4
        assert guests.found(prompt) == 16
        guests.ledger.tell_time(60.0)
        assert guests.ledger.usage().put_off_blocks == 0
        guests.sweep(8, 20)
        assert guests.found(prompt) == 0

    def test_a_tenant_that_retains_everything_keeps_its_quota_and_others_are_let_in(self):
        """S32: beyond the quota the beginnings of the chain stay."""
        guests = Guests(open_books(16, acme=Allowance(retained_blocks=6)))
        prompt = tokens_of(0, 64)
        guests.visit(prompt, ACME, retain_seconds=3600)
        guests.sweep(8, 40, BOLT)
        assert guests.found(prompt, ACME) == 24

    def test_each_tenant_has_a_quota_of_its_own(self):
        """S32: who retains all that it sends takes nothing from what another one has retained."""
        quota = Allowance(retained_blocks=4)
        guests = Guests(open_books(24, acme=quota, bolt=quota))
        prompt = tokens_of(0, 17)
        guests.visit(prompt, ACME, retain_seconds=3600)
        guests.sweep(32, 20, BOLT, retain_seconds=3600)
        assert guests.found(prompt, ACME) == 16

    def test_a_retained_block_is_given_up_when_there_is_nothing_else(self):
        """S32: a quota of the whole pool is no hard pin."""
        ledger = open_books(8, others=Allowance(retained_blocks=8))
        guests = Guests(ledger)
        guests.visit(tokens_of(0, 32), retain_seconds=3600)
        guests.visit(tokens_of(100, 32))
        assert guests.found(tokens_of(100, 32)) == 28

    def test_nothing_is_retained_without_a_quota(self):
        guests = Guests(open_books(16))
        guests.visit(tokens_of(0, 17), retain_seconds=3600)
        guests.sweep(8, 20)
        assert guests.found(tokens_of(0, 17)) == 0

    def test_many_that_come_back_before_their_time_leave_no_trace(self):
        guests = Guests(open_books(16, others=Allowance(retained_blocks=4)))
        for _ in range(200):
            guests.visit(tokens_of(0, 17), retain_seconds=60)
        (line,) = guests.ledger._pool.order._retention._lines
        assert len(line) <= 2 * 4 + 64


TENANTS = st.sampled_from([NOBODY, ACME, BOLT])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
"""Few different ones, so that prefixes meet again; and all tenants in one scope, so that they meet one another's."""

ALLOWANCES = st.builds(Allowance, floor_blocks=st.integers(0, 5), retained_blocks=st.integers(0, 5))


class EvictionMachine(RuleBasedStateMachine):
    """Against a model that knows of each published prefix whose it is and until when it was asked for.

    The books' own check finds a hole in a chain, and a parent whose turn would come before its child's. The model
    judges each victim: whom it had to go before. And whatever anybody is owed, all that nobody holds can be had.
    """

    @initialize(
        ratio=st.integers(1, 4),
        num_blocks=st.integers(2, 12),
        acme=ALLOWANCES,
        bolt=ALLOWANCES,
        quota=st.integers(0, 5),
    )
    def open(self, ratio, num_blocks, acme, bolt, quota):
        self.allowances = {NOBODY: Allowance(retained_blocks=quota), ACME: acme, BOLT: bolt}
        self.size = 2
        self.spec = pool_spec(block_size=self.size, num_blocks=num_blocks, vocab_size=10)
        owed = Allowances(named={ACME: acme, BOLT: bolt}, others=self.allowances[NOBODY])
        policy = EvictionPolicy(ratios=(ratio,), allowances=owed)
        self.ledger = Ledger(self.spec, EPOCH, books=empty_books(self.spec, next_hash, policy))
        self.now = 0.0
        self.last = 0
        self.lives = {}
        """Sequence -> (tokens, tenant, retain_seconds)."""
        self.published = {}
        """Hash -> tenant; None for a moment, until it is known who published it."""
        self.until = {}
        self.too_many = set()
        """Asked for when there was more of it than the quota: some of these age again."""

    @rule(tenant=TENANTS, tokens=TOKENS, retain=st.sampled_from([0, 0, 5, 20]), stays=st.booleans())
    def visit(self, tenant, tokens, retain, stays):
        self.last += 1
        tokens = tokens[: self.spec.capacity_tokens]
        found = self.ledger.attach(self.last, tokens, PLAIN, tenant, retain)
        if not isinstance(found, int):
            return
        self.lives[self.last] = (tokens, tenant, retain)
        self.write(self.last, tokens[found:])
        if not stays:
            self.leave(self.last)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), token=st.integers(0, 2))
    def decode(self, data, token):
        sequence = data.draw(st.sampled_from(sorted(self.lives)))
        tokens, tenant, retain = self.lives[sequence]
        if self.ledger.length(sequence) == len(tokens) < self.spec.capacity_tokens:
            self.lives[sequence] = ([*tokens, token], tenant, retain)
            self.write(sequence, [token])

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def free(self, data):
        self.leave(data.draw(st.sampled_from(sorted(self.lives))))

    @rule(seconds=st.sampled_from([1.0, 4.0, 30.0]))
    def wait(self, seconds):
        self.now += seconds
        self.ledger.tell_time(self.now)

    @rule()
    def take_all(self):
        """Whatever is owed to whom, no block is lost: all that nobody holds is to be had."""
        free = self.spec.num_blocks - self.ledger.num_held
        if not free:
            return
        self.last += 1
        found = self.ledger.attach(self.last, [9])
        assert found == 0
        self.ledger.reserve(self.last, free * self.size)
        self.judge()
        self.ledger.free(self.last)

    @invariant()
    def books_balance(self):
        self.ledger.check()

    # ---- the model -------------------------------------------------------------------------------------------

    def write(self, sequence, tokens):
        try:
            self.ledger.reserve(sequence, len(tokens))
        except PoolExhausted:
            return
        self.judge()
        self.ledger.commit(sequence, tokens)
        self.judge()

    def leave(self, sequence):
        tokens, _, retain = self.lives.pop(sequence)
        if retain:
            for block_hash in self.hashes(tokens[: self.ledger.length(sequence)]):
                self.until[block_hash] = max(self.until.get(block_hash, 0.0), self.now + retain)
        self.ledger.free(sequence)
        for tenant, allowance in self.allowances.items():
            if len(asked := self.asked_for(tenant)) > allowance.retained_blocks:
                self.too_many |= asked

    def hashes(self, tokens):
        return block_hashes(self.spec.chain_root().hash(), tokens, self.size)

    def held(self):
        lives = self.lives.items()
        return {a for sequence, (tokens, *_) in lives for a in self.hashes(tokens[: self.ledger.length(sequence)])}

    def judge(self):
        """Every victim since the last time: who else could have made room?"""
        held = self.held()
        for change in self.ledger.take_changes():
            match change:
                case Published(hashes):
                    self.published.update(dict.fromkeys(hashes))
                case Evicted(hashes):
                    for victim in hashes:
                        self.judge_victim(victim, held)
        for sequence, (tokens, tenant, _) in self.lives.items():
            chain = self.hashes(tokens[: self.ledger.length(sequence)])
            for block_hash in chain:
                if block_hash in self.published and self.published[block_hash] is None:
                    owner = self.published[chain[0]]
                    self.published[block_hash] = tenant if owner is None else owner

    def judge_victim(self, victim, held):
        tenant = self.published[victim]
        evictable = self.published.keys() - held
        if self.below_floor(tenant):
            assert all(self.below_floor(self.published[other]) for other in evictable), "others are above their floors"
        if self.may_wait(victim, evictable):
            for other in evictable:
                kept = self.below_floor(self.published[other])
                assert kept or self.until.get(other, 0.0) > self.now, "others age"
        del self.published[victim]
        self.until.pop(victim, None)
        self.too_many.discard(victim)

    def below_floor(self, tenant):
        if tenant == NOBODY:
            return False
        return list(self.published.values()).count(tenant) <= self.allowances[tenant].floor_blocks

    def asked_for(self, tenant):
        """What the tenant has asked to keep, whether somebody holds it or not."""
        blocks = self.published.items()
        return {
            block_hash for block_hash, owner in blocks if owner == tenant and self.until.get(block_hash, 0) > self.now
        }

    def may_wait(self, block_hash, evictable):
        tenant = self.published[block_hash]
        return block_hash in self.asked_for(tenant) & evictable - self.too_many


TestEvictionMachine = EvictionMachine.TestCase
