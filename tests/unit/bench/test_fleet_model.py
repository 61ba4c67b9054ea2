"""The gateway's core over time: a fleet that gains a worker, and a prefix that everybody asks for."""

from collections.abc import Sequence
from random import Random

import pytest

from bench.fleet_model import Job, ModelledFleet, Rates
from bench.replay import Arrival, timed
from bench.routing import WORKERS, cut, setting
from bench.routing_rivals import octavo

BLOCK = 16
PREFIX, TAIL = 64, 4
"""Blocks: the first take 0.64 s to compute, the others 0.04 s."""
RATES = Rates(prefill=1600.0)
POOL_BLOCKS = 2000


def found_percent(jobs: Sequence[Job]) -> float:
    return 100 * sum(job.found for job in jobs) / sum(len(job.arrival.prompt) for job in jobs)


def share_of_last(jobs: Sequence[Job]) -> float:
    """Of the blocks that are computed, over its eighth."""
    computed = [(job.worker, len(job.arrival.prompt) - job.found) for job in jobs]
    return WORKERS * sum(blocks for worker, blocks in computed if worker == WORKERS - 1) / sum(b for _, b in computed)


def test_a_newcomer_to_a_warm_fleet_gets_its_share_at_once_and_costs_no_hits() -> None:
    """On recorded chat the last of eight workers comes when half of the time is over."""
    trace = cut(timed("mooncake"), 24_000)
    place = setting(trace, 100, Rates(), busy=0.7)
    half = trace.arrivals[-1].at * place.stretch / 2

    def late_jobs(joins_at: float) -> list[Job]:
        fleet = ModelledFleet(WORKERS, place.blocks_per_worker, place.rates, trace.block_tokens, last_joins_at=joins_at)
        fleet.play(trace.arrivals, place.stretch, octavo, seed=1)
        return [job for job in fleet.jobs if job.now >= half]

    with_newcomer, always_there = late_jobs(half), late_jobs(0.0)

    assert 0.5 < share_of_last(with_newcomer[: len(with_newcomer) // 3]) < 2
    assert found_percent(with_newcomer) > 0.97 * found_percent(always_there)


def arrival(at: float, prompt: Sequence[int]) -> Arrival:
    return Arrival(at=at, prompt=prompt, prompt_tokens=BLOCK * len(prompt), output_tokens=BLOCK)


def test_a_newcomer_gets_its_share_of_conversations_that_others_hold() -> None:
    """Seven workers hold 112 of 50 blocks; 7.5 turns of 100 more a second come, of which the seven compute 7."""
    fresh, random = iter(range(1 << 30)), Random(1)
    conversations = [[next(fresh) for _ in range(50)] for _ in range(112)]
    begun = [arrival(at / 4, conversation) for at, conversation in enumerate(conversations)]
    joins_at = begun[-1].at + 20
    turns = [
        arrival(joins_at + at / 7.5, [*random.choice(conversations), *(next(fresh) for _ in range(100))])
        for at in range(100)
    ]
    fleet = ModelledFleet(WORKERS, POOL_BLOCKS, RATES, BLOCK, last_joins_at=joins_at)
    fleet.play([*begun, *turns], 1.0, octavo, seed=1)

    jobs = fleet.jobs[len(begun) :]
    assert all(0.8 < share_of_last(part) < 1.5 for part in (jobs[:50], jobs[50:]))


def ask_for_a_hot_prefix(requests: int, per_second: float, *, warm: bool) -> list[Job]:
    """Requests behind one prefix, each with an end of its own. In a warm fleet all pools are full of other prompts."""
    fresh = iter(range(PREFIX, 1 << 30))

    def behind(prefix: int, own: int) -> list[int]:
        return [*range(prefix), *(next(fresh) for _ in range(own))]

    before = [arrival(float(at), behind(0, 100)) for at in range(WORKERS * POOL_BLOCKS // 100)] if warm else []
    begins = len(before) + 10.0
    asked = [arrival(begins + at / per_second, behind(PREFIX, TAIL)) for at in range(requests)]
    fleet = ModelledFleet(WORKERS, POOL_BLOCKS, RATES, BLOCK)
    fleet.play([*before, *asked], 1.0, octavo, seed=1)
    return fleet.jobs[len(before) :]


def computing(jobs: Sequence[Job]) -> list[int]:
    """Those that computed the prefix, by their number."""
    return [at for at, job in enumerate(jobs) if job.found < PREFIX]


@pytest.mark.parametrize("warm", [False, True])
def test_a_prefix_that_one_worker_can_serve_is_computed_once(*, warm: bool) -> None:
    assert computing(ask_for_a_hot_prefix(100, 1.0, warm=warm)) == [0]


@pytest.mark.parametrize("warm", [False, True])
def test_a_hot_prefix_is_computed_by_as_many_workers_as_its_requests_need_and_then_no_more(*, warm: bool) -> None:
    """100 requests a second, of which a worker that has the prefix computes 25."""
    jobs = ask_for_a_hot_prefix(400, 100.0, warm=warm)
    copies = computing(jobs)
    holders = {job.worker for job in jobs}

    assert 4 <= len(copies) == len(holders) <= WORKERS, "nobody computes it twice"
    assert copies[-1] < 200
    waits = sorted(job.done - job.now for job in jobs)
    assert waits[len(waits) * 95 // 100] < 2 * (PREFIX + TAIL) * BLOCK / RATES.prefill, "less than two of its prefills"
