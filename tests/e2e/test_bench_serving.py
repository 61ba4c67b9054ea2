"""The serving bench prints what is promised, one JSON object a line."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def test_every_number_is_printed_beside_that_of_plain_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.serving", "--quick"], capture_output=True, text=True, timeout=280, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]

    assert [line["name"] for line in lines] == [
        "ttft_cold_s",
        "ttft_hit_s",
        "out_tok_s_1",
        "out_tok_s_8",
        "out_tok_s_32",
    ]
    assert [line["unit"] for line in lines] == ["s", "s", "tokens/s", "tokens/s", "tokens/s"]
    for line in lines:
        better = (line["plain"], line["value"]) if line["unit"] == "s" else (line["value"], line["plain"])
        assert line["ratio"] == pytest.approx(better[0] / better[1], rel=0.05)
