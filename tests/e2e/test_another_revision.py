"""Other weights or other words under a name that is known: nothing that the old ones computed is taken for theirs."""

import json
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.local import Cluster
from deploy.process import Process
from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from octavo import models
from tests.support.adapters import save_adapter
from tests.support.cluster import BLOCK
from tests.support.oracle import solo_greedy
from tests.support.tiny_model import save_tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = tuple(range(10, 10 + 5 * BLOCK + 3))
FULL = 5 * BLOCK
OUTPUT = 8
PATIENCE_SECONDS = 120.0


@asynccontextmanager
async def serving(*models: str) -> AsyncGenerator[tuple[Cluster, AsyncClient]]:
    """A cluster with a worker for each of the models, no two processes with the same seed for hashes."""
    settings = {"MODEL": ",".join(models), "DTYPE": "float32", "DEVICE": "cpu", "THREADS": "1", "KV_MEMORY": "4MiB"}
    env = {f"OCTAVO_{name}": value for name, value in (settings | {"LOOKUP_SECONDS": "1"}).items()}
    cluster = Cluster(workers=len(models), env=env, grace_seconds=1)
    for seed, process in enumerate(cluster.processes):
        process.env["PYTHONHASHSEED"] = str(seed)
    async with cluster, AsyncClient(cluster.address) as client:
        yield cluster, client


async def answer(client: AsyncClient, model: str) -> tuple[int, int, list[int]]:
    """What was foretold to be there, what was there, and what was said."""
    request = Generation(model=model, prompt=TokenPrompt(PROMPT), max_tokens=OUTPUT, ignore_eos=True)
    told = await client.complete(request, timeout_seconds=PATIENCE_SECONDS)
    return told.usage.predicted_cached_tokens, told.usage.cached_tokens, list(told.samples[0].token_ids)


async def refusal_of_another_worker(beside: Process, model: str) -> str:
    """Start one more worker, with everything else as `beside` has it: it ends, and its last words are returned."""
    env = {**beside.env, "OCTAVO_WORKER_ID": "another", "OCTAVO_MODEL": model, "PYTHONHASHSEED": "99"}
    another = Process("another", lambda _: [sys.executable, "-P", "-m", "worker"], env=env, served_port=lambda _: None)
    await another.start()
    try:
        assert await another.exited() == 1
    finally:
        await another.kill()
    [last_words] = another.events("cannot_serve")
    return last_words["reason"]


async def test_an_adapter_that_is_loaded_anew_under_its_name_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    """S8: beside a worker of the base model, which shares nothing with either version, and goes on."""
    base = save_tiny_llama(tmp_path / "base")
    first, second = (save_adapter(tmp_path / f"v{seed}", base, seed, size=0.2) for seed in (1, 2))
    texts = [solo_greedy(base, PROMPT, OUTPUT, adapter=adapter) for adapter in (None, first, second)]
    assert len(set(map(tuple, texts))) == 3
    plain, old, new = texts
    async with serving(str(base), f"a={base}+{first}") as (cluster, client):
        assert await answer(client, "a") == (0, 0, old)
        assert await answer(client, "a") == (FULL, FULL, old)
        assert await answer(client, "base") == (0, 0, plain)

        of_a = cluster.workers[1]
        await of_a.kill()
        of_a.env["OCTAVO_MODEL"] = f"a={base}+{second}"
        await cluster.restart(of_a)
        assert await answer(client, "a") == (0, 0, new)
        assert await answer(client, "a") == (FULL, FULL, new)
        assert await answer(client, "base") == (FULL, FULL, plain)


async def test_a_second_worker_with_another_tokenizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    """S12: it ends with it. What is foretold is found, though worker, manager and gateway have seeds of their own."""
    model = save_tiny_llama(tmp_path / "tiny")
    revised = shutil.copytree(model, tmp_path / "revised" / "tiny")
    words = json.loads((revised / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (revised / "tokenizer.json").write_text(json.dumps(words))
    text = solo_greedy(model, PROMPT, OUTPUT)
    async with serving(str(model)) as (cluster, client):
        assert await answer(client, "tiny") == (0, 0, text)
        reason = await refusal_of_another_worker(cluster.workers[0], str(revised))
        here, there = (models.find(str(folder), tmp_path).tokenizer_digest.hex() for folder in (revised, model))
        assert reason == f"pool.tokenizer_digest: {here}, worker worker-0 serves tiny with {there}"
        assert await answer(client, "tiny") == (FULL, FULL, text)
