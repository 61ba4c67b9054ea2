"""`python -m gateway`: a real process with a real Redis, in front of a fake fleet."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deploy.process import LOOPBACK, Process, StartFailed
from gateway.client import AsyncClient
from gateway.core.events import Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TokenPrompt
from octavo.errors import Unauthenticated
from octavo.hashing import block_hashes
from octavo.ids import Epoch
from octavo.index_schema import WHOLE_MARK, index_key, index_member
from octavo.records.generate import IndexState
from octavo.service import open_channel, probe
from octavo.v1 import gateway_pb2 as gateway_v1
from octavo.v1 import gateway_pb2_grpc as gateway_v1_grpc
from tests.support import words
from tests.support.fake_fleet import PATIENCE_SECONDS, FakeFleet, FakeWorker, fake_fleet
from tests.support.gateway_process import gateway_process, index_state, load_of, scrape_of, until_exact, until_ready
from tests.support.gateway_service import words_pool
from tests.support.redis_server import RedisServer, redis_server
from tests.support.tenants import write_tenants

pytestmark = pytest.mark.redis


async def until_workers(process: Process, epochs: dict[str, int]) -> None:
    """Return when the gateway knows these workers in these epochs, and no others."""
    async with open_channel(process.address) as channel, asyncio.timeout(PATIENCE_SECONDS):
        stub = gateway_v1_grpc.InferenceStub(channel)
        known: dict[str, int] = {}
        while known != epochs:
            reply = await stub.GetFleet(gateway_v1.GetFleetRequest(), timeout=10)
            known = {worker.worker_id: worker.epoch for worker in reply.workers}


@asynccontextmanager
async def everything(folder: Path, **more: str) -> AsyncGenerator[tuple[FakeFleet, RedisServer, Process, AsyncClient]]:
    async with redis_server() as redis, fake_fleet() as fleet:
        model = words.save_model(folder / "words")
        digest = sha256((model / "tokenizer.json").read_bytes()).digest()
        for name in "ab":
            await fleet.add(name, words_pool(tokenizer_digest=digest))
        async with (
            gateway_process(
                fleet.manager.address, redis.url, model, OCTAVO_METRICS_LISTEN=f"{LOOPBACK}:0", **more
            ) as process,
            AsyncClient(process.address) as client,
        ):
            await until_ready(process)
            yield fleet, redis, process, client


async def test_health_and_reflection_tell_of_both_services(tmp_path: Path) -> None:
    names = ("octavo.v1.Inference", "inference.GRPCInferenceService")
    async with everything(tmp_path) as (_, _, process, _), open_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        told = [await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10) for name in names]
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=10)
        services = {service.name for service in (await listed.read()).list_services_response.service}

    assert [reply.status for reply in told] == [health_pb2.HealthCheckResponse.SERVING] * 2
    assert services >= {*names}


async def test_it_reads_its_environment_serves_and_follows_the_index_in_redis(tmp_path: Path) -> None:
    """S43, the gateway's part: hits while Redis is there, answers without them while it is not."""
    async with everything(tmp_path) as (fleet, redis, process, client):
        prompt = tuple(range(5, 70))
        holder = fleet.workers[1].info
        hashes = block_hashes(holder.pool.chain_root().hash(), prompt, holder.pool.block_size)
        await redis.client.sadd(index_key(holder.worker_id, holder.epoch), WHOLE_MARK, *map(index_member, hashes))
        other = fleet.workers[0].info
        await redis.client.sadd(index_key(other.worker_id, other.epoch), WHOLE_MARK)
        request = Generation(prompt=TokenPrompt(prompt), max_tokens=3)

        async with aclosing(client.generate(request)) as events:
            started = await anext(events)
        chat = await client.complete(Generation(prompt=ChatPrompt((ChatMessage("user", "本?"),)), max_tokens=2))
        await redis.stop()
        async with aclosing(client.generate(request)) as events:
            without = [event async for event in events]
        told_without = (await load_of(process)).index_state
        scraped_without = await scrape_of(process)
        await redis.start()
        for info in (holder, other):
            await redis.client.sadd(index_key(info.worker_id, info.epoch), WHOLE_MARK)
        await until_exact(process)
        scraped = await scrape_of(process)

        assert isinstance(started, Started)
        assert (started.worker_id, started.predicted_cached_tokens) == (holder.worker_id, 64)
        assert started.index_state is IndexState.EXACT
        assert chat.usage.output_tokens == 2
        assert isinstance(without[0], Started)
        assert without[0].index_state is IndexState.FALLBACK
        assert isinstance(without[-1], Usage)
        assert without[-1].output_tokens == 3
        assert told_without == gateway_v1.INDEX_STATE_FALLBACK
        assert (index_state(scraped_without), index_state(scraped)) == ("fallback", "exact")
        assert scraped["octavo_requests_total",] == 3
        assert scraped["octavo_failed_lookups_total",] >= 1
        assert scraped["octavo_time_to_first_token_seconds_count",] >= 2
        told = [event["state"] for event in process.events("prefix_index_state")]
        assert (told[:2], told[-1]) == (["exact", "fallback"], "exact")


