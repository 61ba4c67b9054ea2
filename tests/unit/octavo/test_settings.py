"""Environment -> settings: good values, and every bad one reported at once."""

import json
import os
import socket
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from cache_manager.settings import CacheManagerSettings
from gateway.settings import GatewaySettings
from octavo.settings import PREFIX, Address, Folder, Names, RedisAddress, ServiceSettings, read, split_address
from worker.settings import WorkerSettings


class Settings(ServiceSettings):
    """A service's."""

    peer: Address = Field(default="127.0.0.1:1", description="host:port of somebody")
    seats: int = Field(default=3, ge=1, description="how many")
    redis_url: RedisAddress = Field(default="redis://127.0.0.1", description="where the index lies")
    authors: Names = Field(default=("nobody",), description="who, separated by commas")
    shelf: Folder = Field(default=Path("~/books"), validate_default=True, description="where")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the caller, and no argument of pytest."""
    own = ("PEER", "SEATS", "REDIS_URL", "SHELF", "AUTHORS")
    for name in ("LISTEN", "ADVERTISE", "LOG_LEVEL", "GRACE_SECONDS", "FLEET_KEY", *own):
        monkeypatch.delenv(f"OCTAVO_{name}", raising=False)
    monkeypatch.setattr("sys.argv", ["service"])


def given(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OCTAVO_{name.upper()}", value)


def test_without_variables_the_defaults_hold() -> None:
    settings = read(Settings, "a service")
    assert (settings.listen, settings.seats, settings.log_level) == ("127.0.0.1:0", 3, "info")


def test_a_variable_sets_the_field_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, seats="7", peer="worker-1:8520")
    settings = read(Settings, "a service")
    assert (settings.seats, settings.peer) == (7, "worker-1:8520")


def test_names_are_separated_by_commas_and_none_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, authors="ann, bea,cid")
    assert read(Settings, "a service").authors == ("ann", "bea", "cid")
    given(monkeypatch, authors="ann,,cid")
    with pytest.raises(SystemExit):
        read(Settings, "a service")
    assert "OCTAVO_AUTHORS=ann,,cid: name 2 of 3 is empty" in capsys.readouterr().err


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose passes variables that nobody has set as empty ones."""
    given(monkeypatch, seats="", advertise="")
    settings = read(Settings, "a service")
    assert (settings.seats, settings.advertise) == (3, None)


def test_a_folder_of_the_user_is_found_below_their_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read(Settings, "a service").shelf == Path("/home/somebody/books")


def test_a_user_without_a_home_is_told_which_variable_needs_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container may run as a number that no user database knows."""
    given(monkeypatch, shelf="~nobody-of-this-name/books")
    with pytest.raises(SystemExit, match="2"):
        read(Settings, "a service")
    assert "OCTAVO_SHELF=~nobody-of-this-name/books: " in capsys.readouterr().err


def test_a_variable_of_another_service_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, kv_memory="256MiB")
    assert read(Settings, "a service").seats == 3


def test_every_bad_variable_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, seats="0", peer="nowhere", grace_seconds="soon")
    with pytest.raises(SystemExit) as exit_:
        read(Settings, "a service")
    assert exit_.value.code == 2
    lines = sorted(capsys.readouterr().err.splitlines())
    assert [line.split(": ")[0] for line in lines] == [
        "OCTAVO_GRACE_SECONDS=soon",
        "OCTAVO_PEER=nowhere",
        "OCTAVO_SEATS=0",
    ]
    assert "greater than or equal to 1" in lines[2]


def test_settings_are_shown_with_their_meaning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["service", "--print-settings"])
    given(monkeypatch, seats="5")
    with pytest.raises(SystemExit) as exit_:
        read(Settings, "a service")
    assert exit_.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["OCTAVO_SEATS"] == {"value": 5, "meaning": "how many"}
    assert all(entry["meaning"] for entry in shown.values())
    assert shown["OCTAVO_LOG_LEVEL"]["choices"] == ["debug", "info", "warning", "error"]


@pytest.mark.parametrize("service", [GatewaySettings, CacheManagerSettings, WorkerSettings, Settings])
def test_what_is_shown_is_what_a_variable_may_hold(
    service: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    defaults = read(service, "a service")
    monkeypatch.setattr("sys.argv", ["service", "--print-settings"])
    with pytest.raises(SystemExit):
        read(service, "a service")
    for variable, entry in json.loads(capsys.readouterr().out).items():
        if entry["value"] is not None:
            monkeypatch.setenv(variable, str(entry["value"]))

    monkeypatch.setattr("sys.argv", ["service"])
    assert read(service, "a service") == defaults


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read(Settings, "a service").seats = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535)), ("worker-1:8520", ("worker-1", 8520))],
)
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    ["", "host", "::1", "::1:80", "[]:80", "host:", ":1", "host:port", "host:-1", "host:65536", "host:1.5"],
)
def test_what_is_no_address_is_shown(address: str) -> None:
    with pytest.raises(ValueError, match="wanted host:port") as error:
        split_address(address)
    assert repr(address) in str(error.value)


def test_a_service_is_reached_where_it_listens() -> None:
    assert Settings(listen="127.0.0.1:0").advertised(4711) == "127.0.0.1:4711"
    assert Settings(listen="[::1]:0").advertised(4711) == "[::1]:4711"


def test_a_service_that_listens_everywhere_is_reached_at_its_host_s_address() -> None:
    host = socket.gethostbyname(socket.gethostname())
    assert Settings(listen="0.0.0.0:0").advertised(4711) == f"{host}:4711"
    assert Settings(listen="[::]:0").advertised(4711) == f"{host}:4711"


def test_a_size_that_is_none_is_told_with_one_that_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["service"])
    given(monkeypatch, kv_memory="lots", draft_memory="5 barrels")
    with pytest.raises(SystemExit):
        read(WorkerSettings, "a service")
    reason = "wanted a number of bytes, as 512MiB or 2GiB"
    assert capsys.readouterr().err.splitlines() == [
        f"OCTAVO_KV_MEMORY=lots: {reason}",
        f"OCTAVO_DRAFT_MEMORY=5 barrels: {reason}",
    ]


def test_a_service_is_reached_where_it_says() -> None:
    assert Settings(advertise="worker-1:8520").advertised(4711) == "worker-1:8520"


def test_a_password_in_a_url_is_neither_printed_with_the_settings_nor_with_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, redis_url="redis://me:secret@there/main")
    with pytest.raises(SystemExit):
        read(Settings, "a service")
    refused = capsys.readouterr().err
    assert "OCTAVO_REDIS_URL=redis://***@there/main: " in refused

    given(monkeypatch, redis_url="redis://me:secret@there/1")
    monkeypatch.setattr("sys.argv", ["service", "--print-settings"])
    with pytest.raises(SystemExit):
        read(Settings, "a service")
    shown = json.loads(capsys.readouterr().out)
    assert shown["OCTAVO_REDIS_URL"]["value"] == "redis://***@there/1"
    assert "secret" not in refused + json.dumps(shown)


def test_a_secret_is_not_shown_by_a_problem_of_several_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strict(Settings):
        """One that does not like some settings together."""

        @model_validator(mode="after")
        def _judge(self) -> "Strict":
            raise ValueError("seats and shelf do not go together")

    given(monkeypatch, fleet_key="open sesame")
    with pytest.raises(SystemExit):
        read(Strict, "a service")
    assert capsys.readouterr().err == "seats and shelf do not go together\n"
