"""Where a request goes."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet import Fleet, Standing
from gateway.core.in_flight import Hit, PromptBlocks
from gateway.core.routing import FEW_WORKERS, SHARES, Choice, Surroundings, Work, choose, cost_of, home_of
from octavo.ids import WorkerId
from octavo.records.fleet import WorkerInfo
from octavo.records.scope import PLAIN
from tests.support.fleets import news, pool, snapshot, worker

BLOCK = 16
WARM = {"cached_blocks": 1024}
"""A worker whose pool is full of what it remembers."""
UNSEEN = Surroundings(waiting_prompts=0, least_prefill=1, askers=1)
"""Somebody has all of a prompt, and nobody waits."""


def standings(*workers: WorkerInfo) -> tuple[Standing, ...]:
    fleet = Fleet()
    fleet.apply(snapshot(*workers), now=0.0, manager="m")
    return fleet.standings([info.worker_id for info in workers])


def work(tokens: int = 200, output: int = 20) -> Work:
    return Work(prompt=tuple(range(tokens)), output_tokens=output)


def choice(asked: Work, *workers: WorkerInfo, seed: int = 0, **held: int) -> Choice:
    hits = {WorkerId(name): Hit(tokens) for name, tokens in held.items()}
    return choose(asked, standings(*workers), hits, Random(seed).random)


def chosen(asked: Work, *workers: WorkerInfo, seed: int = 0, **held: int) -> str:
    return choice(asked, *workers, seed=seed, **held).chosen.standing.info.worker_id


def test_of_equally_loaded_holders_the_one_with_the_longest_match_is_chosen() -> None:
    """S40, with a worker that the hits name and the fleet does not."""
    fleet = [worker(name) for name in "abcd"]
    assert chosen(work(), *fleet, a=3 * BLOCK, b=7 * BLOCK, c=5 * BLOCK, ghost=9 * BLOCK) == "b"


def test_an_unseen_prompt_goes_to_the_idle_worker_with_the_larger_pool() -> None:
    """S35."""
    busy = worker("busy", spec=pool(num_blocks=64), queued_prefill_tokens=900, running_sequences=8, held_blocks=60)
    idle = worker("idle", spec=pool(num_blocks=4096))
    assert {chosen(work(), busy, idle, seed=seed) for seed in range(20)} == {"idle"}


def test_a_long_queue_outweighs_a_short_hit_and_a_short_queue_does_not() -> None:
    idle = worker("idle", **WARM)
    assert chosen(work(), worker("holder", queued_prefill_tokens=2900, **WARM), idle, holder=160) == "idle"
    assert chosen(work(), worker("holder", queued_prefill_tokens=1200, **WARM), idle, holder=160) == "holder"


def test_a_pool_that_is_held_to_the_brim_is_avoided_even_by_those_it_holds_a_prefix_for() -> None:
    full = worker("full", spec=pool(num_blocks=64), held_blocks=64)
    assert chosen(work(), full, worker("empty", spec=pool(num_blocks=64)), full=BLOCK) == "empty"


def test_ties_break_at_random() -> None:
    fleet = [worker(name) for name in "abcd"]
    seen = Counter(chosen(work(), *fleet, seed=seed) for seed in range(400))
    assert set(seen) == set("abcd")
    assert max(seen.values()) < 200


def test_a_burst_between_two_reports_is_spread() -> None:
    fleet = Fleet()
    names = [WorkerId(name) for name in "abcd"]
    fleet.apply(snapshot(*map(worker, "abcd")), now=0.0, manager="m")
    sent: list[str] = []
    for _ in range(4):
        info = choose(work(), fleet.standings(names), {}, Random(0).random).chosen.standing.info
        fleet.reserve(info, prompt_tokens=200, cached_tokens=0, output_tokens=20)
        sent.append(info.worker_id)

    assert sorted(sent) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("late_report", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_prompts_behind_one_prefix_follow_its_holder_and_a_stranger_goes_elsewhere(
    seed: int, late_report: bool
) -> None:
    """Six prompts that share 512 tokens, one after another, then one that shares nothing.

    There is no report at all, or each time one that was taken while the prompt was still queued.
    """
    random = Random(seed)
    fleet = Fleet()
    names = [WorkerId("a"), WorkerId("b")]
    fleet.apply(snapshot(worker("a"), worker("b")), now=0.0, manager="m")
    holder: WorkerId | None = None
    for at in range(6):
        asked = Work(prompt=(*range(512), *range(1000 + 50 * at, 1020 + 50 * at)), output_tokens=16)
        hits = {holder: Hit(512)} if holder else {}
        candidate = choose(asked, fleet.standings(names), hits, random.random).chosen
        assert holder in (None, candidate.standing.info.worker_id)
        holder = candidate.standing.info.worker_id
        reservation = fleet.reserve(
            candidate.standing.info, prompt_tokens=532, cached_tokens=candidate.cached_tokens, output_tokens=16
        )
        if late_report:
            fleet.apply(news(worker(holder, queued_prefill_tokens=532, held_blocks=34)), now=0.0, manager="m")
        fleet.prefilled(reservation)
        fleet.release(reservation)

    stranger = choose(work(), fleet.standings(names), {}, random.random).chosen
    assert stranger.standing.info.worker_id != holder


def test_what_a_worker_finished_still_repels_strangers_when_it_was_reported() -> None:
    assert {chosen(work(), worker("a", cached_blocks=40), worker("b"), seed=seed) for seed in range(10)} == {"b"}


def test_at_least_one_token_is_left_to_compute() -> None:
    assert choice(work(32), worker("a"), a=32).chosen.cached_tokens == 31


def test_every_term_of_the_cost_is_named() -> None:
    standing = standings(
        worker("a", spec=pool(num_blocks=100), queued_prefill_tokens=70, held_blocks=20, cached_blocks=30)
    )[0]
    fleet = Surroundings(waiting_prompts=1.5, least_prefill=8, askers=3)
    cost = cost_of(work(200, output=40), standing, Hit(160), fleet)

    assert (cost.prefill_tokens, cost.queued_tokens) == (40, 70)
    assert cost.decode_tokens == 20 * BLOCK / 16
    assert cost.memory_tokens == (40 + 40) * 0.5 / 16
    assert cost.others_tokens == (SHARES.remembered * 0.3 + 1.5) * (40 - 8) / 3
    assert cost.total == 40 + 70 + cost.others_tokens + 20 + 2.5


def test_a_newcomer_gets_its_share_of_a_warm_fleet_until_it_is_as_warm() -> None:
    """It holds nothing of any prompt, and pushes nothing out for one."""
    fleet = [worker(name, queued_prefill_tokens=400, **WARM) for name in "abc"]

    assert chosen(work(), *fleet, worker("new"), a=192, b=192, c=192) == "new"
    assert chosen(work(), *fleet, worker("new", **WARM), a=192, b=192, c=192) != "new"
    assert chosen(work(), worker("a", queued_prefill_tokens=100, **WARM), worker("new"), a=192) == "a"


def test_where_many_wait_a_prompt_stays_with_its_holder_for_longer() -> None:
    """What is computed twice is waited for by all of them."""
    few = {"holder": worker("holder", queued_prefill_tokens=2000, **WARM), "other": worker("other", **WARM)}
    many = {
        "holder": worker("holder", queued_prefill_tokens=2000, waiting_sequences=9, **WARM),
        "other": worker("other", waiting_sequences=9, **WARM),
    }
    assert chosen(work(), *few.values(), holder=160) == "other"
    assert chosen(work(), *many.values(), holder=160) == "holder"


def test_the_more_ask_for_a_prefix_the_sooner_another_worker_computes_it() -> None:
    """A queue of 1,200 tokens before a hit of 160."""
    fleet = standings(worker("holder", queued_prefill_tokens=1200, **WARM), worker("other", **WARM))

    def taken(sharers: int) -> str:
        hits = {WorkerId("holder"): Hit(160, sharers=sharers)}
        return choose(work(), fleet, hits, Random(0).random).chosen.standing.info.worker_id

    assert [taken(sharers) for sharers in (0, 1, 2, 8)] == ["holder", "other", "other", "other"]


def test_what_does_not_fit_is_paid_in_full() -> None:
    standing = standings(worker("a", spec=pool(num_blocks=20), held_blocks=20))[0]
    assert cost_of(work(100, output=28), standing, Hit(0), UNSEEN).memory_tokens == 128 + 128 / 16


def test_in_a_large_fleet_holders_the_home_and_two_at_random_are_judged() -> None:
    fleet = [worker(f"w{at}") for at in range(100)]
    made = choice(work(), *fleet, w7=64, w9=32)
    judged = {candidate.standing.info.worker_id for candidate in made.candidates}

    assert {"w7", "w9", home_of(work().prompt, standings(*fleet)).info.worker_id} <= judged
    assert FEW_WORKERS >= len(judged) >= 3
    assert made.chosen.standing.info.worker_id == "w7"


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(2, 30), st.data())
def test_a_prompt_moves_home_only_if_its_home_leaves(prompt: list[int], count: int, data: st.DataObject) -> None:
    fleet = standings(*(worker(f"w{at}") for at in range(count)))
    home = home_of(prompt, fleet)
    leaver = data.draw(st.sampled_from(fleet))
    rest = [standing for standing in fleet if standing is not leaver]

    assert leaver is home or home_of(prompt, rest) is home


loads = st.fixed_dictionaries(
    {
        "queued_prefill_tokens": st.integers(0, 5000),
        "held_blocks": st.integers(0, 512),
        "cached_blocks": st.integers(0, 512),
    }
)


@given(st.lists(loads, min_size=1, max_size=20), st.data(), st.integers(0, 2**32))
def test_nobody_judged_is_cheaper_than_the_chosen(fleet: list[dict[str, int]], data: st.DataObject, seed: int) -> None:
    workers = [worker(f"w{at}", **load) for at, load in enumerate(fleet)]
    names = st.sampled_from([info.worker_id for info in workers])
    hits = data.draw(st.dictionaries(names, st.builds(Hit, st.integers(0, 100), st.integers(0, 100))))
    made = choose(work(), standings(*workers), hits, Random(seed).random)

    assert made.chosen in made.candidates
    assert all(made.chosen.cost.total <= candidate.cost.total for candidate in made.candidates)
    if len(workers) <= FEW_WORKERS:
        assert len(made.candidates) == len(workers)


@given(st.integers(0, 199), st.integers(1, 100), loads)
def test_a_longer_hit_never_costs_more(hit: int, more: int, load: dict[str, int]) -> None:
    standing = standings(worker("a", **load))[0]
    assert cost_of(work(), standing, Hit(hit + more), UNSEEN).total <= cost_of(work(), standing, Hit(hit), UNSEEN).total


def test_a_worker_that_drains_is_known_as_such() -> None:
    fleet = Fleet()
    fleet.apply(snapshot(worker("a")), now=0.0, manager="m")
    fleet.apply(news(worker("a", draining=True)), now=1.0, manager="m")
    assert [info.draining for info in fleet.workers] == [True]


@pytest.mark.parametrize("workers", [2, 8])
def test_a_burst_behind_one_cold_prefix_goes_to_one_worker(workers: int) -> None:
    """S37: eight prompts of 104 tokens that share 96, before anybody has reported anything."""
    assert sorted(burst(workers, requests=8, shared=96, own=8).values()) == [8]


@pytest.mark.parametrize("seed", range(5))
def test_a_large_burst_takes_a_second_worker_when_its_queue_costs_more_than_computing_again(seed: int) -> None:
    """S37: 64 prompts behind 512 cold tokens; eight workers are there."""
    taken = burst(8, requests=64, shared=512, own=8, seed=seed)
    assert len(taken) <= 2


def burst(workers: int, *, requests: int, shared: int, own: int, seed: int = 0) -> Counter[str]:
    """Requests by the worker that they go to, sent at one moment by a gateway that knows no block of theirs."""
    fleet, random, taken = Fleet(), Random(seed), Counter[str]()
    infos = [worker(f"w{at}") for at in range(workers)]
    fleet.apply(snapshot(*infos), now=0.0, manager="m")
    for request in range(requests):
        asked = Work(prompt=(*range(shared), *[1000 + request] * own), output_tokens=16)
        blocks = PromptBlocks(asked.prompt, PLAIN)
        hits = fleet.hits(blocks, fleet.workers)
        chosen = choose(asked, fleet.standings(info.worker_id for info in infos), hits, random.random).chosen
        fleet.reserve(
            chosen.standing.info,
            prompt_tokens=shared + own,
            cached_tokens=chosen.cached_tokens,
            output_tokens=16,
            blocks=blocks.of(chosen.standing.info),
        )
        taken[chosen.standing.info.worker_id] += 1
    return taken


def test_a_prompt_does_not_queue_behind_its_own_beginning() -> None:
    """What is being computed there for another request would have to be computed anywhere."""
    standing = standings(worker("a", queued_prefill_tokens=104))[0]
    cost = cost_of(work(104), standing, Hit(cached_tokens=32, coming_tokens=64), UNSEEN)

    assert (cost.prefill_tokens, cost.queued_tokens) == (8, 40)
