"""Who may ask, and whose blocks they find, through a real gateway and workers that answer a prompt with the prompt."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest

from gateway.client import AsyncClient, Client
from gateway.core.request import Generation, TokenPrompt
from gateway.tenancy import Tenancy
from octavo.errors import Unauthenticated
from octavo.tenants import Tenant, credentials
from octavo.v1 import gateway_pb2 as v1
from tests.support.fake_fleet import FakeFleet, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.tenants import write_tenants

BLOCK = 16
PROMPT = TokenPrompt(tuple(range(5, 5 + 4 * BLOCK)))
X, Y = "the key of x", "the key of y"


@pytest.fixture
def tenancy(tmp_path: Path) -> Tenancy:
    return Tenancy(write_tenants(tmp_path / "tenants.toml", x=X, y=Y), "a secret")


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        await running.add("a", words_pool())
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tenancy: Tenancy, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path / "words", tenancy=tenancy) as running:
        yield running


async def cached(front: Gateway, api_key: str | None, cache_salt: str = "") -> int:
    async with AsyncClient(front.address, api_key=api_key) as client:
        answer = await client.complete(Generation(prompt=PROMPT, max_tokens=1, cache_salt=cache_salt))
        return answer.usage.cached_tokens


async def test_a_tenant_finds_its_own_prompts_and_nobody_elses(front: Gateway, fleet: FakeFleet) -> None:
    """S51: the same prefix, and another tenant's salt on top."""
    asked = [(X, ""), (X, ""), (Y, ""), (Y, ""), (X, "x's own"), (X, "x's own"), (Y, "x's own")]
    assert [await cached(front, *one) for one in asked] == [0, 48, 0, 48, 0, 48, 0]

    sent = [submission for worker in fleet.workers for submission in worker.submissions]
    assert {len(submission.scope.salt) for submission in sent} == {32}
    assert len({submission.scope.salt for submission in sent}) == 4
    assert {submission.tenant for submission in sent} == {Tenant(name="x").tag, Tenant(name="y").tag}


@pytest.mark.parametrize("api_key", [None, "", "the key of nobody"])
async def test_who_shows_no_known_key_gets_nothing(front: Gateway, fleet: FakeFleet, api_key: str | None) -> None:
    with pytest.raises(Unauthenticated, match=r"^authorization: "):
        await cached(front, api_key)
    for method, request in (
        (front.stub.ListModels, v1.ListModelsRequest()),
        (front.stub.GetFleet, v1.GetFleetRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request, metadata=credentials(api_key), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert [worker.submissions for worker in fleet.workers] == [[]]
    assert front.at_rest()


async def test_a_client_without_asyncio_shows_its_key_as_well(front: Gateway) -> None:
    def ask() -> str:
        with Client(front.address, api_key=X) as client:
            return client.complete(Generation(prompt=PROMPT, max_tokens=1)).text

    assert await asyncio.to_thread(ask)


async def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(
    front: Gateway, tenancy: Tenancy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "octavo.gateway")
    file = tmp_path / "tenants.toml"
    await cached(front, X)

    write_tenants(file, x="a new key of x")
    tenancy.look()
    with pytest.raises(Unauthenticated):
        await cached(front, X)
    with pytest.raises(Unauthenticated):
        await cached(front, Y)
    assert await cached(front, "a new key of x") == 48, "a tenant keeps its blocks when its key is exchanged"

    for content in ("[tenants", None):
        file.unlink() if content is None else file.write_text(content, encoding="utf-8")
        tenancy.look()
        tenancy.look()
        assert await cached(front, "a new key of x") == 48
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tenants_")]
    assert told == ["tenants_read", "tenants_kept", "tenants_kept"]


async def test_without_a_file_anybody_may_ask_and_a_secret_still_goes_into_every_salt(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    async with gateway(fleet, tmp_path / "words", tenancy=Tenancy(None, "a secret")) as front:
        assert [await cached(front, None), await cached(front, "any key")] == [0, 48]
    [worker] = fleet.workers
    assert {(len(sent.scope.salt), sent.tenant) for sent in worker.submissions} == {(32, b"")}


async def test_what_a_client_asks_to_retain_reaches_the_worker(front: Gateway, fleet: FakeFleet) -> None:
    async with AsyncClient(front.address, api_key=X) as client:
        await client.complete(Generation(prompt=PROMPT, max_tokens=1, retain_seconds=60))
    ((sent,),) = (worker.submissions for worker in fleet.workers)
    assert (sent.tenant, sent.retain_seconds) == (Tenant(name="x").tag, 60)
