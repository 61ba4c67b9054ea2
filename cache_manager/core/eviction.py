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

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from cache_manager.core.accounts import NO_ALLOWANCES, Account, Accounts, Allowances
from cache_manager.core.block import ONCE, PROVEN, UNPUBLISHED, Block
from cache_manager.core.retention import Retention
from cache_manager.core.rings import Ring, unlink
from octavo.collector import collector_at_rest


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

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._open()
        self._clock = 0
        """Counts blocks that became evictable."""
        self._now = 0.0
        self.ratio = 1
        """How many times younger a proven block counts."""

    def _open(self) -> None:
        """No block is evictable."""
        self._once = Ring()
        """Blocks that were used once."""
        self._proven = Ring()
        """Blocks that a later request has found."""
        self._kept = [Ring() for _ in self._accounts]
        """For each account the blocks that it keeps for its floor."""
        self._given_up = Ring()
        """Blocks that were kept for a floor, and are no longer."""
        self._put_off: dict[Block, bool] = {}
        """Blocks in a ring of kept ones (True), and those that were given up since (False)."""
        self._retention = Retention(len(self._accounts))

    @property
    def _rings(self) -> list[Ring]:
        return [self._given_up, self._once, self._proven, *self._kept]

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

    def prove(self, blocks: list[Block]) -> None:
        """A later request has found these blocks, the leading ones of a chain."""
        for block in blocks:
            block.state = PROVEN

    def retain(self, blocks: Iterable[Block], seconds: float) -> None:
        """These blocks, the leading ones of a chain, are held and are to be retained for so long from now on."""
        self._retention.ask(blocks, self._now + seconds)

    def publish(self, blocks: list[Block], account: Account) -> None:
        """Blocks, which have an owner, were published on an account."""
        for block in blocks:
            block.state = ONCE
        if account is not self._accounts.others:
            self._accounts.put(blocks, account)
            account.blocks += len(blocks)
            self._keep_no_more(account)

    def add(self, once: list[Block], proven: list[Block]) -> None:
        """Blocks have lost their last owner, those used once and those proven: of one chain, the tail first."""
        if self._retention.ends:
            self._add_some_retained(once, proven)
            return
        self._clock += len(once) + len(proven)
        self._once.append(once, self._clock)
        self._proven.append(proven, self._clock)

    def _add_some_retained(self, once: list[Block], proven: list[Block]) -> None:
        """The same, where some blocks are to wait: leading ones of their chains, so they come last."""
        waits = [block for block in (*once, *proven) if self._retention.until(block) > self._now]
        others = {*once, *proven}.difference(waits)
        self._clock += len(others)
        self._once.append([block for block in once if block in others], self._clock)
        self._proven.append([block for block in proven if block in others], self._clock)
        for block in waits:
            self._wait(block)

    def remove(self, blocks: list[Block]) -> None:
        """These blocks have an owner again."""
        if self._retention.ends:
            blocks = [block for block in blocks if not self._retention.leave(block)]
        unlink(blocks)
        if self._put_off:
            for block in blocks:
                self._is_used_again(block)

    def evict(self, count: int) -> list[Block]:
        """Take the first `count` blocks, at least 1; there are so many. Nothing is published in them any more."""
        victims = self._some(count)
        while len(victims) < count:
            victims += self._some(count - len(victims))
        for block in victims:
            block.state = UNPUBLISHED
        if self._accounts.owners:
            self._accounts.forget(victims)
        if self._retention.ends:
            self._retention.forget(victims)
        return victims

    def blocks(self) -> list[Block]:
        """All evictable blocks, the next victim first, if nothing happens in between."""
        evictable = self._evictable()
        if not evictable:
            return []
        with collector_at_rest():
            twins = {block: block.twin() for block in evictable}
            originals = dict(zip(twins.values(), evictable, strict=True))
            order = self._twin(twins).evict(len(evictable))
            for twin in order:
                twin.part()
            return [originals[victim] for victim in order]

    def clear(self, blocks: Iterable[Block]) -> None:
        """Nothing is published in any block any more. `blocks` are all of the pool."""
        self._accounts.clear()
        self._open()
        for block in blocks:
            block.state = UNPUBLISHED

    # ---- whose turn it is ------------------------------------------------------------------------------------

    def _some(self, most: int) -> list[Block]:
        """At most `most` blocks whose turn it is. None if all that were next have been put off."""
        turn = self._turn()
        if turn is None:
            return [self._last_resort()]
        ring, until = turn
        blocks = ring.take(most, until)
        if ring is self._given_up:
            for block in blocks:
                del self._put_off[block]
        elif self._accounts.owners:
            return [block for block in blocks if not self._keeps(block)]
        return blocks

    def _turn(self) -> tuple[Ring, int] | None:
        """The ring whose front is next, and the latest time of its blocks that go before another ring's front does."""
        clock = self._clock
        if self._put_off and self._given_up.front is not None:
            return self._given_up, clock
        once, proven = self._once.front, self._proven.front
        if proven is None:
            return None if once is None else (self._once, clock)
        if once is None:
            return self._proven, clock
        age, proven_age = clock - once.time, clock - proven.time
        if proven_age > self.ratio * age:
            return self._proven, clock - self.ratio * age - 1
        return self._once, clock + (-proven_age // self.ratio)

    def _last_resort(self) -> Block:
        """A block that is put off: all others have gone. The account furthest above its floor gives one up.

        Whoever is not named has no floor, and comes first.
        """
        others, *named = self._accounts
        candidates = [others] if self._has_put_off(others) else filter(self._has_put_off, named)
        account = max(candidates, key=lambda account: account.spare)
        account.blocks -= account is not others
        if not self._keeps_any(account):
            return self._retention.take(account.number)
        (block,) = self._kept[account.number].take(1, self._clock)
        del self._put_off[block]
        return block

    def _has_put_off(self, account: Account) -> bool:
        return self._keeps_any(account) or self._retention.waiting(account.number) > 0

    def _keeps_any(self, account: Account) -> bool:
        return self._kept[account.number].front is not None

    # ---- what is put off -------------------------------------------------------------------------------------

    def _keeps(self, block: Block) -> bool:
        """Whether the account that a block is on keeps it back for its floor; else the account gives it up."""
        account = self._accounts.of_block(block)
        if account is self._accounts.others:
            return False
        if account.spare > 0:
            account.blocks -= 1
            return False
        self._put_off[block] = True
        self._kept[account.number].append([block], self._clock)
        return True

    def _keep_no_more(self, account: Account) -> None:
        """An account that is above its floor again gives up the first of what it has kept back."""
        while account.spare > 0 and self._keeps_any(account):
            (block,) = self._kept[account.number].take(1, self._clock)
            self._given_up.append([block], self._clock)
            self._put_off[block] = False
            account.blocks -= 1

    def _is_used_again(self, block: Block) -> None:
        """A block that was perhaps put off for a floor has an owner. If it was given up, it counts again."""
        if not self._put_off.pop(block, True):
            account = self._accounts.of_block(block)
            account.blocks += 1
            self._keep_no_more(account)

    def _wait(self, block: Block) -> None:
        """Let a block wait until its time is up. Beyond the quota, the one whose time is up first waits no more."""
        account = self._accounts.of_block(block)
        self._retention.wait(block, account.number)
        if self._retention.waiting(account.number) > account.allowance.retained_blocks:
            self._age(self._retention.take(account.number))

    def _age(self, block: Block) -> None:
        """A block that was retained is one like any other from now on."""
        self._clock += 1
        ring = self._proven if block.state == PROVEN else self._once
        ring.append([block], self._clock)

    def _twin(self, twins: Mapping[Block, Block]) -> "EvictionOrder":
        """Another order, of the twins of all evictable blocks, to try out what would happen."""
        twin = EvictionOrder(self._accounts.copy(twins))
        twin._once, twin._proven = self._once.copy(twins), self._proven.copy(twins)
        twin._kept, twin._given_up = [ring.copy(twins) for ring in self._kept], self._given_up.copy(twins)
        twin._put_off = {twins[block]: kept for block, kept in self._put_off.items()}
        twin._retention = self._retention.copy(twins)
        twin._clock, twin._now, twin.ratio = self._clock, self._now, self.ratio
        return twin

    # ---- the audit -------------------------------------------------------------------------------------------

    def violations(self, evictable: Set[Block]) -> Iterator[str]:
        """What is wrong with the order, given the published blocks that nobody holds."""
        if not all(ring.is_whole() for ring in self._rings):
            yield "the links of the eviction order break"
        for ring in (self._once, self._proven):
            times = [block.time for block in ring]
            if times != sorted(times):
                yield "a block stands in the eviction order before one that came earlier"
        found = self._evictable()
        if len(found) != len(evictable) or evictable != set(found):
            yield f"{len(found)} blocks stand in the eviction order, {len(evictable)} are evictable"
        put_off = {block: True for ring in self._kept for block in ring}
        put_off |= dict.fromkeys(self._given_up, False)
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

    def _evictable(self) -> list[Block]:
        in_rings = [block for ring in self._rings for block in ring]
        return [*in_rings, *self._retention.blocks()]
