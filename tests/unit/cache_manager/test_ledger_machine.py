"""Random lives of sequences on a small pool, against a model that keeps whole token prefixes.

The model plays the worker: it has a memory with a cell for each position of each block, writes there what a position's
keys and values depend on (its salt and every token up to it), makes the copies that it is told, and reads every
sequence back through the table that it was told, after every step. Whatever sharing, copying, merging, eviction or
truncation did, a sequence must read what it would have computed alone: a hit equals a miss.
"""

from itertools import takewhile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_manager.core.changes import Evicted, Forgotten, Published
from cache_manager.core.ledger import Ledger
from cache_manager.core.single_flight import WaitFor
from octavo.errors import InvalidRequest, PoolExhausted, UnknownSequence
from octavo.hashing import block_hashes
from octavo.records.insight import HitEnd
from octavo.records.scope import PLAIN, Scope
from tests.support.books import EPOCH, exchange, idle, pool_spec, state_of

ONE, OTHER = b"1" * 32, b"2" * 32
SCOPES = st.sampled_from([PLAIN, Scope(salt=ONE), Scope(salt=ONE, public_tokens=4), Scope(salt=OTHER, public_tokens=4)])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
"""Few different ones, so that prefixes meet again."""


class Life:
    """What the model knows of one sequence."""

    def __init__(self, scope, size, tokens, length=0):
        self.scope = scope
        self.size = size
        self.tokens = tokens
        self.length = length
        self.writable = length
        self.prompt = ()
        """What it was attached with, while others may wait for it."""
        self.publishes = True
        """Not any more once the books were reset."""
        self.leads = None
        """The whole prefix up to the block that it computes next, if it is the one to wait for."""

    def cell(self, position):
        size = self.size
        return named(self.scope, self.tokens[: position + 1], (position // size + 1) * size, size)

    def fork(self):
        child = Life(self.scope, self.size, self.tokens[: self.length], self.length)
        child.publishes = self.publishes
        return child


def named(scope, tokens, end, size):
    """What keys and values of a block that ends at `end` depend on: whom it belongs to, and every token up to it."""
    public_end = scope.seam(size).block * size
    return scope.salt if public_end < 0 else b"" if end <= public_end else b"behind " + scope.salt, tuple(tokens)


def agree(pair):
    return pair[0] == pair[1]


PICK = st.integers(0, 3)
"""Which of the living sequences a rule takes, the newest first; it starts one if there is none."""


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4), num_blocks=st.integers(2, 8), min_copy_tokens=st.sampled_from([1, 1, 0, 2, 3])
    )
    def open(self, block_size, num_blocks, min_copy_tokens):
        self.size = block_size
        self.min_copy_tokens = min_copy_tokens
        self.spec = pool_spec(block_size=block_size, num_blocks=num_blocks, vocab_size=10)
        self.ledger = Ledger(self.spec, EPOCH, min_copy_tokens=min_copy_tokens)
        self.memory = [[None] * block_size for _ in range(num_blocks)]
        self.tables = {}
        self.lives = {}
        self.prefixes = {}
        self.published = set()
        self.last = 0
        self.cache_epoch = 0

    @rule(scope=SCOPES, tokens=TOKENS)
    def attach(self, scope, tokens):
        self.start(scope, tokens)

    @rule(scope=SCOPES, tokens=TOKENS)
    def compute(self, scope, tokens):
        self.compute_all(scope, tokens)

    @rule(scope=SCOPES, tokens=TOKENS, keep=st.integers(1, 8), others=TOKENS)
    def compute_two_that_part(self, scope, tokens, keep, others):
        self.compute_all(scope, [*tokens, 0, 1, 2, 0][:9])
        if self.last in self.lives:
            self.free_one(self.last)
        self.compute_all(scope, [*tokens[:keep], *others][:9])

    def compute_all(self, scope, tokens):
        sequence = self.start(scope, tokens)
        if sequence not in self.lives:
            return
        life = self.lives[sequence]
        if self.try_to_reserve(sequence, len(life.tokens) - life.length):
            self.write(sequence, [])

    @rule(scope=SCOPES, tokens=TOKENS)
    def take_over(self, scope, tokens):
        """However many lead, one after another: when they are gone, nobody waits."""
        while self.start(scope, tokens) not in self.lives:
            self.free_one(self.waited_for)

    @rule(pick=PICK, count=st.integers(0, 6))
    def reserve(self, pick, count):
        self.try_to_reserve(self.picked(pick), count)

    @rule(pick=PICK, tokens=TOKENS)
    def write_what_is_writable(self, pick, tokens):
        self.write(self.picked(pick), tokens)

    @rule(pick=PICK, token=st.integers(0, 2))
    def decode(self, pick, token):
        sequence = self.picked(pick)
        if self.try_to_reserve(sequence, 1):
            self.write(sequence, [token])

    @rule(pick=PICK)
    def commit_too_much(self, pick):
        sequence = self.picked(pick)
        life = self.lives[sequence]
        before = state_of(self.ledger)
        with pytest.raises(InvalidRequest):
            self.ledger.commit(sequence, [0] * (life.writable - life.length + 1))
        assert state_of(self.ledger) == before

    @rule(pick=PICK, count=st.integers(1, 5), reserve=st.integers(0, 3))
    def fork(self, pick, count, reserve):
        parent, children = self.picked(pick), [self.new_id() for _ in range(count)]
        life = self.lives[parent]
        if self.call(self.ledger.fork, parent, children, reserve):
            if life.length % self.size:
                life.writable = life.length
            for child in children:
                self.lives[child] = life.fork()
                self.widen(self.lives[child], reserve)

    @rule(pick=PICK, cut=st.integers(0, 5))
    def truncate(self, pick, cut):
        self.go_back(self.picked(pick), cut)

    @rule(pick=PICK, cut=st.integers(0, 5), token=st.integers(0, 2))
    def go_another_way(self, pick, cut, token):
        sequence = self.picked(pick)
        self.go_back(sequence, cut)
        if self.try_to_reserve(sequence, 1):
            self.write(sequence, [token])

    @rule(pick=PICK)
    def free(self, pick):
        sequence = self.picked(pick)
        self.free_one(sequence)
        before = state_of(self.ledger)
        with pytest.raises(UnknownSequence):
            self.ledger.free(sequence)
        assert state_of(self.ledger) == before

    @rule()
    def reset(self):
        """S9: nothing is found any more, and whoever runs goes on as before."""
        self.follow_changes()
        held = self.ledger.num_held
        self.cache_epoch += 1
        assert self.ledger.reset(self.cache_epoch) == len(self.published)
        assert (self.ledger.num_held, self.ledger.num_cached, self.ledger.published()) == (held, 0, [])
        for life in self.lives.values():
            life.publishes, life.leads = False, None

    @rule()
    def free_all(self):
        """At rest nothing is held."""
        self.ledger.apply(exchange(finished=list(self.lives)))
        self.lives.clear()
        audit = self.ledger.audit()
        assert (audit.held_blocks, audit.sequences) == (0, 0)
        assert audit.free_blocks + audit.cached_blocks == audit.num_blocks

    def free_one(self, sequence):
        self.ledger.free(sequence)
        del self.lives[sequence]

    def new_id(self):
        self.last += 1
        return self.last

    def start(self, scope, tokens):
        tokens = tokens[: self.spec.capacity_tokens]
        sequence = self.new_id()
        before = state_of(self.ledger)
        explained = self.ledger.explain(tokens, scope)
        assert state_of(self.ledger) == before
        answer = self.ledger.attach(sequence, tokens, scope)
        self.check_explanation(explained, answer, tokens)
        if isinstance(answer, WaitFor):
            after = state_of(self.ledger)
            assert all(after[kept] == before[kept] for kept in ("_pool", "_tables", "_untold", "_changes"))
            self.waited_for = answer.leader
            leader = self.lives[answer.leader]
            assert leader.leads == self.missing(scope, tokens)
            return sequence
        assert answer in self.possible_reuse(scope, tokens)
        assert not any(life.leads == self.missing(scope, tokens) for life in self.lives.values() if life.leads)
        assert answer < len(tokens)
        self.lives[sequence] = Life(scope, self.size, tokens, answer)
        self.lives[sequence].writable += -answer % self.size  # the rest of a block that was copied
        self.lives[sequence].prompt = tokens
        self.lead(self.lives[sequence])
        return sequence

    def missing(self, scope, tokens):
        """The prefix up to the first block that is not there, if a hit could cover it."""
        end = self.longest_published(scope, tokens) + self.size
        return named(scope, tokens[:end], end, self.size) if end < len(tokens) else None

    def lead(self, life):
        """Whoever computes the next block of its prompt is to be waited for, unless another one is already."""
        self.follow_changes()
        end = (life.length // self.size + 1) * self.size
        tokens = [*life.tokens[: life.length], *life.prompt[life.length : end]][:end]
        prefix = named(life.scope, tokens, end, self.size)
        others = [other.leads for other in self.lives.values() if other is not life]
        free = life.publishes and prefix not in self.published and prefix not in others
        life.leads = prefix if free and len(prefix[1]) == end <= len(life.prompt) else None

    def go_back(self, sequence, cut):
        life = self.lives[sequence]
        life.length = life.writable = max(0, life.length - cut)
        life.prompt, life.leads = (), None
        life.tokens = life.tokens[: life.length]
        self.ledger.truncate(sequence, life.length)

    def picked(self, pick):
        if not self.lives:
            self.start(PLAIN, [0, 1, 2, 0, 1, 2])
        return list(self.lives)[-1 - pick % len(self.lives)]

    def call(self, call, *arguments):
        """Make a call. Returns False when there were too few blocks, in which case nothing may have changed."""
        before = state_of(self.ledger)
        try:
            call(*arguments)
        except PoolExhausted:
            assert state_of(self.ledger) == before
            return False
        return True

    def try_to_reserve(self, sequence, count):
        life = self.lives[sequence]
        met = self.call(self.ledger.reserve, sequence, count)
        if met:
            self.widen(life, count)
        return met

    def widen(self, life, count):
        """A reserve gives whole blocks."""
        end = life.length + count
        if end > life.writable:
            life.writable = -(-end // self.size) * self.size

    def write(self, sequence, tokens):
        """Write and commit as much as there is room for: first the rest of the prompt, then new tokens."""
        self.take_grant()
        life = self.lives[sequence]
        tokens = (life.tokens[life.length :] + tokens)[: life.writable - life.length]
        life.tokens = life.tokens[: life.length] + tokens
        table = self.tables.get(sequence, [])
        for position in range(life.length, len(life.tokens)):
            self.memory[table[position // self.size]][position % self.size] = life.cell(position)
        life.length = len(life.tokens)
        self.remember_prefixes(life)
        full = self.ledger.length(sequence) // self.size
        self.ledger.commit(sequence, tokens)
        if life.length // self.size > full:
            self.lead(life)

    def remember_prefixes(self, life):
        """The hash of every full prefix that may be published, to read the ledger's changes by."""
        root, size = self.spec.chain_root(life.scope, self.cache_epoch).hash(), self.size
        hashes = block_hashes(root, life.tokens[: life.length], size, life.scope.seam(size))
        for end, block_hash in zip(range(size, life.length + 1, size), hashes, strict=True):
            self.prefixes[block_hash] = named(life.scope, life.tokens[:end], end, size)

    def longest_published(self, scope, tokens):
        reused = 0
        size = self.size
        while reused + size < len(tokens) and self.is_published(scope, tokens[: reused + size]):
            reused += size
        return reused

    def is_published(self, scope, prefix):
        return named(scope, prefix, len(prefix), self.size) in self.published

    def check_explanation(self, explained, answer, tokens):
        """What was foretold has happened, and why."""
        if isinstance(answer, WaitFor):
            assert (explained.end, explained.leader) == (HitEnd.BEING_COMPUTED, answer.leader)
        else:
            assert explained.reused_tokens == answer <= explained.position < len(tokens)
            assert (explained.end is HitEnd.LAST_TOKEN) == (explained.position == len(tokens) - 1)

    def possible_reuse(self, scope, tokens):
        """The tokens that an attach that has just happened may have reused."""
        whole = self.longest_published(scope, tokens)
        part = self.longest_part(scope, tokens, whole)
        copied = self.ledger.length(self.last) % self.size > 0
        spare = self.ledger.audit().num_blocks - self.ledger.audit().held_blocks + copied
        if part < max(self.min_copy_tokens, 1) or self.min_copy_tokens == 0 or spare == 0:
            return {whole}
        return {whole + part} if spare > 1 else {whole, whole + part}  # the spare one may be the one to copy from

    def longest_part(self, scope, tokens, whole):
        """How many tokens after the whole blocks, the last one apart, begin a published block that stands there."""
        if whole == scope.seam(self.size).block * self.size:
            return 0
        rest, end = tokens[whole:-1], whole + self.size
        realm, _ = named(scope, (), end, self.size)
        there = [prefix for other, prefix in self.published if other == realm and len(prefix) == end]
        parts = [prefix[whole:] for prefix in there if prefix[:whole] == tuple(tokens[:whole])]
        return max((sum(1 for _ in takewhile(agree, zip(part, rest, strict=False))) for part in parts), default=0)

    def take_grant(self):
        """Keep the tables as told, and make the copies."""
        grant = idle(self.ledger)
        assert grant.cache_epoch == self.cache_epoch
        for change in grant.tables:
            table = self.tables.setdefault(change.sequence, [])
            table[change.start : change.start + len(change.blocks)] = change.blocks
        for copy in grant.copies:
            self.memory[copy.target] = list(self.memory[copy.source])

    @invariant()
    def books_balance(self):
        self.ledger.check()
        audit = self.ledger.audit()
        assert audit.free_blocks + audit.cached_blocks + audit.held_blocks == audit.num_blocks

    @invariant()
    def every_sequence_reads_its_own_history(self):
        self.take_grant()
        assert len(self.lives) == self.ledger.audit().sequences
        for sequence, life in self.lives.items():
            assert self.ledger.length(sequence) == life.length
            table = self.tables.get(sequence, [])
            assert len(table) * self.size >= life.writable
            assert tuple(table[: len(self.ledger.blocks(sequence))]) == self.ledger.blocks(sequence)
            for position in range(life.length):
                assert self.memory[table[position // self.size]][position % self.size] == life.cell(position)

    @invariant()
    def tokens_in_held_blocks_are_counted_once(self):
        """S48, for whatever shares whatever."""
        filled = set()
        for sequence, life in self.lives.items():
            for index, entry in enumerate(self.ledger.describe(sequence).blocks):
                inside = self.size if entry.published else min(max(life.length - index * self.size, 0), self.size)
                filled |= {(entry.block, offset) for offset in range(inside)}
        assert self.ledger.usage().held_tokens == len(filled)

    @invariant()
    def what_is_published_has_no_hole(self):
        self.follow_changes()
        for realm, prefix in self.published:
            before = prefix[: -self.size]
            assert not before or {(realm, before), (b"", before)} & self.published

    def follow_changes(self):
        for change in self.ledger.take_changes():
            if isinstance(change, Forgotten):
                self.published.clear()
                continue
            for realm, prefix in map(self.prefixes.__getitem__, change.hashes):
                if isinstance(change, Published):
                    assert (realm, prefix) not in self.published
                    self.published.add((realm, prefix))
                else:
                    assert isinstance(change, Evicted)
                    self.published.remove((realm, prefix))


TestLedgerMachine = LedgerMachine.TestCase
