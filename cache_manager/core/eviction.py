"""The order in which published blocks without an owner make room: the one place where a victim is chosen.

Least recently used first, but for three things:
- **Probation.** A block that a later request has found counts as `ratio` times younger than one that was used once. So
  a sweep of prompts that never come again washes out its like, and not what is used again and again. With ratio 1 this
  is plain LRU; which ratio suits the requests of the moment is found out on a sample of them (rehearsal.py).
- **Floors.** A tenant that has no more blocks than its floor gives none up while others can.
- **Retention.** A block that a request has asked to retain does not age until its time is up, as far as the quota of
  its tenant reaches.
Floors and retention put a block off, never more: when nothing else is left, its turn comes.

Invariant: a block's turn comes before its parent's, so a chain dies from its tail and never has a hole. For whoever
uses a block uses all blocks before it, and gives them back after it: a parent is proven if its child is and never older
than it, and the ratio is at least 1; it is retained if its child is, and as long; an account that keeps one block back
for its floor keeps all whose turn comes later; and the blocks of a chain are on one account.

Each step takes constant time for each block, but for retained ones, which wait in a heap.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cache_manager.core.accounts import NO_ALLOWANCES, Account, Accounts, Allowances
from cache_manager.core.retention import Retention
from cache_manager.core.rings import Rings
from octavo.ids import BlockId

UNPUBLISHED, ONCE, PROVEN = range(3)
"""What a block holds: nothing that can be found; what was used once; what a later request has found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """What is settled about the order before there is a pool."""

    ratios: tuple[int, ...]
    """Those among which the best is chosen, the first to begin with. Each is at least 1."""
    allowances: Allowances = NO_ALLOWANCES


PLAIN_LRU = EvictionPolicy(ratios=(1,))
SEGMENTED = EvictionPolicy(ratios=(1, 2, 4, 8))


