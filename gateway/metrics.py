"""All metrics of the gateway."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.dispatcher import Dispatcher
from octavo.metrics import histogram
from octavo.records.generate import IndexState


class GatewayMetrics(Collector):
    """Reads the dispatcher at each scrape."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        """Every family once."""
        dispatcher, counters = self._dispatcher, self._dispatcher.counters
        yield CounterMetricFamily("octavo_requests", "Requests that clients sent.", counters.requests)
        yield CounterMetricFamily(
            "octavo_refused_requests", "Of them, those that ended before they were sent to a worker.", counters.refused
        )
        yield CounterMetricFamily(
            "octavo_carried_over_requests",
            "Times that a request went on at another worker, since its own was lost or left.",
            counters.carried_over,
        )
        yield GaugeMetricFamily("octavo_running_requests", "Let in and not ended.", dispatcher.running)
        yield GaugeMetricFamily("octavo_waiting_requests", "Waiting at the door.", dispatcher.waiting)
        yield GaugeMetricFamily("octavo_fleet_workers", "Workers known to this gateway.", len(dispatcher.fleet))
        yield CounterMetricFamily(
            "octavo_predicted_cached_tokens",
            "Prompt tokens that the chosen workers were expected to hold, in whole blocks.",
            counters.predicted_cached_tokens,
        )
        yield CounterMetricFamily(
            "octavo_delivered_cached_tokens",
            "Prompt tokens that they did hold, to the token: parts of blocks are found that cannot be predicted.",
            counters.delivered_cached_tokens,
        )
        yield CounterMetricFamily(
            "octavo_undelivered_cached_tokens",
            "Of what was expected, the tokens that were gone when their request's turn came, and were computed.",
            counters.undelivered_cached_tokens,
        )
        yield self._index_state()
        yield CounterMetricFamily(
            "octavo_failed_lookups", "Look-ups in the prefix index that learned nothing.", dispatcher.failed_lookups
        )
        yield CounterMetricFamily(
            "octavo_claimed_blocks",
            "Blocks of prompts that were sent to a worker before it had published them, told to other gateways.",
            dispatcher.claim_counts.blocks,
        )
        yield CounterMetricFamily(
            "octavo_failed_claims",
            "Writes of such claims that Redis did not take: a burst may be split between gateways.",
            dispatcher.claim_counts.failures,
        )
        yield CounterMetricFamily(
            "octavo_outdated_hits",
            "Hits of workers that left, registered again or were reset while the index was asked: dropped.",
            counters.outdated_hits,
        )
        yield histogram(
            "octavo_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            counters.time_to_first_token,
        )

    def _index_state(self) -> Metric:
        family = GaugeMetricFamily(
            "octavo_index_state", "1 for what the last look-up in the prefix index was worth.", labels=["state"]
        )
        for state in IndexState:
            family.add_metric([state.value], state is self._dispatcher.index_state)
        return family
