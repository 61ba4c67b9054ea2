"""Who may ask: the tenants file, API keys, and the tag that stands for a tenant behind the gateway.

    [tenants.acme]
    api_key_sha256 = ["9c5bb8…"]      # of each key that acme may show, in hexadecimal: two while one replaces the other
    cache_floor = "20%"               # of each pool, or bytes as "2GiB": what others do not take from it while they can
    retention_quota = "512MiB"        # of each pool: how much its requests can have retained (`retain_seconds`)
    weight = 2.0                      # of acme's share of the fleet beside the others', where all ask for more; 1.0
    requests_per_minute = 600         # at each gateway; without it there is no bound
    tokens_per_minute = 1_000_000     # at each gateway, of prompts and outputs together; without it there is no bound

The file gives no key away, since a key is a long random string (`octavo key` draws one). It is read by every gateway,
and by cache managers for what they keep for each tenant.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any, cast

from octavo.errors import Unauthenticated
from octavo.hashing import HASH_BYTES, TENANT_TAG_BYTES, digest_of
from octavo.ids import TenantTag
from octavo.pool_part import NOTHING, PoolPart, parse_pool_part

FILE_VARIABLE = "OCTAVO_TENANTS_FILE"
"""Names the file to every service that reads it."""
AUTHORIZATION = "authorization"
"""The metadata of a call that holds `Bearer KEY`."""

MAX_NAME_CHARACTERS = 128

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
MOST_PER_MINUTE = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One table of the file; its fields are the table's."""

    name: str
    api_key_sha256: tuple[bytes, ...] = ()
    cache_floor: PoolPart = NOTHING
    """Of each pool: with so much of it or less, the tenant's blocks make no room for others' while those can."""
    retention_quota: PoolPart | None = None
    """Of each pool: how much its requests can have retained; None: as the cache manager is told for all."""
    weight: float = 1.0
    """Of its share of the fleet beside the others', where not all can be served at once."""
    requests_per_minute: int | None = None
    """At each gateway; None: no bound."""
    tokens_per_minute: int | None = None
    """At each gateway, of prompts and outputs together; None: no bound."""

    @property
    def tag(self) -> TenantTag:
        """What stands for the tenant where its name is nobody's business."""
        return TenantTag(digest_of(b"octavo tenant tag", self.name.encode())[:TENANT_TAG_BYTES])


class Tenants:
    """All tenants, by name. No two share a key or a tag."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        """Raises ValueError where a request could be taken for two of them."""
        self._tenants = tuple(tenants)
        owners: dict[bytes, str] = {}
        for tenant in self._tenants:
            for mark in (tenant.tag, *tenant.api_key_sha256):
                owner = owners.setdefault(mark, tenant.name)
                if owner != tenant.name:
                    raise ValueError(f"tenants {owner} and {tenant.name} have {mark.hex()} in common")

    def __iter__(self) -> Iterator[Tenant]:
        """Each tenant, in the order of the file."""
        return iter(self._tenants)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tenants)

    def with_key(self, api_key: str) -> Tenant:
        """Whose key it is. Takes the same time whichever it is, and whatever is wrong with it.

        Raises:
            Unauthenticated: nobody's.
        """
        shown = sha256(api_key.encode()).digest()
        found: Tenant | None = None
        for tenant in self._tenants:
            for known in tenant.api_key_sha256:
                if compare_digest(shown, known):
                    found = tenant
        if found is None:
            raise Unauthenticated(f"{AUTHORIZATION}: the API key is not known here")
        return found


def read_tenants(file: Path) -> Tenants:
    """The tenants of a file.

    Raises:
        OSError: it cannot be read; names the variable that names it.
        ValueError: it is no tenants file; names the field at fault.
    """
    try:
        return parse_tenants(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(f"{FILE_VARIABLE}: {file}: {error.strerror}") from error
    except ValueError as error:  # TOML that does not parse, and bytes that are no text, included
        raise ValueError(f"{file}: {error}") from error


def parse_tenants(text: str) -> Tenants:
    """The tenants of a file's text.

    Raises:
        ValueError: names the field at fault, without what it holds: that may be a key in the place of its digest.
    """
    content = tomllib.loads(text)
    _require_known("", content, {"tenants"})
    tables = _table("tenants", content.get("tenants", {}))
    return Tenants(_tenant(name, table) for name, table in tables.items())


def _tenant(name: str, value: object) -> Tenant:
    path = f"tenants.{name}"
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"{path}: a name of {len(name)} characters, wanted 1 to {MAX_NAME_CHARACTERS}")
    table = _table(path, value)
    _require_known(f"{path}.", table, {field.name for field in fields(Tenant)} - {"name"})
    return Tenant(
        name=name,
        api_key_sha256=_digests(f"{path}.api_key_sha256", table.get("api_key_sha256", [])),
        cache_floor=_pool_part(f"{path}.cache_floor", table.get("cache_floor")) or NOTHING,
        retention_quota=_pool_part(f"{path}.retention_quota", table.get("retention_quota")),
        weight=_weight(f"{path}.weight", table.get("weight", 1.0)),
        requests_per_minute=_count(f"{path}.requests_per_minute", table.get("requests_per_minute")),
        tokens_per_minute=_count(f"{path}.tokens_per_minute", table.get("tokens_per_minute")),
    )


def _pool_part(path: str, value: object) -> PoolPart | None:
    if value is None:
        return None
    try:
        return parse_pool_part(str(value))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _weight(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_WEIGHT <= value <= MOST_WEIGHT:
        raise ValueError(f"{path}: wanted a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return float(value)


def _count(path: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PER_MINUTE:
        raise ValueError(f"{path}: wanted a whole number from 1 to {MOST_PER_MINUTE}")
    return value


def _digests(path: str, value: object) -> tuple[bytes, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{path}: {type(value).__name__}, wanted a list of strings")
    return tuple(_digest(f"{path}[{at}]", item) for at, item in enumerate(cast("list[object]", value)))


def _digest(path: str, value: object) -> bytes:
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != HASH_BYTES:
        raise ValueError(f"{path}: wanted {2 * HASH_BYTES} hexadecimal digits, the sha256 of a key")
    return digest


def _table(path: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__}, wanted a table")
    return cast("dict[str, Any]", value)


def _require_known(path: str, table: Mapping[str, Any], known: set[str]) -> None:
    for name in table.keys() - known:
        raise ValueError(f"{path}{name}: not known, there are: {', '.join(sorted(known))}")


# ---- a key on its way ----------------------------------------------------------------------------------------


def credentials(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata with which a client shows its key; nothing without one.

    Raises:
        Unauthenticated: no gateway can know it, since metadata cannot hold it. It is not repeated.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise Unauthenticated(f"{AUTHORIZATION}: the API key has characters that are not printable ASCII")
    return () if api_key is None else ((AUTHORIZATION, f"Bearer {api_key}"),)


def api_key_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key that a call shows.

    Raises:
        Unauthenticated: it shows none, or more than one. What it shows is not repeated.
    """
    shown = [value for name, value in metadata if name == AUTHORIZATION]
    if len(shown) != 1 or not isinstance(shown[0], str):
        has = f"given {len(shown)} times" if shown else "missing"
        raise Unauthenticated(f"{AUTHORIZATION}: {has}, wanted one `Bearer KEY`")
    scheme, _, api_key = shown[0].partition(" ")
    if scheme.lower() != "bearer" or not api_key:
        raise Unauthenticated(f"{AUTHORIZATION}: not of the form `Bearer KEY`")
    return api_key
