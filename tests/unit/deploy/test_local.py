"""What a cluster on this machine refuses, and tells, before it starts anything."""

from pathlib import Path

import pytest

from deploy.local import Cluster, Ports
from deploy.process import StartFailed
from tests.support.certificates import Authority
from tests.support.tenants import write_tenants


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ({}, r"OCTAVO_API_KEY: wanted a key of the tenants file .*tenants\.toml, .*: authorization: missing"),
        ({"OCTAVO_API_KEY": "of somebody"}, r"OCTAVO_API_KEY: wanted a key .*: the API key is not known here"),
    ],
)
async def test_a_start_that_could_not_ask_for_its_own_fleet_fails_before_anything_is_started(
    key: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tenants(tmp_path / "tenants.toml", x="the key of x")
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    lines: list[str] = []
    cluster = Cluster(env={"OCTAVO_TENANTS_FILE": str(file), **key}, on_line=lambda _, line: lines.append(line))

    with pytest.raises(StartFailed, match=why):
        await cluster.start()

    assert lines == []
    assert not any(process.running for process in cluster.processes)


async def test_a_tenants_file_that_does_not_parse_fails_the_start_by_its_field(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("tenants = 3\n")
    cluster = Cluster(env={"OCTAVO_TENANTS_FILE": str(file), "OCTAVO_API_KEY": "any"})

    with pytest.raises(StartFailed, match=r"tenants\.toml: tenants: int, wanted a table"):
        await cluster.start()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("CERT", "KEY"), "OCTAVO_TLS_CA: unset, OCTAVO_TLS_CERT wants it beside itself"),
        (("CA",), "OCTAVO_TLS_CERT: unset, OCTAVO_TLS_CA wants it beside itself"),
        (("CERT", "CA"), "OCTAVO_TLS_KEY: unset, OCTAVO_TLS_CERT wants it beside itself"),
    ],
)
async def test_services_that_could_not_call_one_another_over_tls_are_not_started(
    given: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    variables = Authority(tmp_path).variables("own")
    cluster = Cluster(env={name: variables[name] for name in (f"OCTAVO_TLS_{part}" for part in given)})

    with pytest.raises(StartFailed, match=why):
        await cluster.start()

    assert not any(process.running for process in cluster.processes)


async def _why_not_started(variables: dict[str, str]) -> str:
    cluster = Cluster(env=variables)
    with pytest.raises(StartFailed) as failed:
        await cluster.start()
    assert not any(process.running for process in cluster.processes)
    return str(failed.value)


async def test_a_certificate_for_another_host_is_told_before_anything_is_started(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    other = authority.issue("other", "octavo.example")
    files = {
        "OCTAVO_TLS_CERT": str(other.certificate),
        "OCTAVO_TLS_KEY": str(other.key),
        "OCTAVO_TLS_CA": str(authority.file),
    }

    why = await _why_not_started(files)
    assert why.startswith(f"OCTAVO_TLS_CERT: {other.certificate} with OCTAVO_TLS_KEY {other.key} is not believed at ")
    assert why.endswith("certificate is not valid for '127.0.0.1'.")
    assert "at nowhere.example, " in await _why_not_started(files | {"OCTAVO_TLS_PEER_NAME": "nowhere.example"})
    Cluster(env=files | {"OCTAVO_TLS_PEER_NAME": "octavo.example"}).check()


async def test_a_certificate_of_an_authority_that_is_not_believed_is_told(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    believed = {"OCTAVO_TLS_CA": str(Authority(tmp_path / "other").file)}

    why = await _why_not_started(Authority(tmp_path).variables("own") | believed)
    assert why.endswith(": unable to get local issuer certificate")


async def test_a_key_of_another_certificate_is_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    key = {"OCTAVO_TLS_KEY": str(authority.issue("other").key)}

    assert (await _why_not_started(authority.variables("own") | key)).endswith(": KEY_VALUES_MISMATCH")


@pytest.mark.parametrize("ports", [Ports(0, 4711, 4711), Ports(4711, 4711, 0), Ports(4711, 0, 4711)])
async def test_a_port_that_two_services_shall_have_is_told_before_anything_is_started(ports: Ports) -> None:
    cluster = Cluster(ports=ports)

    with pytest.raises(StartFailed, match="port 4711 is asked for 2 times"):
        await cluster.start()

    assert not any(process.running for process in cluster.processes)


async def test_a_certificate_that_is_not_there_is_told_by_its_variable(tmp_path: Path) -> None:
    variables = Authority(tmp_path).variables("own") | {"OCTAVO_TLS_CERT": str(tmp_path / "absent.pem")}

    with pytest.raises(StartFailed, match=r"OCTAVO_TLS_CERT: .*absent.pem: No such file"):
        await Cluster(env=variables).start()


def test_a_callers_authorities_are_told_where_the_http_api_is_served_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served = authority.variables("own")
    believed = {"OCTAVO_TLS_CA": served.pop("OCTAVO_TLS_CA")}

    assert Cluster(env=served | believed).http_authorities == authority.file
    assert [Cluster(env=env).http_authorities for env in ({}, served, believed)] == [None] * 3
