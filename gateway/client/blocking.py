"""The client without asyncio."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from gateway.client.messages import (
    batch_to_wire,
    detokenize_to_wire,
    event_from_wire,
    explain_to_wire,
    explanation_from_wire,
    fleet_from_wire,
    generation_to_wire,
    model_from_wire,
    outcome_from_wire,
    read_whole,
    tokenize_to_wire,
)
from gateway.client.tries import Tries, failures_of
from gateway.client.values import Completion, Ended, Explanation, FleetState, Model, completion_of, completions_of
from gateway.core.events import Event
from gateway.core.request import ChatPrompt, Generation, TextPrompt
from gateway.core.retries import MAY_PASS, SOME, Retries
from octavo.service import open_blocking_channel
from octavo.tenants import credentials
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc


class Client:
    """A connection to one gateway, without asyncio. Any number of threads may share it."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        transport: Transport = PLAINTEXT,
        retries: Retries = SOME,
    ) -> None:
        """See AsyncClient."""
        self._address = address
        self._metadata = credentials(api_key)
        self._retries = retries
        self._channel = open_blocking_channel(address, transport, proxied=True)
        self._stub = gateway_v1_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs, and close the connection."""
        self._channel.close()

    def generate(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Generator[Event]:
        """See AsyncClient.generate; leaving the loop early cancels the request when the generator is closed."""
        with closing(self._read(self._stub.Generate, generation_to_wire(request), timeout_seconds)) as replies:
            for reply in replies:
                yield event_from_wire(reply)

    def complete(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Completion:
        """The whole answer. Raises what `generate` raises."""
        return completion_of(self.generate(read_whole(request), timeout_seconds=timeout_seconds))

    def generate_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> Generator[tuple[int, Event | Ended]]:
        """See AsyncClient.generate_batch."""
        with closing(self._read(self._stub.GenerateBatch, batch_to_wire(requests), timeout_seconds)) as replies:
            for reply in replies:
                yield reply.index, outcome_from_wire(reply)

    def complete_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> tuple[Completion | Ended, ...]:
        """See AsyncClient.complete_batch."""
        events = self.generate_batch([*map(read_whole, requests)], timeout_seconds=timeout_seconds)
        return completions_of(len(requests), events)

    def tokenize(
        self, prompt: TextPrompt | ChatPrompt | str, *, model: str = "", timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """See AsyncClient.tokenize."""
        return tuple(self._ask(self._stub.Tokenize, tokenize_to_wire(prompt, model), timeout_seconds).ids)

    def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        show_special_tokens: bool = False,
        timeout_seconds: float | None = None,
    ) -> str:
        """See AsyncClient.detokenize."""
        message = detokenize_to_wire(ids, model, show_special_tokens=show_special_tokens)
        return self._ask(self._stub.Detokenize, message, timeout_seconds).text

    def models(self, *, timeout_seconds: float | None = None) -> tuple[Model, ...]:
        """See AsyncClient.models."""
        reply = self._ask(self._stub.ListModels, gateway_v1.ListModelsRequest(), timeout_seconds)
        return tuple(map(model_from_wire, reply.models))

    def explain(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Explanation:
        """See AsyncClient.explain."""
        return explanation_from_wire(self._ask(self._stub.Explain, explain_to_wire(request), timeout_seconds))

    def fleet(self, *, timeout_seconds: float | None = None) -> FleetState:
        """See AsyncClient.fleet."""
        return fleet_from_wire(self._ask(self._stub.GetFleet, gateway_v1.GetFleetRequest(), timeout_seconds))

    def _read(self, method: Callable[..., Any], message: Any, timeout_seconds: float | None) -> Generator[Any]:
        """See AsyncClient._read."""
        tries = Tries(self._retries, timeout_seconds)
        while True:
            begun = False
            try:
                with failures_of(self._address):
                    call = method(message, timeout=tries.seconds_left, metadata=self._metadata)
                    try:
                        for reply in call:
                            begun = True
                            yield reply
                        return
                    finally:
                        call.cancel()
            except MAY_PASS as failure:
                if begun:
                    raise
                pause = tries.pause_after(failure)
            time.sleep(pause)

    def _ask(self, method: Callable[..., Any], message: Any, timeout_seconds: float | None) -> Any:
        """See AsyncClient._ask."""
        tries = Tries(self._retries, timeout_seconds)
        while True:
            try:
                with failures_of(self._address):
                    return method(message, timeout=tries.seconds_left, metadata=self._metadata)
            except MAY_PASS as failure:
                pause = tries.pause_after(failure)
            time.sleep(pause)
