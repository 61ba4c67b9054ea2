"""A whole fleet over TLS, each process with a certificate of its own fleet's authority and with the fleet's key."""

import asyncio
import ssl
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from deploy.local import Cluster
from gateway.client import AsyncClient
from gateway.core.request import Generation, TokenPrompt
from octavo.commands.model import fetch_model
from octavo.errors import Unauthenticated
from octavo.service import open_channel
from octavo.status import translated
from octavo.transport import read_transport
from octavo.v1 import cache_manager_pb2, cache_manager_pb2_grpc, worker_pb2_grpc
from tests.support.certificates import Authority
from tests.support.cluster import greedy, prose

pytestmark = [pytest.mark.cluster, pytest.mark.model]

KEY = "the key of this fleet"


async def test_a_fleet_is_served_over_tls_and_lets_nobody_else_in(tmp_path: Path) -> None:
    """The client's text is right, over gRPC and HTTP; a stranger who got at a certificate still lacks the key."""
    fetch_model("smollm2")
    authority = Authority(tmp_path)
    env = {"OCTAVO_MODEL": "smollm2", "OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1", "OCTAVO_FLEET_KEY": KEY}
    env |= {"OCTAVO_HTTP_LISTEN": "127.0.0.1:0", **authority.variables("fleet")}
    ports: list[int] = []

    def note_http_port(name: str, line: str) -> None:
        if '"http_served"' in line:
            ports.append(int(line.partition('"port": ')[2].partition("}")[0].partition(",")[0]))

    believing = read_transport(None, None, authority.file)
    stranger = authority.issue("stranger")
    keyless = read_transport(stranger.certificate, stranger.key, authority.file)
    async with Cluster(workers=1, env=env, grace_seconds=2, on_line=note_http_port) as cluster:
        prompt = prose(0, 40)
        async with AsyncClient(cluster.address, transport=believing) as client:
            request = Generation(prompt=TokenPrompt(tuple(prompt)), max_tokens=4)
            answer = await client.complete(request, timeout_seconds=60)
        assert list(answer.samples[0].token_ids) == greedy(prompt, 4)

        context = ssl.create_default_context(cafile=str(authority.file))
        health = f"https://127.0.0.1:{ports[0]}/health"
        with await asyncio.to_thread(urlopen, health, timeout=10, context=context) as reply:
            assert reply.status == 200

        async with AsyncClient(cluster.address) as in_clear:
            with pytest.raises(ConnectionError):
                await in_clear.complete("hello", timeout_seconds=10)
        async with open_channel(cluster.manager.address, keyless) as channel:
            manager = cache_manager_pb2_grpc.CacheManagerStub(channel)
            with pytest.raises(Unauthenticated), translated():
                await manager.ResetPrefixCache(cache_manager_pb2.ResetPrefixCacheRequest(), timeout=10)
        async with open_channel(cluster.workers[0].address, keyless) as channel:
            with pytest.raises(Unauthenticated), translated():
                await worker_pb2_grpc.WorkerStub(channel).Serve(timeout=10).read()
        async with open_channel(cluster.workers[0].address, believing) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await worker_pb2_grpc.WorkerStub(channel).Serve(timeout=10).read()
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
