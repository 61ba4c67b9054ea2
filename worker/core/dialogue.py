"""The worker's half of the talk with its manager, one exchange at a time; a step may run meanwhile.

An exchange that is asked while a step runs is about the one after it (shares.py). What it could not meet is remembered
until nothing is under way any more: then somebody is sent back (order.py), and its blocks ride in the next exchange.
Nobody is sent back in the midst of a step, since what that draws would be lost, nor of an exchange, whose grant may
give it a table.
"""

from collections.abc import Iterator, Mapping

from octavo.ids import CacheEpoch
from octavo.records.attend import Exchange, Grant
from worker.core import order
from worker.core.admission import Doorkeeper
from worker.core.asked import Asked, Shortage
from worker.core.branches import Branches
from worker.core.lineup import Lineup
from worker.core.sequence import Sequence
from worker.core.shares import Prospect, Share, after, now, share_out
from worker.core.step import Chunk
from worker.core.tables import Tables

Step = Mapping[Sequence, Chunk]
"""The step under way; empty where there is none."""


class Dialogue:
    """What is told and asked, and what the answers change."""

    def __init__(self, tables: Tables, lineup: Lineup, *, max_step_tokens: int, block_size: int) -> None:
        self._tables = tables
        self._lineup = lineup
        self._max_step_tokens = max_step_tokens
        self._block_size = block_size
        self._door = Doorkeeper(tables, lineup, block_size)
        self._asked: Asked | None = None
        """By the exchange under way."""
        self._shortage: Shortage | None = None
        self._turned_away = False
        """Since the last step, somebody was, and would be again."""
        self._alone = False
        self.branches = Branches(tables, lineup)
        self.must_tell = False
        """There is to be an exchange, whatever is in it."""

    @property
    def under_way(self) -> bool:
        """Whether an answer is to come."""
        return self._asked is not None

    def ask(self, frame: Exchange, step: Step, *, renew: bool) -> Exchange | None:
        """The frame with all that there is to tell and to ask; None if that is nothing, unless it is to `renew`."""
        assert self._asked is None, "one exchange at a time"
        if not step:
            self._give_way()
        if self._shortage and not renew:
            return None  # somebody has to give way first, after the step
        forks, children = self.branches.take()
        shares, attached = ([], []) if self._shortage else self._shares_to_come(step)
        commits, finished = self._tables.take_untold()
        size = self._block_size
        reserves = tuple(share.reservation() for share in shares if share.end > share.sequence.writable(size))
        if not (commits or forks or finished or attached or reserves or self.must_tell or renew):
            return None
        self.must_tell = False
        self._asked = Asked(children, attached, reserves)
        return frame._replace(
            commits=commits,
            forks=forks,
            finished=finished,
            attaches=self._asked.attaches(),
            reserves=reserves,
        )

    def granted(self, grant: Grant) -> None:
        """Follow the grant: who has a table now, what is in it, and who found too few blocks."""
        asked, self._asked = self._asked, None
        assert asked is not None, "nothing was asked"
        unmet, waits = set(grant.unmet), dict(grant.waiting)
        born = [child for child in asked.children if child.id not in unmet]
        came_in = [sequence for sequence in asked.attached if sequence.id not in waits]
        self._tables.take_in(grant, [*born, *came_in], asked.met(unmet))
        short = [sequence for name in asked.short(unmet) if (sequence := self._tables.known(name)) is not None]
        self._shortage = Shortage(short, came_in) if short else None
        for child in asked.children:
            if child.id in unmet and not child.ended:
                self._lineup.give_way(child)  # to be attached by itself
        for sequence in asked.attached:
            if sequence.id in waits and not sequence.ended:
                self._lineup.turn_away(sequence)
        for leader in (*came_in, *map(self._tables.known, waits.values())):
            if leader is not None and leader in self._tables:
                self._door.follow(leader)
        self._turned_away |= any(one.id in waits and one.follows is None for one in asked.attached)

    def settle(self) -> None:
        """A step is about to be planned: whoever has to give way does so before, unless an answer is to come."""
        if self._asked is None and not self._alone:
            self._give_way()
        self._turned_away = False

    # ---- without a manager -----------------------------------------------------------------------------------

    def lost(self) -> None:
        """What was asked last and not answered is asked again when a manager is back; tables stay."""
        asked, self._asked, self._shortage = self._asked or Asked(), None, None
        self._tables.unanswered()
        self.branches.unanswered()
        for sequence in asked.attached:
            if sequence in self._lineup.running and sequence not in self._tables:
                self._lineup.turn_away(sequence)
        self._alone = self.must_tell = True

    def start_anew(self) -> None:
        """The books are lost: whoever ran waits to be computed again."""
        self._tables.forget()
        self.branches.take()
        for sequence in self._lineup.running.copy():
            self._lineup.start_over(sequence)
        self._asked = self._shortage = None
        self._alone = self.must_tell = True

    def joined(self, cache_epoch: CacheEpoch) -> None:
        """A manager has taken the worker in, and publishes under this cache epoch."""
        self._alone = False
        self._tables.follow_reset(cache_epoch)

    # ---- parts of an exchange --------------------------------------------------------------------------------

    def _shares_to_come(self, step: Step) -> tuple[list[Share], list[Sequence]]:
        """Shares of the next step, as far as can be foreseen, and those who come in for it."""
        running = share_out(self._prospects(step), self._max_step_tokens)
        left = self._max_step_tokens - sum(share.count for share in running)
        entering = [] if self._turned_away else self._door.admit(left)
        shares = [*running, *(Share(sequence, 0, count) for sequence, count in entering)]
        return sorted(shares, key=lambda share: order.service(share.sequence)), [sequence for sequence, _ in entering]

    def _prospects(self, step: Step) -> Iterator[Prospect]:
        """Those who run, as they will be when the step is over."""
        for sequence in self._lineup.running:
            chunk = step.get(sequence)
            prospect = now(sequence) if chunk is None else after(sequence, chunk)
            if prospect is not None:
                yield prospect

    def _give_way(self) -> None:
        """Send back whoever has to make room for those who found too few blocks, or for the next of higher priority."""
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            for sequence in order.going(self._lineup.running, shortage.newcomers):
                if shortage.blocks(self._tables, self._block_size) <= self._tables.returning:
                    break
                self._lineup.give_way(sequence)
            missing = shortage.blocks(self._tables, self._block_size)
            assert not missing or self._tables.untold, f"{missing} blocks are missing, and nobody gives any back"
        for sequence in self._door.make_way():
            self._lineup.give_way(sequence)
