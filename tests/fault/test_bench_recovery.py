"""The recovery bench prints what is promised, one JSON object a line."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.redis]


def test_every_figure_is_printed_and_no_token_is_lost() -> None:
    """S43: the time in which the index heals is measured."""
    command = [sys.executable, "-m", "bench.recovery", "--blocks", "2000", "--kills", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}

    times = ["recovery_s", "recovery_standby_s", "index_recovery_s"]
    lost = ["recovery_tokens_lost", "recovery_tokens_recomputed"]
    assert list(lines) == times + lost
    assert [lines[name]["unit"] for name in lines] == ["s"] * 3 + ["tokens"] * 2
    assert all(lines[name]["worst"] >= lines[name]["value"] > 0 for name in times)
    assert [lines[name]["value"] for name in lost] == [0, 0]
    assert all(lines[name]["of"] > 0 for name in lost)
