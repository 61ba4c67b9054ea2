"""The bench of recovery runs, and what it says of tokens holds for few blocks as for many."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.redis]


def test_the_bench_loses_no_token() -> None:
    command = [sys.executable, "-m", "bench.recovery", "--blocks", "2000", "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    figures = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert figures.keys() == {
        "recovery_s",
        "recovery_standby_s",
        "recovery_tokens_lost",
        "recovery_tokens_recomputed",
    }
    assert figures["recovery_tokens_lost"]["value"] == figures["recovery_tokens_recomputed"]["value"] == 0
    assert figures["recovery_tokens_lost"]["of"] > 0
