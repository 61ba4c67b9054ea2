"""What a step has to say, sorted into one report for each gateway."""

from collections.abc import Iterable

from octavo.records.serve import Prefilled, PromptLogprobs, Refusal, SampleFinished, StepReport, Tokens
from worker.core.sequence import GatewayKey

Event = Tokens | PromptLogprobs | Prefilled | SampleFinished | Refusal


def reports_of(events: Iterable[tuple[GatewayKey, Event]]) -> dict[GatewayKey, StepReport]:
    """The events of each gateway, in order within each kind."""
    sorted_events: dict[GatewayKey, list[Event]] = {}
    for gateway, event in events:
        sorted_events.setdefault(gateway, []).append(event)
    return {gateway: _report(own) for gateway, own in sorted_events.items()}


def _report(events: list[Event]) -> StepReport:
    return StepReport(
        tokens=tuple(event for event in events if isinstance(event, Tokens)),
        prefilled=tuple(event for event in events if isinstance(event, Prefilled)),
        finished=tuple(event for event in events if isinstance(event, SampleFinished)),
        refused=tuple(event for event in events if isinstance(event, Refusal)),
        prompt_logprobs=tuple(event for event in events if isinstance(event, PromptLogprobs)),
    )
