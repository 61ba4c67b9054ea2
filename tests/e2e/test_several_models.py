"""One fleet, two models: the gateway has the words of both, each worker has one of them."""

import shutil
from pathlib import Path

import pytest

from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from octavo.commands.model import fetch_model
from octavo.errors import UnknownModel
from octavo.v1 import gateway_pb2
from tests.support.cluster import greedy, prose, smollm2

pytestmark = [pytest.mark.cluster, pytest.mark.model]

NAME = "smollm2"


async def test_requests_go_to_the_workers_of_their_model(tmp_path: Path) -> None:
    """The second model is the first under another name, so that both are known to be right."""
    twin = tmp_path / "twin"
    shutil.copytree(fetch_model("smollm2"), twin, symlinks=True)
    prompt = prose(0, 40)
    async with smollm2(2, MODEL=f"smollm2, {twin}") as stack:
        listed = await stack.gateway.ListModels(gateway_pb2.ListModelsRequest(), timeout=10)
        assert {model.name: model.workers for model in listed.models} == {NAME: 1, "twin": 1}
        async with AsyncClient(stack.cluster.address) as client:
            served = {name: [await ask(client, name, prompt) for _ in range(2)] for name in (NAME, "twin")}
            with pytest.raises(UnknownModel, match=f"model: none named; there are: {NAME}, twin"):
                await client.complete(Generation(prompt=TokenPrompt(tuple(prompt)), max_tokens=1))
    for name, worker in ((NAME, "worker-0"), ("twin", "worker-1")):
        assert served[name] == [(worker, 0, greedy(prompt, 3)), (worker, 32, greedy(prompt, 3))], name


async def ask(client: AsyncClient, model: str, prompt: list[int]) -> tuple[str, int, list[int]]:
    """The worker, how many tokens it had, and what it said."""
    request = Generation(model=model, prompt=TokenPrompt(tuple(prompt)), max_tokens=3, ignore_eos=True)
    answer = await client.complete(request, timeout_seconds=60)
    return answer.usage.worker_id, answer.usage.cached_tokens, list(answer.samples[0].token_ids)
