"""Environment -> one frozen settings object per service, with every bad variable reported at once.

A service reads its settings once, in its `__main__`, and passes them down as plain arguments. Field `kv_memory` is
variable `OCTAVO_KV_MEMORY`; lists in the environment are comma-separated where a field says so.
"""

import argparse
import json
import os
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from octavo.redis_url import parse_redis_url, without_secrets
from octavo.transport import Transport, read_transport

PREFIX = "OCTAVO_"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; the host of "[::1]:80" is "::1". Raises ValueError that shows what was given."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"wanted host:port with a port in [0, 65535], got {address!r}")
    if bare == host and ":" in host:
        raise ValueError(f"wanted host:port with a host of IPv6 in brackets, as [::1]:{port}, got {address!r}")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """The address of these two: what has colons itself stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this very machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(address: str) -> str:
    split_address(address)
    return address


def _expanded(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError as error:  # neither HOME nor an entry of the user database
        raise ValueError(f"wanted a folder without ~ where the user has no home: {error}") from error


Folder = Annotated[Path, AfterValidator(_expanded)]
"""A path; ~ stands for the user's home."""

Address = Annotated[str, AfterValidator(_checked)]
"""host:port; port 0 takes a free one where a service listens."""


def _split(addresses: object) -> object:
    """The addresses of a comma-separated list."""
    if not isinstance(addresses, str):
        return addresses
    split = tuple(address.strip() for address in addresses.split(","))
    for address in split:
        split_address(address)
    return split


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""host:port,host:port: at least one."""


def _split_names(names: object) -> object:
    """The names of a comma-separated list."""
    if not isinstance(names, str):
        return names
    split = tuple(name.strip() for name in names.split(","))
    if not all(split):
        raise ValueError(f"name {split.index('') + 1} of {len(split)} is empty")
    return split


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
"""name,name: at least one."""


def _checked_redis_url(url: str) -> str:
    parse_redis_url(url)
    return url


RedisAddress = Annotated[str, AfterValidator(_checked_redis_url)]
"""A URL of octavo.redis_url."""

REDIS_FORMS = (
    "redis://[user:password@]host:port/database, redis+sentinel://host:port,host:port/service, "
    "redis+cluster://host:port,host:port, rediss in place of redis for TLS; unix:///path/to/socket"
)
"""The same in a setting's description."""


class Settings(BaseSettings):
    """Read from the environment, whoever reads it."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)


class ModelsSettings(Settings):
    """What every process that wants a model is told; see octavo.models."""

    models_dir: Folder = Field(
        default=Path("~/.cache/octavo/models"), validate_default=True, description="folder that holds fetched models"
    )


class TransportSettings(Settings):
    """What every process that calls another one is told; see octavo.transport."""

    tls_cert: Folder | None = Field(
        default=None, description="PEM file of this process's certificate; with it a service is served over TLS"
    )
    tls_key: Folder | None = Field(default=None, description="PEM file of the certificate's private key")
    tls_ca: Folder | None = Field(
        default=None,
        description="PEM file of the authorities that are believed; with it others are called over TLS, and cache "
        "managers and workers are called with a certificate of these only",
    )
    tls_peer_name: str = Field(
        default="", description="the name in the certificates of all services; unset: the host that is called"
    )
    fleet_key: SecretStr = Field(
        default=SecretStr(""), description="what the processes of a fleet show one another; unset: nothing"
    )

    def transport(self) -> Transport:
        """The files, read. Raises ValueError, which names the variable."""
        return read_transport(
            self.tls_cert, self.tls_key, self.tls_ca, self.tls_peer_name, self.fleet_key.get_secret_value()
        )


class ServiceSettings(TransportSettings):
    """What every service is told."""

    listen: Address = Field(default="127.0.0.1:0", description="host:port to serve on; port 0 takes a free one")
    advertise: Address | None = Field(
        default=None, description="host:port that others reach this service at; unset: derived from `listen`"
    )
    metrics_listen: Address | None = Field(
        default=None,
        description="host:port to answer Prometheus on, at /metrics, and health checks, at /health; unset: nowhere; "
        "port 0: a free one",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")
    grace_seconds: float = Field(
        default=10.0, ge=0, description="after SIGTERM, seconds until the process ends; requests may take most of them"
    )

    def advertised(self, port: int) -> str:
        """The address to give to others, once the service listens on `port`."""
        if self.advertise is not None:
            return self.advertise
        host, _ = split_address(self.listen)
        everywhere = host in ("0.0.0.0", "::")
        return join_address(socket.gethostbyname(socket.gethostname()) if everywhere else host, port)


_REASONS: dict[str, str] = dict.fromkeys(("byte_size", "byte_size_unit"), "wanted a number of bytes, as 512MiB or 2GiB")
"""Where the library's own words say nothing of what would do."""

S = TypeVar("S", bound=ServiceSettings)


def read(settings: type[S], description: str) -> S:
    """The service's settings out of the environment.

    With `--print-settings` on the command line, prints them with their meaning and exits 0. Exits 2 with one line per
    bad variable: its name, what it holds, and why that will not do. Passwords in URLs are not shown.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {settings.__module__.partition('.')[0]}", description=description)
    parser.add_argument("--print-settings", action="store_true", help="show the settings in force and exit")
    wanted = parser.parse_args().print_settings
    try:
        values = settings()
    except ValidationError as error:
        for problem in error.errors():
            reason = _REASONS.get(problem["type"], problem["msg"].removeprefix("Value error, "))
            print(f"{_named(settings, problem['loc'])}{reason}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    if wanted:
        print(json.dumps(_described(values), indent=2, default=str))  # noqa: T201
        sys.exit(0)
    return values


def _named(settings: type[ServiceSettings], place: tuple[int | str, ...]) -> str:
    """The variable at fault and what it holds, unless that is a secret; nothing where several do not go together."""
    if not place:
        return ""
    variable = PREFIX + str(place[0]).upper()
    field = settings.model_fields.get(str(place[0]))
    secret = field is not None and field.annotation is SecretStr
    return f"{variable}: " if secret else f"{variable}={without_secrets(os.environ.get(variable, ''))}: "


def _described(values: ServiceSettings) -> dict[str, dict[str, object]]:
    return {
        PREFIX + name.upper(): {"value": _shown(getattr(values, name)), **_choices(field), "meaning": field.description}
        for name, field in type(values).model_fields.items()
    }


def _choices(field: FieldInfo) -> dict[str, object]:
    """All that a setting can be, where that is a list of words."""
    return {"choices": get_args(field.annotation)} if get_origin(field.annotation) is Literal else {}


def _shown(value: object) -> object:
    """As a variable may hold it again, but for secrets: lists with commas."""
    if isinstance(value, tuple):
        value = ",".join(map(str, cast("tuple[object, ...]", value)))
    return without_secrets(value) if isinstance(value, str) else value
