"""Adapter: asks the cache managers what workers have of a prompt."""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import grpc

from octavo.errors import UnknownWorker
from octavo.ids import WorkerId
from octavo.records.insight import PromptExplanation
from octavo.records.scope import Scope
from octavo.service import open_channel
from octavo.status import translated
from octavo.transport import PLAINTEXT, Transport
from octavo.v1 import cache_manager_pb2_grpc as cache_manager_v1_grpc
from octavo.wire.insight import explanation_from_wire, prompt_to_explain_to_wire

PATIENCE_SECONDS = 2.0
"""For one cache manager's answer about one worker."""


class PromptExplainer:
    """Connections to all cache managers, each made when it is first used."""

    def __init__(self, addresses: Iterable[str], transport: Transport = PLAINTEXT) -> None:
        self._metadata = transport.fleet_metadata
        self._channels = [open_channel(address, transport) for address in addresses]
        self._managers = [cache_manager_v1_grpc.CacheManagerStub(channel) for channel in self._channels]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    async def explain(
        self, workers: Sequence[WorkerId], tokens: Sequence[int], scope: Scope
    ) -> dict[WorkerId, PromptExplanation]:
        """What each of the workers has of a prompt, and why no more. Those of which no manager tells are left out.

        Raises:
            OctavoError: as a cache manager refused it.
        """
        answers = await asyncio.gather(*(self._ask(worker, tokens, scope) for worker in workers))
        return {worker: answer for worker, answer in zip(workers, answers, strict=True) if answer is not None}

    async def _ask(self, worker: WorkerId, tokens: Sequence[int], scope: Scope) -> PromptExplanation | None:
        request = prompt_to_explain_to_wire(worker, tokens, scope)
        for manager in self._managers:
            try:
                with translated():
                    return explanation_from_wire(
                        await manager.ExplainPrompt(request, timeout=PATIENCE_SECONDS, metadata=self._metadata)
                    )
            except UnknownWorker:
                continue  # it attends another one
            except grpc.RpcError:
                continue  # away, or too slow
        return None
