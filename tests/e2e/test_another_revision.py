"""Other weights under a name that is known: nothing that the old ones have computed is taken for theirs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local import Cluster
from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from octavo import models
from octavo.errors import InvalidRequest
from octavo.service import open_channel
from octavo.v1.cache_manager_pb2_grpc import CacheManagerStub
from tests.support.cluster import BLOCK
from tests.support.manager_service import WorkerStandIn
from tests.support.oracle import solo_greedy
from tests.support.tiny_model import save_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = tuple(range(10, 10 + 5 * BLOCK + 3))
OUTPUT = 8
PATIENCE_SECONDS = 120.0


async def answer(client: AsyncClient) -> tuple[int, int, list[int]]:
    """What was foretold to be there, what was there, and what was said."""
    request = Generation(prompt=TokenPrompt(PROMPT), max_tokens=OUTPUT, ignore_eos=True)
    told = await client.complete(request, timeout_seconds=PATIENCE_SECONDS)
    return told.usage.predicted_cached_tokens, told.usage.cached_tokens, list(told.samples[0].token_ids)


async def test_weights_that_are_loaded_anew_under_their_name_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    """S8 and S12 with processes: the model is saved again where it was, with another adapter merged into it. Beside a
    worker that has the first weights nobody may serve the second ones as the same model; started again, it serves them.
    """
    first, second = (save_tiny_llama(tmp_path / str(seed), seed) for seed in (1, 2))
    served = shutil.copytree(first, tmp_path / "merged")
    settings = {"MODEL": str(served), "DTYPE": "float32", "DEVICE": "cpu", "THREADS": "1", "KV_MEMORY": "4MiB"}
    env = {f"OCTAVO_{name}": value for name, value in (settings | {"LOOKUP_SECONDS": "1"}).items()}
    async with Cluster(workers=1, env=env, grace_seconds=1) as cluster, AsyncClient(cluster.address) as client:
        [worker] = cluster.workers
        old = solo_greedy(first, PROMPT, OUTPUT)
        assert await answer(client) == (0, 0, old)
        assert await answer(client) == (5 * BLOCK, 5 * BLOCK, old)

        served.rename(tmp_path / "replaced")  # the worker may still read it
        shutil.copytree(second, served)
        [known] = (await client.fleet()).workers
        digest = models.find(str(served), tmp_path).model_digest
        async with open_channel(cluster.manager.address) as channel:
            another = WorkerStandIn(CacheManagerStub(channel), "another")
            with pytest.raises(InvalidRequest, match=f"{digest.hex()}, worker worker-0 serves merged with"):
                await another.register(replace(known.pool, model_digest=digest))

        await worker.kill()
        await cluster.restart(worker)
        new = solo_greedy(second, PROMPT, OUTPUT)
        assert new != old
        assert await answer(client) == (0, 0, new)
        assert await answer(client) == (5 * BLOCK, 5 * BLOCK, new)
