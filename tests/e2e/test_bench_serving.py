"""The serving bench prints what is promised, one JSON object a line."""

import json
import subprocess
import sys

import pytest

from bench.serving import PEERS, WORKLOADS

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def test_every_workload_is_told_beside_plain_transformers_and_shared_prompts_are_prefilled_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.serving", "--quick"], capture_output=True, text=True, timeout=280, check=True
    )
    memory, *lines = (json.loads(line) for line in done.stdout.splitlines())

    assert (memory["name"], memory["unit"]) == ("memory_gb_s", "GB/s")
    assert [line["name"] for line in lines] == list(PEERS)
    for line in lines:
        is_time = line["unit"] == "s"
        better = (line["plain"], line["value"]) if is_time else (line["value"], line["plain"])
        assert line["ratio"] == pytest.approx(better[0] / better[1], rel=0.05, abs=0.01)
    prefilled = {line["name"].partition("_")[0]: line["prefilled"] for line in lines}
    small = {one.name: one.small() for one in WORKLOADS}
    for name in ("W1", "W4", "W5", "W6"):
        assert prefilled[name] == small[name].requests * small[name].prompt_tokens
    for name in ("W2", "W3", "W3w"):
        own = small[name].requests * (small[name].prompt_tokens - small[name].shared_tokens)
        assert prefilled[name] == own + (0 if small[name].warm else small[name].shared_tokens)
