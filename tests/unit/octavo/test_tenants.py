"""The tenants file, and API keys on their way."""

from hashlib import sha256
from pathlib import Path

import pytest

from octavo.errors import Unauthenticated
from octavo.pool_part import NOTHING, parse_pool_part
from octavo.tenants import Tenant, Tenants, api_key_in, credentials, parse_tenants, read_tenants


def digest(api_key: str) -> str:
    return sha256(api_key.encode()).hexdigest()


TWO = f"""
[tenants.acme]
api_key_sha256 = ["{digest("acme one")}", "{digest("acme two")}"]

[tenants."Zoë & co"]
api_key_sha256 = ["{digest("zoë")}"]
"""


def test_a_key_leads_to_its_tenant_and_a_tenant_may_have_several() -> None:
    tenants = parse_tenants(TWO)
    assert [tenants.with_key(key).name for key in ("acme one", "acme two", "zoë")] == ["acme", "acme", "Zoë & co"]


@pytest.mark.parametrize("key", ["", "acme", "acme one ", "ACME ONE", digest("acme one")])
def test_a_key_that_is_not_in_the_file_leads_nowhere_and_is_not_repeated(key: str) -> None:
    with pytest.raises(Unauthenticated, match=r"^authorization: the API key is not known here$"):
        parse_tenants(TWO).with_key(key)


def test_what_is_kept_for_a_tenant_is_a_part_of_each_pool() -> None:
    (acme,) = parse_tenants("[tenants.acme]\ncache_floor = '20%'\nretention_quota = '512MiB'")
    assert (acme.cache_floor, acme.retention_quota) == (parse_pool_part("20%"), parse_pool_part("512MiB"))
    (bolt,) = parse_tenants("[tenants.bolt]")
    assert (bolt.cache_floor, bolt.retention_quota) == (NOTHING, None)


def test_tags_are_eight_bytes_of_the_name_alone() -> None:
    """A cache manager and a gateway that read the file at different times mean the same tenant."""
    acme, zoe = parse_tenants(TWO)
    assert acme.tag == Tenant(name="acme").tag
    assert acme.tag.hex() == "388575720ff011d7"
    assert (len(acme.tag), len(zoe.tag)) == (8, 8)
    assert acme.tag != zoe.tag


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[tenants", "Expected ']'"),
        ("tenant = 1", "^tenant: not known, there are: tenants$"),
        ("tenants = 1", "^tenants: int, wanted a table$"),
        ("[tenants]\nacme = []", "^tenants.acme: list, wanted a table$"),
        ('[tenants.""]', r"^tenants\.: a name of 0 characters, wanted 1 to 128$"),
        (f'[tenants."{"n" * 129}"]', ": a name of 129 characters, wanted 1 to 128$"),
        ("[tenants.acme]\nkeys = []", "^tenants.acme.keys: not known, there are: .*api_key_sha256"),
        ("[tenants.acme]\napi_key_sha256 = 'hush'", "^tenants.acme.api_key_sha256: str, wanted a list of strings$"),
        (
            "[tenants.acme]\napi_key_sha256 = ['hush']",
            r"^tenants.acme.api_key_sha256\[0\]: wanted 64 hexadecimal digits",
        ),
        (
            "[tenants.acme]\napi_key_sha256 = ['abcd']",
            r"^tenants.acme.api_key_sha256\[0\]: wanted 64 hexadecimal digits",
        ),
        ("[tenants.acme]\napi_key_sha256 = [7]", r"^tenants.acme.api_key_sha256\[0\]: wanted 64 hexadecimal digits"),
        ("[tenants.acme]\ncache_floor = 'much'", "^tenants.acme.cache_floor: wanted a part of a pool, as 25% or"),
        ("[tenants.acme]\nweight = 0", "^tenants.acme.weight: wanted a number from 0.01 to 100$"),
        ("[tenants.acme]\nweight = true", "^tenants.acme.weight: wanted a number from 0.01 to 100$"),
        (
            "[tenants.acme]\nrequests_per_minute = 0",
            "^tenants.acme.requests_per_minute: wanted a whole number from 1 to 1000000000000$",
        ),
        (
            "[tenants.acme]\ntokens_per_minute = 1.5",
            "^tenants.acme.tokens_per_minute: wanted a whole number from 1 to 1000000000000$",
        ),
        ("[tenants.acme]\nretention_quota = '101%'", "^tenants.acme.retention_quota: wanted at most 100%, got '101%'$"),
        (
            f"[tenants.a]\napi_key_sha256 = ['{digest('k')}']\n[tenants.b]\napi_key_sha256 = ['{digest('k')}']",
            f"^tenants a and b have {digest('k')} in common$",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_by_field_and_without_what_it_holds(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_tenants(text)
    assert "hush" not in str(caught.value)


def test_a_file_without_tenants_lets_nobody_in() -> None:
    with pytest.raises(Unauthenticated):
        Tenants(parse_tenants("")).with_key("")


def test_what_is_wrong_with_a_file_is_told_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"tenants\.toml: 'utf-8' codec"):
        read_tenants(file)
    with pytest.raises(OSError, match=r"OCTAVO_TENANTS_FILE: .*nowhere\.toml: No such file or directory"):
        read_tenants(tmp_path / "nowhere.toml")


def test_a_key_arrives_as_it_was_sent() -> None:
    assert api_key_in([("user-agent", "x"), *credentials("a key")]) == "a key"
    assert credentials(None) == ()


@pytest.mark.parametrize("key", ["hush\n", "hüsh", "hu\x00sh"])
def test_a_key_that_no_metadata_can_hold_is_refused_without_being_repeated(key: str) -> None:
    with pytest.raises(Unauthenticated, match="authorization: the API key has characters that are not") as caught:
        credentials(key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "authorization: missing, wanted one `Bearer KEY`"),
        ([*credentials("a"), *credentials("b")], "authorization: given 2 times, wanted one `Bearer KEY`"),
        ([("authorization", "Basic hush")], "authorization: not of the form `Bearer KEY`"),
        ([("authorization", "Bearer")], "authorization: not of the form `Bearer KEY`"),
        ([("authorization", "Bearer ")], "authorization: not of the form `Bearer KEY`"),
    ],
)
def test_a_call_that_shows_no_key_is_told_what_is_wanted(metadata: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(Unauthenticated, match=reason) as caught:
        api_key_in(metadata)
    assert "hush" not in str(caught.value)
