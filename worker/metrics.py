"""All metrics of the worker."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.core.scheduler import Scheduler
from worker.engine import Engine


class WorkerMetrics(Collector):
    """Reads the scheduler and its engine at each scrape. How full the pool is the cache manager tells."""

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """Every family once."""
        load, counts = self._scheduler.load(), self._engine.counts
        yield CounterMetricFamily("octavo_steps", "Forward passes.", counts.steps)
        yield CounterMetricFamily("octavo_computed_tokens", "Tokens put through the model.", counts.computed_tokens)
        yield CounterMetricFamily(
            "octavo_failed_steps", "Steps that raised; their requests ended with an error.", counts.failed_steps
        )
        yield CounterMetricFamily(
            "octavo_lost_managers", "Times that the cache manager was away, or ended the epoch.", counts.lost_managers
        )
        yield CounterMetricFamily("octavo_step_seconds", "In which a step ran.", counts.step_seconds)
        yield CounterMetricFamily(
            "octavo_wait_seconds",
            "In which no step ran, though there was work, for want of an answer of the cache manager.",
            counts.wait_seconds,
        )
        yield CounterMetricFamily("octavo_prompt_tokens", "Of prompts, each counted once.", load.prompt_tokens)
        yield CounterMetricFamily(
            "octavo_cached_tokens", "Of the prompt tokens, those found in published blocks.", load.cached_tokens
        )
        yield CounterMetricFamily("octavo_output_tokens", "Drawn for clients.", load.output_tokens)
        drafts = self._scheduler.drafts
        yield CounterMetricFamily("octavo_drafted_tokens", "Guessed and put through the model.", drafts.drafted)
        yield CounterMetricFamily("octavo_accepted_tokens", "Of those, the ones that were right.", drafts.accepted)
        yield CounterMetricFamily(
            "octavo_preemptions", "Sequences that lost a table for which they had computed something.", load.preemptions
        )
        yield GaugeMetricFamily("octavo_running_sequences", "With a table.", load.running_sequences)
        yield GaugeMetricFamily("octavo_waiting_sequences", "Without one.", load.waiting_sequences)
        yield GaugeMetricFamily(
            "octavo_queued_prefill_tokens", "Prompt tokens accepted and not yet computed.", load.queued_prefill_tokens
        )
