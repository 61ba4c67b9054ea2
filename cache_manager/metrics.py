"""All metrics of the cache manager. The label `worker` is the worker's id; counters begin anew with its books."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_manager.manager import Manager, WorkerUsage
from octavo.ids import WorkerId

LEDGER_COUNTERS = {
    "attached_sequences": "Sequences that entered the books.",
    "attached_tokens": "Tokens of their prompts; a preempted sequence counts again.",
    "hit_tokens": "Of the attached tokens, those found in published blocks.",
    "partial_hits": "Attaches that got a copy of a block of which they use a part.",
    "partial_hit_tokens": "Of the hit tokens, those in such copies.",
    "waits": "Attaches told to wait for a block that another sequence computes.",
    "too_short_to_hit": "Attaches without one full block before their last token.",
    "published_blocks": "Blocks that became findable.",
    "merged_blocks": "Full blocks given back because an equal one was published first.",
    "evicted_blocks": "Published blocks whose memory went to somebody else.",
    "copied_blocks": "Blocks copied before a write that would have shown elsewhere.",
}
"""The fields of LedgerStats."""


Usages = Sequence[tuple[WorkerId, WorkerUsage]]


class ManagerMetrics(Collector):
    """Reads the manager at each scrape: the workers and their books."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        """Every family once."""
        usages = list(self._manager.usage())
        yield from _pools(usages)
        yield from _ledgers(usages)
        counts = self._manager.counts
        yield CounterMetricFamily("octavo_registrations", "Workers that registered.", counts.registrations)
        yield CounterMetricFamily(
            "octavo_restorations", "Of them, those whose books were opened from their inventory.", counts.restorations
        )
        yield CounterMetricFamily(
            "octavo_unbalanced_restorations", "Of these, those whose books failed an audit.", counts.unbalanced
        )
        gone = CounterMetricFamily("octavo_workers_gone", "Epochs that ended, by reason.", labels=["reason"])
        for reason, count in counts.gone.items():
            gone.add_metric([reason], count)
        yield gone


def _pools(usages: Usages) -> Iterable[Metric]:
    blocks = GaugeMetricFamily(
        "octavo_pool_blocks",
        "Blocks of a worker's pool: held (with an owner), cached (published, evictable), free.",
        labels=["worker", "state"],
    )
    tokens = GaugeMetricFamily(
        "octavo_held_tokens",
        "Positions of held blocks in which a token lies: held blocks x block size, less what tail blocks and "
        "blocks reserved ahead leave empty.",
        labels=["worker"],
    )
    size = GaugeMetricFamily("octavo_block_size_tokens", "Positions of a block.", labels=["worker"])
    put_off = GaugeMetricFamily(
        "octavo_put_off_blocks",
        "Cached blocks that make room only when nothing else can: for a tenant's floor, or retained.",
        labels=["worker"],
    )
    ratio = GaugeMetricFamily(
        "octavo_proven_ratio",
        "How many times younger a cached block counts that was found again; 1 is plain LRU.",
        labels=["worker"],
    )
    sequences = GaugeMetricFamily("octavo_held_sequences", "Sequences in the books.", labels=["worker"])
    for worker, usage in usages:
        for state in ("held", "cached", "free"):
            blocks.add_metric([worker, state], getattr(usage.pool, f"{state}_blocks"))
        tokens.add_metric([worker], usage.pool.held_tokens)
        size.add_metric([worker], usage.pool.block_size)
        put_off.add_metric([worker], usage.pool.put_off_blocks)
        ratio.add_metric([worker], usage.pool.proven_ratio)
        sequences.add_metric([worker], usage.pool.sequences)
    yield from (blocks, tokens, size, put_off, ratio, sequences)


def _ledgers(usages: Usages) -> Iterable[Metric]:
    families = {
        name: CounterMetricFamily(f"octavo_{name}", meaning, labels=["worker"])
        for name, meaning in LEDGER_COUNTERS.items()
    }
    exchanges = CounterMetricFamily("octavo_exchanges", "Exchanges applied in this epoch.", labels=["worker"])
    for worker, usage in usages:
        for name, count in asdict(usage.stats).items():
            families[name].add_metric([worker], count)
        exchanges.add_metric([worker], usage.exchanges)
    yield from families.values()
    yield exchanges
