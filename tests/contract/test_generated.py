"""The generated code is what the schemas say, and the floors of the dependencies are what it needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
GENERATED = CHECKOUT / "octavo" / "v1"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def floor_of(package: str) -> str:
    """The version in `package>=version` of the project's dependencies."""
    (floor,) = [line.partition(">=")[2] for line in PROJECT["dependencies"] if re.split(r"[<>=]", line)[0] == package]
    return floor


def versions_in(pattern: str, expression: str) -> set[str]:
    """What the expression captures in every generated file of that pattern, as dotted versions."""
    found = [re.search(expression, path.read_text(encoding="utf-8")) for path in GENERATED.glob(pattern)]
    assert found
    assert all(found)
    return {re.sub(r",\s*", ".", match[1]) for match in found if match}


def test_the_committed_code_is_generated_from_the_schemas() -> None:
    done = subprocess.run(
        [sys.executable, CHECKOUT / "proto" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["grpcio", "grpcio-health-checking", "grpcio-reflection"])
def test_the_floor_of_grpc_is_the_version_that_the_code_was_generated_for(package: str) -> None:
    assert versions_in("*_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'") == {floor_of(package)}


def test_the_floor_of_protobuf_is_the_version_that_the_code_was_generated_for() -> None:
    checked = versions_in(
        "*_pb2.py", r"ValidateProtobufRuntimeVersion\(\s*_runtime_version\.Domain\.PUBLIC,\s*(\d+,\s*\d+,\s*\d+),"
    )
    assert checked == {floor_of("protobuf")}


def test_the_code_is_generated_by_one_exact_version() -> None:
    """Another version of the generator would write other code, and the drift check would depend on the machine."""
    pins = [
        line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith(("grpcio-tools", "mypy-protobuf"))
    ]
    assert len(pins) == 2
    assert all("==" in pin for pin in pins)
    assert f"grpcio-tools=={floor_of('grpcio')}" in pins
