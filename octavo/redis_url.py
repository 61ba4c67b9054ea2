"""Where the prefix index lies, as one URL.

    redis://[[user]:password@]host[:port][/database]
    redis+sentinel://[[user]:password@]host[:port],host[:port],.../service[/database]
    redis+cluster://[[user]:password@]host[:port],host[:port],...
    unix:///path/to/socket

`rediss` in place of `redis` is the same over TLS, to sentinels as well. Options follow as `?name=value&name=value` (see
OPTIONS). Characters that mean something in a URL are percent-encoded in user and password.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qsl, unquote, urlsplit

TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Paths of files in PEM form: who is trusted (default: whom the system trusts), and what we show of ourselves."""

SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password", "sentinel_tls")
"""Sentinels have a user and a password of their own, or none; TLS where the servers have it, unless told yes or no."""

OPTIONS = (*TLS_OPTIONS, *SENTINEL_OPTIONS)
"""What a URL may say besides."""

_DEFAULT_PORTS = {"standalone": 6379, "sentinel": 26379, "cluster": 6379}


class Topology(Enum):
    """How the servers stand to one another."""

    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A URL, taken apart."""

    topology: Topology
    hosts: tuple[tuple[str, int], ...]
    """The server; the sentinels; or some nodes of the cluster, which name the others. Empty for a socket's path."""
    tls: bool = False
    """To the servers."""
    sentinel_tls: bool = False
    socket_path: str | None = None
    service: str = ""
    """What the sentinels call the group of servers."""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    options: dict[str, str] = field(default_factory=dict[str, str], repr=False)


def parse_redis_url(url: str) -> RedisUrl:
    """Take a URL apart. Raises ValueError that says what was wanted; a password is never part of it."""
    scheme, _, _ = url.partition("://")
    if scheme == "unix":
        path = urlsplit(url).path
        if not path:
            raise ValueError("wanted unix:///path/to/socket, got no path")
        return RedisUrl(topology=Topology.STANDALONE, hosts=(), socket_path=path)
    family, _, kind = scheme.partition("+")
    topology = {"": Topology.STANDALONE, "sentinel": Topology.SENTINEL, "cluster": Topology.CLUSTER}.get(kind)
    if family not in ("redis", "rediss") or topology is None:
        raise ValueError("wanted a URL of redis, redis+sentinel, redis+cluster (rediss for TLS) or unix")
    parts = urlsplit(url)
    if "@" in parts.path + parts.query + parts.fragment:  # checked first: what follows shows what it does not like
        raise ValueError("a user or password with one of / ? # @ : in it is to be percent-encoded")
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    service, database = _path(parts.path, topology)
    tls, options = family == "rediss", _options(parts.query, topology)
    sentinel_tls = topology is Topology.SENTINEL and _yes("sentinel_tls", options.pop("sentinel_tls", None), tls)
    _check_tls_options(options, tls or sentinel_tls)
    return RedisUrl(
        topology=topology,
        hosts=tuple(_host(each, _DEFAULT_PORTS[topology.value]) for each in _hosts(hosts, topology)),
        tls=tls,
        sentinel_tls=sentinel_tls,
        service=service,
        database=database,
        username=unquote(user) or None,
        password=unquote(password) or None,
        options=options,
    )


def without_secrets(text: str) -> str:
    """The text with what may be a password in a URL masked, fit to be shown."""
    return re.sub(r"(?<=password=)[^&\s]*", "***", re.sub(r"://\S*@", "://***@", text))


def _hosts(netloc: str, topology: Topology) -> list[str]:
    hosts = netloc.split(",")
    if topology is Topology.STANDALONE and len(hosts) > 1:
        raise ValueError(f"wanted one host, got {len(hosts)}; several are redis+sentinel:// or redis+cluster://")
    return hosts


def _host(text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:]+)(?::(\d{1,5}))?", text)
    if match is None or int(match[2] or 1) not in range(1, 65536):
        raise ValueError(f"wanted host or host:port with a port in [1, 65535], got {text!r}")
    return match[1].strip("[]"), int(match[2] or default_port)


def _path(path: str, topology: Topology) -> tuple[str, int]:
    """The service and the database."""
    words = [unquote(word) for word in path.strip("/").split("/") if word]
    service = words.pop(0) if topology is Topology.SENTINEL and words else ""
    if topology is Topology.SENTINEL and not service:
        raise ValueError("wanted redis+sentinel://host:port,host:port/service, got no service")
    database = words.pop(0) if words else "0"
    if words or not database.isdecimal():
        raise ValueError(f"wanted a database number at the end of the path, got {path!r}")
    if topology is Topology.CLUSTER and int(database):
        raise ValueError(f"a cluster has database 0 only, got {database}")
    return service, int(database)


def _options(query: str, topology: Topology) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"option {name!r} is not known, wanted one of {', '.join(OPTIONS)}")
        if name in SENTINEL_OPTIONS and topology is not Topology.SENTINEL:
            raise ValueError(f"option {name!r} is for redis+sentinel://")
    return options


def _check_tls_options(options: Iterable[str], tls: bool) -> None:
    for name in options:
        if name in TLS_OPTIONS and not tls:
            raise ValueError(f"option {name!r} needs TLS: rediss in place of redis")


def _yes(name: str, value: str | None, otherwise: bool) -> bool:
    if value not in (None, "yes", "no"):
        raise ValueError(f"option {name!r} is {value!r}, wanted yes or no")
    return otherwise if value is None else value == "yes"
