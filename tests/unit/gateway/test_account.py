"""Salts: what the gateway knows and what the client sends, mixed."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.account import OPEN, account_of
from octavo.tenants import Tenant

few = st.text("ab", max_size=2)
tenants = st.none() | st.text("ab", min_size=1, max_size=2).map(lambda name: Tenant(name=name))


@given(st.lists(st.tuples(few, tenants, few), min_size=2, max_size=8, unique_by=repr))
def test_salts_are_equal_only_where_secret_tenant_and_client_salt_all_are(asked) -> None:
    """S51: no choice of one part makes up for another, however their letters are moved from part to part."""
    salts = [account_of(tenant, secret).salt(cache_salt) for secret, tenant, cache_salt in asked]
    assert len(set(salts)) == len(asked)
    assert {len(salt) for salt in salts} <= {0, 32}


def test_a_tenants_own_salt_is_no_way_to_another_tenants_blocks() -> None:
    """S51: whatever the client sends, also what it may have guessed of the other's salt."""
    mine, yours = (account_of(Tenant(name=name), "secret") for name in ("mine", "yours"))
    wanted = yours.salt("their salt")
    for sent in ("their salt", "yours", wanted.hex(), wanted.decode("latin-1")):
        assert mine.salt(sent) != wanted


def test_without_tenants_secret_and_client_salt_everybody_shares() -> None:
    assert OPEN.salt("") == b""
    assert OPEN.tag == b""


def test_an_account_does_not_show_what_its_salts_are_made_of() -> None:
    account = account_of(Tenant(name="acme"), "a secret")
    assert account.realm.hex() not in repr(account)
    assert repr(account.realm) not in repr(account)
