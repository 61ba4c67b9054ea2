"""Every accepted request, from its submission to the last word on it, and what its gateway is to hear."""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import InvalidRequest, OctavoError
from octavo.records.serve import (
    FinishReason,
    Prefilled,
    PromptLogprobs,
    Refusal,
    SampleFinished,
    StepReport,
    Submission,
    TokenLogprobs,
    Tokens,
)
from worker.core.beams import Text
from worker.core.reports import Event, reports_of
from worker.core.sequence import GatewayKey, Request, Sequence
from worker.core.stopping import reason_to_stop


@dataclass(slots=True)
class Totals:
    """Counts from the start on."""

    prompt_tokens: int = 0
    """Each prompt counted once, when it is first computed."""
    cached_tokens: int = 0
    output_tokens: int = 0


class Requests:
    """The live requests by stream and number, and the events that were not reported yet."""

    def __init__(self) -> None:
        self._live: dict[tuple[GatewayKey, int], Request] = {}
        self._events: list[tuple[GatewayKey, Event]] = []
        self._arrivals = 0
        self.totals = Totals()

    def __len__(self) -> int:
        return len(self._live)

    def accept(self, submission: Submission, gateway: GatewayKey) -> Request:
        """A new request, younger than all others. Raises InvalidRequest if its number is in use on that stream."""
        key = (gateway, submission.request)
        if key in self._live:
            raise InvalidRequest(f"request: {submission.request} is running on this stream already")
        self._arrivals += 1
        request = self._live[key] = Request(gateway=gateway, submission=submission, arrival=self._arrivals)
        return request

    def find(self, gateway: GatewayKey, number: int) -> list[Request]:
        """The request of that number, if it is live."""
        request = self._live.get((gateway, number))
        return [] if request is None else [request]

    def of_gateway(self, gateway: GatewayKey) -> list[Request]:
        """All that came on one stream."""
        return [request for request in self._live.values() if request.gateway == gateway]

    def all(self) -> list[Request]:
        """All that live."""
        return list(self._live.values())

    def forget(self, request: Request) -> None:
        """Its last sample has ended."""
        del self._live[request.gateway, request.submission.request]

    def count_prompt(self, sequence: Sequence) -> None:
        """The request's first computation begins, on what the sequence has reused."""
        request = sequence.request
        if request.cached_tokens is None:
            request.cached_tokens = sequence.reused
            self.totals.prompt_tokens += len(request.submission.prompt)
            self.totals.cached_tokens += sequence.reused

    def prefilled(self, request: Request) -> None:
        """The prompt is computed; told once."""
        if not request.prefilled:
            request.prefilled = True
            self._tell(request, Prefilled(request.submission.request, request.cached_tokens or 0))

    def judged(self, request: Request, start: int, tokens: tuple[TokenLogprobs, ...]) -> None:
        """How likely the prompt is from position `start` on. What was told before, and is computed anew, is skipped."""
        news = tokens[request.judged - start :]
        if news:
            self._tell(request, PromptLogprobs(request.submission.request, request.judged, news))
            request.judged += len(news)

    def drawn(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> bool:
        """Take the sample's next token in. Returns whether it was the last."""
        request, number = sequence.request, sequence.request.submission.request
        reason = reason_to_stop(request.submission, sequence.outputs, token)
        if reason is not FinishReason.STOP:
            sequence.tokens.append(token)
            self.totals.output_tokens += 1
            self._tell(request, Tokens(number, sequence.sample, (token,), logprobs))
        if reason is not None:
            self._tell(request, SampleFinished(number, sequence.sample, reason))
        return reason is not None

    def found(self, request: Request, texts: Iterable[Text]) -> None:
        """The request's search is over, with these texts, best first."""
        number = request.submission.request
        for sample, text in enumerate(texts, request.submission.first_sample):
            self.totals.output_tokens += len(text.tokens)
            if text.tokens:
                self._tell(request, Tokens(number, sample, text.tokens))
            self._tell(request, SampleFinished(number, sample, text.reason, text.cumulative))

    def refused(self, request: Request, error: OctavoError) -> None:
        """The request ends with an error."""
        self._tell(request, Refusal(request.submission.request, error))

    def take_reports(self) -> dict[GatewayKey, StepReport]:
        """What each gateway is to hear, since the last call."""
        events: Iterable[tuple[GatewayKey, Event]] = self._events
        self._events = []
        return reports_of(events)

    def _tell(self, request: Request, event: Event) -> None:
        self._events.append((request.gateway, event))
