"""A public client of KServe's open inference protocol finds the server and its models.

It runs in a process of its own: its messages have the same full names as ours, and a process can know them once only.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gateway.tenancy import Tenancy
from tests.support.fake_fleet import FakeFleet, fake_fleet
from tests.support.gateway_service import gateway, words_pool
from tests.support.tenants import write_tenants

CLIENT = """
import json, sys
import grpc
from google.protobuf.json_format import MessageToDict
from open_inference.grpc import protocol, service

address, metadata, *calls = json.loads(sys.argv[1])
with grpc.insecure_channel(address) as channel:
    stub = service.GRPCInferenceServiceStub(channel)
    for method, fields in calls:
        try:
            request = getattr(protocol, f"{method}Request")(**fields)
            reply = getattr(stub, method)(request, metadata=metadata, timeout=20)
            print(json.dumps(MessageToDict(reply)))
        except grpc.RpcError as error:
            print(json.dumps(error.code().name))
"""


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        yield running


async def ask(
    address: str, *calls: tuple[str, dict[str, str]], metadata: list[tuple[str, str]] | None = None
) -> list[Any]:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, json.dumps([address, metadata or [], *calls]), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await client.communicate()
    assert client.returncode == 0
    return [json.loads(line) for line in said.splitlines()]


async def test_a_public_client_finds_the_server_and_its_models(fleet: FakeFleet, tmp_path: Path) -> None:
    await fleet.add("a", words_pool())
    async with gateway(fleet, tmp_path) as front:
        heard = await ask(
            front.address,
            ("ServerLive", {}),
            ("ServerReady", {}),
            ("ServerMetadata", {}),
            ("ModelReady", {"name": "words"}),
            ("ModelReady", {"name": "words", "version": "3"}),
            ("ModelReady", {"name": "other"}),
            ("ModelMetadata", {"name": "words"}),
            ("ModelMetadata", {"name": "other"}),
            ("ModelInfer", {"model_name": "words"}),
        )
    assert heard == [
        {"live": True},
        {"ready": True},
        {"name": "octavo", "version": version("octavo")},
        {"ready": True},
        {},  # false is a message's silence
        {},
        {"name": "words", "platform": "octavo"},
        "NOT_FOUND",
        "UNIMPLEMENTED",
    ]


async def test_without_workers_it_lives_and_no_model_is_ready(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path) as front:
        heard = await ask(front.address, ("ServerLive", {}), ("ServerReady", {}), ("ModelReady", {"name": "words"}))
    assert heard == [{"live": True}, {}, {}]


async def test_a_stranger_is_told_of_the_server_and_of_no_model(fleet: FakeFleet, tmp_path: Path) -> None:
    await fleet.add("a", words_pool())
    known = Tenancy(write_tenants(tmp_path / "tenants.toml", acme="the key"))
    calls = (("ServerReady", {}), ("ModelReady", {"name": "words"}), ("ModelMetadata", {"name": "words"}))
    async with gateway(fleet, tmp_path / "words", tenancy=known) as front:
        stranger = await ask(front.address, *calls)
        tenant = await ask(front.address, *calls, metadata=[("authorization", "Bearer the key")])
    assert stranger == [{"ready": True}, "UNAUTHENTICATED", "UNAUTHENTICATED"]
    assert tenant == [{"ready": True}, {"ready": True}, {"name": "words", "platform": "octavo"}]
