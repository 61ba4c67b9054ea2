"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
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
from octavo.service import open_channel
from octavo.tenants import credentials
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc


class AsyncClient:
    """A connection to one gateway, for asyncio. Any number of requests may share it."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        transport: Transport = PLAINTEXT,
        retries: Retries = SOME,
    ) -> None:
        """Talk to the gateway at `address` (host:port); it is reached at the first request.

        Args:
            address: host:port.
            api_key: shown with every request, where the gateway knows its tenants by their keys.
            transport: has the authorities that are believed where the gateway is served over TLS.
            retries: how often a call is made again that was refused for the moment, or found no gateway, before any
                part of its answer came, always within its `timeout_seconds`; `NEVER` for not at all.

        Raises:
            Unauthenticated: no key has such characters.
        """
        self._address = address
        self._metadata = credentials(api_key)
        self._retries = retries
        self._channel = open_channel(address, transport, proxied=True)
        self._stub = gateway_v1_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs, and close the connection."""
        await self._channel.close()

    async def generate(
        self, request: Generation | str, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Event]:
        """Started, PromptLogprobs if asked for, Deltas and one Finished per sample, then Usage, each as it is said.

        Leaving the loop early needs `contextlib.aclosing` around the generator to cancel the request at once.

        Raises:
            OctavoError: as the gateway raised it, InvalidRequest for example.
            TimeoutError: the answer was not whole after `timeout_seconds`.
            ConnectionError: the gateway cannot be reached, or went away.
        """
        replies = self._read(self._stub.Generate, generation_to_wire(request), timeout_seconds)
        async with aclosing(replies):
            async for reply in replies:
                yield event_from_wire(reply)

    async def complete(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Completion:
        """The whole answer. Raises what `generate` raises."""
        events = self.generate(read_whole(request), timeout_seconds=timeout_seconds)
        return completion_of([event async for event in events])

    async def generate_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[tuple[int, Event | Ended]]:
        """Several requests in one call: (which, its next event) as they come, of each in the order of `generate`.

        A request that fails has the error as its last item, is not asked again, and leaves the others alone. When the
        time is up, each that has not ended has a TimeoutError, or the call raises one.

        Raises:
            InvalidRequest: there are more requests than the gateway takes in one call, or none.
            OctavoError, TimeoutError, ConnectionError: the call failed as a whole, as with `generate`.
        """
        replies = self._read(self._stub.GenerateBatch, batch_to_wire(requests), timeout_seconds)
        async with aclosing(replies):
            async for reply in replies:
                yield reply.index, outcome_from_wire(reply)

    async def complete_batch(
        self, requests: Sequence[Generation | str], *, timeout_seconds: float | None = None
    ) -> tuple[Completion | Ended, ...]:
        """The whole answers, in the order of the requests; of one that failed its error. Raises as `generate_batch`."""
        events = self.generate_batch([*map(read_whole, requests)], timeout_seconds=timeout_seconds)
        return completions_of(len(requests), [event async for event in events])

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt | str, *, model: str = "", timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """The token ids of a text or a conversation. Raises what `generate` raises."""
        reply = await self._ask(self._stub.Tokenize, tokenize_to_wire(prompt, model), timeout_seconds)
        return tuple(reply.ids)

    async def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        show_special_tokens: bool = False,
        timeout_seconds: float | None = None,
    ) -> str:
        """The text of token ids, special tokens left out unless asked for. Raises what `generate` raises."""
        message = detokenize_to_wire(ids, model, show_special_tokens=show_special_tokens)
        return (await self._ask(self._stub.Detokenize, message, timeout_seconds)).text

    async def models(self, *, timeout_seconds: float | None = None) -> tuple[Model, ...]:
        """The models that some worker serves now, by name. Raises what `generate` raises."""
        reply = await self._ask(self._stub.ListModels, gateway_v1.ListModelsRequest(), timeout_seconds)
        return tuple(map(model_from_wire, reply.models))

    async def explain(self, request: Generation | str, *, timeout_seconds: float | None = None) -> Explanation:
        """What the workers have of a prompt, why no more, and where the request would go. Nothing runs.

        Of a request, prompt, model and cache_salt matter. Raises what `generate` raises.
        """
        return explanation_from_wire(await self._ask(self._stub.Explain, explain_to_wire(request), timeout_seconds))

    async def fleet(self, *, timeout_seconds: float | None = None) -> FleetState:
        """The workers and this gateway's own load, as it sees them. Raises what `generate` raises."""
        return fleet_from_wire(await self._ask(self._stub.GetFleet, gateway_v1.GetFleetRequest(), timeout_seconds))

    async def _read(
        self, method: Callable[..., Any], message: Any, timeout_seconds: float | None
    ) -> AsyncGenerator[Any]:
        """The replies of a call, made again while it fails for the moment and nothing has come."""
        tries = Tries(self._retries, timeout_seconds)
        while True:
            begun = False
            try:
                with failures_of(self._address):
                    call = method(message, timeout=tries.seconds_left, metadata=self._metadata)
                    try:
                        async for reply in call:
                            begun = True
                            yield reply
                        return
                    finally:
                        call.cancel()
            except MAY_PASS as failure:
                if begun:
                    raise
                pause = tries.pause_after(failure)
            await asyncio.sleep(pause)

    async def _ask(self, method: Callable[..., Any], message: Any, timeout_seconds: float | None) -> Any:
        """The reply of a call, made again while it fails for the moment."""
        tries = Tries(self._retries, timeout_seconds)
        while True:
            try:
                with failures_of(self._address):
                    return await method(message, timeout=tries.seconds_left, metadata=self._metadata)
            except MAY_PASS as failure:
                pause = tries.pause_after(failure)
            await asyncio.sleep(pause)