class EvictionOrder:
    """The evictable blocks of one pool."""

    def __init__(self, num_blocks: int, accounts: Accounts) -> None:
        self._num_blocks = num_blocks
        self._rings = Rings(num_blocks, 3 + len(accounts))
        self._given_up, self._once, self._proven, *self._kept = self._rings
        """The rings: of blocks that were kept for a floor, and are no longer; that were used once; that a later request
        has found; and for each account that it keeps for its floor."""
        self._accounts = accounts
        self._retention = Retention(len(accounts))
        self.state = bytearray(num_blocks)
        """Of each block UNPUBLISHED, ONCE or PROVEN."""
        self._clock = 0
        """Counts blocks that became evictable."""
        self._now = 0.0
        self._put_off: dict[BlockId, bool] = {}
        """Blocks in a ring of kept ones (True), and those that were given up since (False)."""
        self.ratio = 1
        """How many times younger a proven block counts."""

    @property
    def num_put_off(self) -> int:
        """Blocks that wait until their time is up, or are kept for a floor."""
        return len(self._retention) + sum(self._put_off.values())

    # ---- what happens to blocks ------------------------------------------------------------------------------

    def tell_time(self, now: float) -> None:
        """It is `now`, in seconds, and not earlier than before. What was retained until now is so no longer."""
        self._now = now
        if self._retention.next_end > now:
            return
        for account in self._accounts:
            for block in self._retention.take_over(account.number, now):
                self._age(block)
        self._retention.next_end = min(self._retention.first_end(account.number) for account in self._accounts)

    def prove(self, blocks: list[BlockId]) -> None:
        """A later request has found these blocks, the leading ones of a chain."""
        state = self.state
        for block in blocks:
            state[block] = PROVEN

    def retain(self, blocks: Iterable[BlockId], seconds: float) -> None:
        """These blocks, the leading ones of a chain, are held and are to be retained for so long from now on."""
        self._retention.ask(blocks, self._now + seconds)

    def publish(self, blocks: list[BlockId], account: Account) -> None:
        """Blocks were published on the account of somebody named; they have an owner, and their state is ONCE."""
        self._accounts.put(blocks, account)
        account.blocks += len(blocks)
        self._keep_no_more(account)

    def add(self, once: list[BlockId], proven: list[BlockId]) -> None:
        """Blocks have lost their last owner, those used once and those proven: of one chain, the tail first."""
        if self._retention.ends:
            self._add_some_retained(once, proven)
            return
        self._clock += len(once) + len(proven)
        self._rings.append(self._once, once, self._clock)
        if proven:
            self._rings.append(self._proven, proven, self._clock)

    def _add_some_retained(self, once: list[BlockId], proven: list[BlockId]) -> None:
        """The same, where some blocks are to wait: leading ones of their chains, so they come last."""
        waits = [block for block in (*once, *proven) if self._retention.until(block) > self._now]
        others = {*once, *proven}.difference(waits)
        self._clock += len(others)
        self._rings.append(self._once, [block for block in once if block in others], self._clock)
        self._rings.append(self._proven, [block for block in proven if block in others], self._clock)
        for block in waits:
            self._wait(block)

    def remove(self, blocks: list[BlockId]) -> None:
        """These blocks have an owner again."""
        if self._retention.ends:
            blocks = [block for block in blocks if not self._retention.leave(block)]
        self._rings.remove(blocks)
        if self._put_off:
            for block in blocks:
                self._is_used_again(block)

    def evict(self, count: int) -> list[BlockId]:
        """Take the first `count` blocks, at least 1; there are so many. Nothing is published in them any more."""
        victims = self._some(count)
        while len(victims) < count:
            victims += self._some(count - len(victims))
        state = self.state
        for block in victims:
            state[block] = UNPUBLISHED
        if self._accounts.owners:
            self._accounts.forget(victims)
        if self._retention.ends:
            self._retention.forget(victims)
        return victims

    def blocks(self) -> list[BlockId]:
        """All evictable blocks, the next victim first, if nothing happens in between."""
        count = len(self._evictable())
        return self._twin().evict(count) if count else []

    def clear(self) -> None:
        """Nothing is published in any block any more."""
        self._rings = Rings(self._num_blocks, 3 + len(self._accounts))
        self._accounts.clear()
        self._retention = Retention(len(self._accounts))
        self._put_off.clear()
        self.state[:] = bytes(self._num_blocks)

    # ---- whose turn it is ------------------------------------------------------------------------------------

    def _some(self, most: int) -> list[BlockId]:
        """At most `most` blocks whose turn it is. None if all that were next have been put off."""
        turn = self._turn()
        if turn is None:
            return [self._last_resort()]
        ring, until = turn
        blocks = self._rings.take(ring, most, until)
        if ring == self._given_up:
            for block in blocks:
                del self._put_off[block]
        elif self._accounts.owners:
            return [block for block in blocks if not self._keeps(block)]
        return blocks

    def _turn(self) -> tuple[BlockId, int] | None:
        """The ring whose front is next, and the latest time of its blocks that go before another ring's front does."""
        front, times, clock = self._rings.next, self._rings.times, self._clock
        if self._put_off and front[self._given_up] != self._given_up:
            return self._given_up, clock
        once, proven = front[self._once], front[self._proven]
        if proven == self._proven:
            return None if once == self._once else (self._once, clock)
        if once == self._once:
            return self._proven, clock
        age, proven_age = clock - times[once], clock - times[proven]
        if proven_age > self.ratio * age:
            return self._proven, clock - self.ratio * age - 1
        return self._once, clock + (-proven_age // self.ratio)

    def _last_resort(self) -> BlockId:
        """A block that is put off: all others have gone. The account furthest above its floor gives one up.

        Whoever is not named has no floor, and comes first.
        """
        others, *named = self._accounts
        candidates = [others] if self._has_put_off(others) else filter(self._has_put_off, named)
        account = max(candidates, key=lambda account: account.spare)
        account.blocks -= account is not others
        if not self._keeps_any(account):
            return self._retention.take(account.number)
        (block,) = self._rings.take(self._kept[account.number], 1, self._clock)
        del self._put_off[block]
        return block

    def _has_put_off(self, account: Account) -> bool:
        return self._keeps_any(account) or self._retention.waiting(account.number) > 0

    def _keeps_any(self, account: Account) -> bool:
        ring = self._kept[account.number]
        return self._rings.next[ring] != ring

    # ---- what is put off -------------------------------------------------------------------------------------

    def _keeps(self, block: BlockId) -> bool:
        """Whether the account that a block is on keeps it back for its floor; else the account gives it up."""
        account = self._accounts.of_block(block)
        if account is self._accounts.others:
            return False
        if account.spare > 0:
            account.blocks -= 1
            return False
        self._put_off[block] = True
        self._rings.append(self._kept[account.number], [block], self._clock)
        return True

    def _keep_no_more(self, account: Account) -> None:
        """An account that is above its floor again gives up the first of what it has kept back."""
        while account.spare > 0 and self._keeps_any(account):
            (block,) = self._rings.take(self._kept[account.number], 1, self._clock)
            self._rings.append(self._given_up, [block], self._clock)
            self._put_off[block] = False
            account.blocks -= 1

    def _is_used_again(self, block: BlockId) -> None:
        """A block that was perhaps put off for a floor has an owner. If it was given up, it counts again."""
        if not self._put_off.pop(block, True):
            account = self._accounts.of_block(block)
            account.blocks += 1
            self._keep_no_more(account)

    def _wait(self, block: BlockId) -> None:
        """Let a block wait until its time is up. Beyond the quota, the one whose time is up first waits no more."""
        account = self._accounts.of_block(block)
        self._retention.wait(block, account.number)
        if self._retention.waiting(account.number) > account.allowance.retained_blocks:
            self._age(self._retention.take(account.number))

    def _age(self, block: BlockId) -> None:
        """A block that was retained is one like any other from now on."""
        self._clock += 1
        self._rings.append(self._proven if self.state[block] == PROVEN else self._once, [block], self._clock)

    def _twin(self) -> "EvictionOrder":
        """Another order of the same blocks, to try out what would happen."""
        twin = EvictionOrder(self._num_blocks, self._accounts.copy())
        twin._rings, twin._retention = self._rings.copy(), self._retention.copy()
        twin.state, twin._put_off = self.state[:], self._put_off.copy()
        twin._clock, twin._now, twin.ratio = self._clock, self._now, self.ratio
        return twin

    # ---- the audit -------------------------------------------------------------------------------------------

    def violations(self, evictable: Sequence[BlockId]) -> Iterator[str]:
        """What is wrong with the order, given the published blocks that nobody holds, by number."""
        for ring in self._rings:
            yield from self._rings.violations(ring)
        for ring in (self._once, self._proven):
            times = [self._rings.times[block] for block in self._rings.blocks(ring)]
            if times != sorted(times):
                yield "a block stands in the eviction order before one that came earlier"
        found = self._evictable()
        if sorted(found) != evictable:
            yield f"{len(found)} blocks stand in the eviction order, {len(evictable)} are evictable"
        put_off = {block: True for ring in self._kept for block in self._rings.blocks(ring)}
        put_off |= dict.fromkeys(self._rings.blocks(self._given_up), False)
        if put_off != self._put_off:
            yield f"{len(self._put_off)} blocks count as put off for floors, {len(put_off)} are"
        for account in self._accounts:
            yield from self._account_violations(account)

    def _account_violations(self, account: Account) -> Iterator[str]:
        if self._keeps_any(account) and account.spare > 0:
            yield f"account {account.number} keeps blocks back, and is {account.spare} above its floor"
        waiting = self._retention.waiting(account.number)
        if waiting > account.allowance.retained_blocks:
            yield f"account {account.number} retains {waiting} blocks of {account.allowance.retained_blocks}"

    def _evictable(self) -> list[BlockId]:
        in_rings = [block for ring in self._rings for block in self._rings.blocks(ring)]
        return [*in_rings, *self._retention.blocks()]
