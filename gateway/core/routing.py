"""Where a request goes: the worker where it costs the least, in tokens of work.

    cost = prefill    prompt tokens to compute there (what no hit covers)
         + queued     prompt tokens queued there before it (but for its own, which it would wait for anywhere)
         + others     (Shares.remembered x remembered + prompts that wait, per worker) x what is computed in vain
         + decode     Shares.positions x positions held there (every one is read again in every step)
         + memory     positions that do not fit, and Shares.positions x those that will push something out

The first two are the request's own wait. `others` is what it costs everybody else to compute what the best holder has:
the blocks push out others that would have been found, by the part of the pool that is `remembered`, and whoever waits
in the fleet waits so much longer. So a prompt stays with its holder while that costs a moderate wait; in a fleet where
many wait it stays at nearly any price, for there to compute twice is what makes them wait; and where nobody holds
anything, only the queues count.

What is computed anew is not in vain for those who ask for it, so it counts once for all of them: this prompt, and those
on their way that begin with the same. A conversation, which nobody else asks for, stays where it is; a prefix that many
ask for at once is computed by one more worker when its holders' queues cost about as much as that.

A worker that has just come remembers nothing, so nothing is pushed out there: it is sent prompts that others hold as
soon as their queues cost more than computing anew, and less readily as it fills up.

One unit for all terms, because counting requests does not see long prompts. Ties break at random, or every gateway
would send its first requests to the same worker. Pure: the random numbers are an argument.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.core.fleet import Standing
from gateway.core.in_flight import Hit
from octavo.hashing import digest_of, token_bytes
from octavo.ids import WorkerId

FEW_WORKERS = 8
"""Up to so many workers, all of them are judged."""
HOLDERS = 4
"""Of a larger fleet: those with the longest hits that are judged."""
RANDOM_WORKERS = 2
"""Of a larger fleet: drawn for every request, so that load is seen."""
HOME_TOKENS = 16
"""Leading tokens of a prompt that decide its home, the same at every gateway."""

_NO_HIT = Hit(0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What things count against a token that is computed. Chosen on recorded traffic (bench/routing.py)."""

    remembered: float = 8.0
    """A token that is computed in vain in a pool full of what may be asked for again, which it pushes out."""
    positions: float = 1 / 16
    """A position that is only held, or that makes room."""


SHARES = Shares()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request will take, wherever it runs."""

    prompt: tuple[int, ...]
    output_tokens: int
    """Of all samples, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a request's cost to others is measured by."""

    waiting_prompts: float
    """Per worker."""
    least_prefill: int
    """What it would compute at the worker that has most of it."""
    askers: int
    """Prompts that are on their way and begin with all that this one has, with this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens of work, term by term."""

    prefill_tokens: float
    queued_tokens: float
    others_tokens: float
    decode_tokens: float
    memory_tokens: float

    @property
    def total(self) -> float:
        """The number that is compared."""
        own = self.prefill_tokens + self.queued_tokens
        return own + self.others_tokens + self.decode_tokens + self.memory_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that was judged."""

    standing: Standing
    cached_tokens: int
    """Of the prompt, what it is expected to hold when its turn comes, in whole blocks."""
    cost: Cost


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision with everything it was made from."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]


def choose(
    work: Work,
    standings: Sequence[Standing],
    hits: Mapping[WorkerId, Hit],
    draw: Callable[[], float],
    shares: Shares = SHARES,
) -> Choice:
    """The worker that serves `work` for the least.

    Args:
        work: what is to be done.
        standings: those that may be chosen, at least one.
        hits: what a worker has or will have of the prompt; whoever is missing has nothing, and whoever is not among
            the standings is ignored.
        draw: random numbers in [0, 1).
        shares: other ones than the chosen, to see what they do.
    """
    assert standings, "nobody to choose from"
    judged = [
        (standing, hits.get(standing.info.worker_id, _NO_HIT))
        for standing in _worth_judging(work, standings, hits, draw)
    ]
    prefills = [len(work.prompt) - _reused(work, hit) for _, hit in judged]
    longest = max(hit.tokens for _, hit in judged)
    fleet = Surroundings(
        waiting_prompts=sum(standing.queued_prompts for standing in standings) / len(standings),
        least_prefill=min(prefills),
        askers=1 + sum(hit.sharers for _, hit in judged if hit.tokens == longest),
    )
    candidates = tuple(
        Candidate(standing=standing, cached_tokens=_reused(work, hit), cost=cost_of(work, standing, hit, fleet, shares))
        for standing, hit in judged
    )
    least = min(candidate.cost.total for candidate in candidates)
    cheapest = [candidate for candidate in candidates if candidate.cost.total == least]
    return Choice(_one_of(cheapest, draw), candidates)


def cost_of(work: Work, standing: Standing, hit: Hit, fleet: Surroundings, shares: Shares = SHARES) -> Cost:
    """What `work` costs at a worker that has so much of its prompt."""
    capacity = standing.info.pool.num_blocks * standing.info.pool.block_size
    prefill = len(work.prompt) - _reused(work, hit)
    wanted = prefill + work.output_tokens
    shortage = max(0, wanted + standing.held_tokens - capacity)
    occupied = min(1.0, (standing.held_tokens + standing.cached_tokens) / capacity)
    remembered = min(1.0, standing.cached_tokens / capacity)
    per_token = shares.remembered * remembered + fleet.waiting_prompts
    return Cost(
        prefill_tokens=prefill,
        queued_tokens=max(0, standing.queued_tokens - hit.coming_tokens),
        others_tokens=per_token * (prefill - fleet.least_prefill) / fleet.askers,
        decode_tokens=shares.positions * standing.held_tokens,
        memory_tokens=shortage + shares.positions * occupied * wanted,
    )


def home_of(prompt: Sequence[int], standings: Sequence[Standing]) -> Standing:
    """The worker that every gateway agrees on for prompts which begin alike (rendezvous hashing).

    When a worker joins or leaves, only the prompts at home there move.
    """
    key = token_bytes(prompt[:HOME_TOKENS])
    return max(standings, key=lambda standing: digest_of(standing.info.worker_id.encode(), key))


def _reused(work: Work, hit: Hit) -> int:
    """At least one token is left to compute."""
    return min(hit.tokens, len(work.prompt) - 1)


def _worth_judging(
    work: Work, standings: Sequence[Standing], hits: Mapping[WorkerId, Hit], draw: Callable[[], float]
) -> Sequence[Standing]:
    if len(standings) <= FEW_WORKERS:
        return standings
    reused = {
        standing.info.worker_id: _reused(work, hits.get(standing.info.worker_id, _NO_HIT)) for standing in standings
    }
    holders = [standing for standing in standings if reused[standing.info.worker_id] > 0]
    holders.sort(key=lambda standing: reused[standing.info.worker_id], reverse=True)
    picked = [*holders[:HOLDERS], home_of(work.prompt, standings)]
    picked += [_one_of(standings, draw) for _ in range(RANDOM_WORKERS)]
    return list({standing.info.worker_id: standing for standing in picked}.values())


def _one_of(items: Sequence[T], draw: Callable[[], float]) -> T:
    return items[int(draw() * len(items))]