async def test_a_frozen_redis_fails_no_request_and_is_asked_no_more_than_three_times(tmp_path: Path) -> None:
    """S47, the gateway's part: paused, without a reset. It is told in each reply, and heals by itself."""
    async with everything(tmp_path, OCTAVO_LOOKUP_SECONDS="0.05") as (fleet, redis, process, client):
        for info in (worker.info for worker in fleet.workers):
            await redis.client.sadd(index_key(info.worker_id, info.epoch), WHOLE_MARK)
        await until_exact(process)
        failed = (await load_of(process)).failed_lookups
        redis.process.freeze()
        try:
            for _ in range(6):
                request = Generation(prompt=TokenPrompt(tuple(range(5, 70))), max_tokens=3)
                async with aclosing(client.generate(request)) as events:
                    started, *_, usage = [event async for event in events]
                assert isinstance(started, Started)
                assert started.index_state is IndexState.FALLBACK
                assert isinstance(usage, Usage)
                assert usage.output_tokens == 3
            told = await load_of(process)
        finally:
            redis.process.thaw()
        await until_exact(process)

        assert told.index_state == gateway_v1.INDEX_STATE_FALLBACK
        assert 1 <= told.failed_lookups - failed <= 3


async def test_it_is_ready_only_once_it_knows_the_fleet(tmp_path: Path) -> None:
    async with redis_server() as redis, fake_fleet() as fleet:
        await fleet.manager.stop()
        async with gateway_process(fleet.manager.address, redis.url, words.save_model(tmp_path)) as process:
            assert not await asyncio.to_thread(probe, process.address)
            await fleet.manager.restart()
            await until_ready(process)


async def test_it_watches_every_cache_manager_and_goes_by_whoever_knows_a_worker_best(tmp_path: Path) -> None:
    """Each of two managers has a worker. One of them leaves, its worker goes over to the other, and it comes back."""
    async with redis_server() as redis, fake_fleet() as one, fake_fleet() as other:
        model = words.save_model(tmp_path / "words")
        spec = words_pool(tokenizer_digest=sha256((model / "tokenizer.json").read_bytes()).digest())
        a, b = await one.add("a", spec), await other.add("b", spec)
        prompts = {"a": tuple(range(5, 70)), "b": tuple(range(100, 165))}

        async def publish(worker: FakeWorker) -> None:
            hashes = block_hashes(spec.chain_root().hash(), prompts[worker.info.worker_id], spec.block_size)
            key = index_key(worker.info.worker_id, worker.info.epoch)
            await redis.client.sadd(key, WHOLE_MARK, *map(index_member, hashes))

        managers = f"{one.manager.address},{other.manager.address}"
        async with (
            gateway_process(managers, redis.url, model) as process,
            AsyncClient(process.address) as client,
        ):

            async def holder_of(prompt: tuple[int, ...]) -> tuple[str, int, IndexState]:
                async with aclosing(client.generate(Generation(prompt=TokenPrompt(prompt), max_tokens=1))) as events:
                    (started, *_) = [event async for event in events]
                assert isinstance(started, Started)
                return started.worker_id, started.predicted_cached_tokens, started.index_state

            for worker in (a, b):
                await publish(worker)
            await until_workers(process, {"a": 1, "b": 1})
            for name, prompt in prompts.items():
                assert await holder_of(prompt) == (name, 64, IndexState.EXACT)

            await one.manager.stop()
            assert await holder_of(prompts["a"]) == ("a", 64, IndexState.EXACT)
            a.info = replace(a.info, epoch=Epoch(2))
            await publish(a)
            other.manager.tell(a.info)
            await until_workers(process, {"a": 2, "b": 1})
            assert await holder_of(prompts["a"]) == ("a", 64, IndexState.EXACT)

            await one.manager.restart()  # and still believes in epoch 1
            await one.manager.news.until(lambda: one.manager.watchers == 1)
            await one.add("c", spec)
            await until_workers(process, {"a": 2, "b": 1, "c": 1})


