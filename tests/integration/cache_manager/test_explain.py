"""What an operator may ask of a worker's books, over real gRPC."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from octavo.errors import InvalidRequest, UnknownSequence, UnknownWorker
from octavo.ids import WorkerId
from octavo.records.insight import HitEnd, PromptExplanation, SequenceDescription
from octavo.records.scope import PLAIN, Scope
from octavo.status import translated
from octavo.v1 import cache_manager_pb2 as v1
from octavo.wire.insight import description_from_wire, explanation_from_wire, prompt_to_explain_to_wire
from tests.support.books import tokens_of
from tests.support.manager_service import ManagerService, manager_service

PROMPT = tokens_of(0, 10)
"""Two blocks of four, and two tokens."""


@pytest.fixture
async def service() -> AsyncGenerator[ManagerService]:
    async with manager_service() as service:
        yield service


async def explain(service: ManagerService, tokens: Any, worker: str = "w", scope: Scope = PLAIN) -> PromptExplanation:
    request = prompt_to_explain_to_wire(WorkerId(worker), tokens, scope)
    with translated():
        return explanation_from_wire(await service.stub.ExplainPrompt(request, timeout=10))


async def describe(service: ManagerService, sequence: int, worker: str = "w") -> SequenceDescription:
    request = v1.DescribeSequenceRequest(worker_id=worker, sequence=sequence)
    with translated():
        return description_from_wire(await service.stub.DescribeSequence(request, timeout=10))


async def test_a_prompt_is_explained_and_a_sequence_described(service: ManagerService) -> None:
    """S53."""
    async with service.worker() as worker:
        await worker.compute(1, PROMPT)
        found = await explain(service, [*PROMPT[:7], 99, 98])
        described = await describe(service, 1)

        assert (found.end, found.position, found.reused_tokens) == (HitEnd.DIFFERS, 7, 4)
        assert found.block == described.blocks[1].block
        assert (described.length, described.room) == (10, 12)
        assert [(block.references, block.published) for block in described.blocks] == [(1, True), (1, True), (1, False)]
        assert (await explain(service, PROMPT, scope=Scope(salt=b"s" * 32))).end is HitEnd.NOT_PUBLISHED


async def test_what_cannot_be_is_refused_by_name(service: ManagerService) -> None:
    async with service.worker():
        for call, error in (
            (explain(service, PROMPT, worker="nobody"), UnknownWorker),
            (describe(service, 1, worker="nobody"), UnknownWorker),
            (describe(service, 7), UnknownSequence),
            (explain(service, []), InvalidRequest),
            (explain(service, PROMPT, scope=Scope(salt=b"short")), InvalidRequest),
        ):
            with pytest.raises(error):
                await call
