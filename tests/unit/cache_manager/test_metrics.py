"""What an operator can see of the books."""

from dataclasses import fields

from cache_manager.change_queue import ChangeQueue
from cache_manager.core.changes import LedgerStats
from cache_manager.manager import Manager
from cache_manager.metrics import LEDGER_COUNTERS, ManagerMetrics
from octavo.metrics import metrics_endpoint
from octavo.records.attend import Attach, Registration
from tests.support.books import exchange, pool_spec, tokens_of
from tests.support.scrape import Samples, scrape

NOW = 1_700_000_000.0


def registered(manager: Manager, worker: str) -> int:
    registration = Registration(
        worker_id=worker, incarnation=1, address="127.0.0.1:1", pool=pool_spec(block_size=16, num_blocks=40)
    )
    return manager.register(registration, NOW, lambda why: None).epoch


async def scraped(manager: Manager) -> Samples:
    async with metrics_endpoint("127.0.0.1:0", ManagerMetrics(manager), lambda: True) as port:
        return await scrape(port)


def open_manager() -> Manager:
    return Manager(ChangeQueue(), lease_seconds=5.0)


def pool(samples: Samples, worker: str = "w") -> dict[str, float]:
    return {state: samples["octavo_pool_blocks", state, worker] for state in ("held", "cached", "free")}


async def test_half_filled_tail_blocks_show_in_tokens_and_not_in_blocks() -> None:
    """S48: eight sequences of one and a half blocks, half of them of the same prompt."""
    manager = open_manager()
    epoch = registered(manager, "w")
    prompts = {sequence: tokens_of(100 * max(0, sequence - 3), 24) for sequence in range(8)}

    def step(number, **parts):
        wanted = exchange(step=number, **parts)
        return manager.exchange("w", wanted._replace(epoch=epoch), NOW)

    for number, (sequence, prompt) in enumerate(prompts.items()):
        grant = step(2 * number + 1, attaches={sequence: prompt}, reserves=[(sequence, 24)])
        step(2 * number + 2, commits={sequence: prompt[dict(grant.attached)[sequence] :]})
    samples = await scraped(manager)

    assert pool(samples) == {"held": 5 + 8, "cached": 0, "free": 40 - 13}
    assert samples["octavo_held_tokens", "w"] == 5 * 16 + 8 * 8
    assert samples["octavo_block_size_tokens", "w"] == 16
    assert samples["octavo_held_sequences", "w"] == 8
    assert samples["octavo_hit_tokens_total", "w"] == 3 * 16
    assert samples["octavo_exchanges_total", "w"] == 16


async def test_prompts_too_short_to_hit_are_marked() -> None:
    """S4."""
    manager = open_manager()
    epoch = registered(manager, "w")
    attaches = (Attach(1, (1, 2, 3)), Attach(2, tuple(range(40))))
    manager.exchange("w", exchange()._replace(epoch=epoch, attaches=attaches), NOW)

    samples = await scraped(manager)

    assert samples["octavo_too_short_to_hit_total", "w"] == 1
    assert samples["octavo_attached_sequences_total", "w"] == 2


async def test_who_comes_and_goes_is_counted() -> None:
    manager = open_manager()
    registered(manager, "a")
    registered(manager, "a")
    registered(manager, "b")
    manager.expire(NOW + 100)
    manager.stream_lost("a", registered(manager, "a"))
    leaver = registered(manager, "b")
    manager.exchange("b", exchange()._replace(epoch=leaver, draining=True), NOW)
    manager.stream_lost("b", leaver)

    samples = await scraped(manager)

    assert samples["octavo_registrations_total",] == 5
    assert samples["octavo_restorations_total",] == 0
    gone = {reason[0]: count for (name, *reason), count in samples.items() if name == "octavo_workers_gone_total"}
    assert gone == {"superseded": 1, "expired": 2, "stream_lost": 1, "left": 1}
    assert not any(name == "octavo_pool_blocks" for name, *_ in samples), "of workers that are gone nothing is told"


def test_every_figure_of_the_books_has_a_metric() -> None:
    assert LEDGER_COUNTERS.keys() == {field.name for field in fields(LedgerStats)}