async def test_asked_to_stop_it_finishes_what_runs_and_leaves(tmp_path: Path) -> None:
    """S57, the gateway's part."""
    async with everything(tmp_path) as (fleet, _, process, client):
        for worker in fleet.workers:
            worker.gate.clear()
        events = client.generate(Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=3))
        await anext(events)
        os.kill(process.pid, signal.SIGTERM)
        await until_ready(process, wanted=False)
        for worker in fleet.workers:
            worker.gate.set()

        *_, last = [event async for event in events]

        assert isinstance(last, Usage)
        assert await process.exited() == 0
        for worker in fleet.workers:
            await worker.until(lambda worker: worker.streams == 0 and not worker.running)
            assert worker.cancelled == []


async def test_killed_it_leaves_no_request_at_a_worker(tmp_path: Path) -> None:
    """A gateway that is gone has cancelled everything."""
    async with everything(tmp_path) as (fleet, _, process, client):
        events = client.generate(Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=900))
        await anext(events)
        await process.kill()

        for worker in fleet.workers:
            await worker.until(lambda worker: worker.streams == 0 and not worker.running)
        with pytest.raises(ConnectionError):
            async for _ in events:
                pass


async def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    async with fake_fleet() as fleet:
        with pytest.raises(StartFailed, match=r"cannot_serve.*is neither"):
            async with gateway_process(fleet.manager.address, f"redis://{LOOPBACK}:9/0", tmp_path / "nowhere"):
                pass


async def test_two_models_of_one_name_are_refused_with_the_way_to_tell_them_apart(tmp_path: Path) -> None:
    first, second = (words.save_model(tmp_path / folder / "words") for folder in "ab")
    async with fake_fleet() as fleet:
        why = "model: 2 of 2 are called words, wanted 1; NAME= before one of them calls it NAME"
        with pytest.raises(StartFailed, match=why):
            async with gateway_process(
                fleet.manager.address, f"redis://{LOOPBACK}:9/0", first, OCTAVO_MODEL=f"{first},{second}"
            ):
                pass


async def test_it_follows_its_tenants_file_and_shows_no_secret(tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.toml", acme="first key")
    settings = {"OCTAVO_TENANTS_FILE": str(file), "OCTAVO_SALT_SECRET": "hush"}
    async with redis_server() as redis, fake_fleet() as fleet:
        model = words.save_model(tmp_path / "words")
        digest = sha256((model / "tokenizer.json").read_bytes()).digest()
        await fleet.add("a", words_pool(tokenizer_digest=digest))
        async with gateway_process(fleet.manager.address, redis.url, model, **settings) as process:
            await until_ready(process)
            async with AsyncClient(process.address, api_key="first key") as client:
                await client.complete(Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=1))
            with pytest.raises(Unauthenticated):
                await load_of(process)
            write_tenants(file, acme="second key")
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not process.events("tenants_read"):  # noqa: ASYNC110  the event is in another process
                    await asyncio.sleep(0.05)
            async with AsyncClient(process.address, api_key="second key") as client:
                await client.complete(Generation(prompt=TokenPrompt((5, 6, 7)), max_tokens=1))
        assert not [line for line in process.lines if "hush" in line or "first key" in line]

        file.write_text("tenants = 1", encoding="utf-8")
        with pytest.raises(StartFailed, match=r"cannot_serve.*tenants: int, wanted a table"):
            async with gateway_process(fleet.manager.address, redis.url, model, **settings):
                pass


async def test_over_http_readiness_falls_first_and_what_streams_goes_on_to_its_end(tmp_path: Path) -> None:
    http_settings = {"OCTAVO_HTTP_LISTEN": f"{LOOPBACK}:0", "OCTAVO_GRACE_SECONDS": "30"}
    async with everything(tmp_path, **http_settings) as (fleet, _, process, _):
        url = f"http://{LOOPBACK}:{process.events('http_served')[0]['port']}"
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as http:
            ready = await http.get("/health")
            for worker in fleet.workers:
                worker.gate.clear()
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True, "return_token_ids": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                os.kill(process.pid, signal.SIGTERM)
                await until_ready(process, wanted=False)
                draining = await http.get("/health")
                refused = await http.post("/v1/completions", json={"prompt": [5]})
                for worker in fleet.workers:
                    worker.gate.set()
                rest = [line async for line in lines if line]
        code = await asyncio.wait_for(process.exited(), PATIENCE_SECONDS)

    assert (ready.status_code, draining.status_code, refused.status_code) == (200, 503, 503)
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert rest[-1] == "data: [DONE]"
    assert sum(len(json.loads(line[6:])["choices"][0].get("token_ids", ())) for line in rest[:-1]) == 4
    assert code == 0
