"""What the GPU script runs, as far as no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu_report, graph_decode

REPOSITORY = Path(__file__).parents[3]


def test_a_small_model_is_measured_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"device": "cpu", "layers": 2, "hidden": 512, "vocab": 99, "sequences": 3, "length": 20, "steps": 14}

    graph_decode.main([f"--{name}={value}" for name, value in small.items()])

    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["name"] == "decode_step_ms_one_by_one"
    assert line["sequences"] == 3
    assert line["value"] > 0


@torch.inference_mode()
def test_the_loop_attends_to_what_it_wrote() -> None:
    """Two runs draw the same tokens; another history draws others."""
    shape = graph_decode.Shape(layers=2, hidden=512, vocab=99)
    device = torch.device("cpu")
    model = graph_decode.Model(shape, _attend(), device, torch.float32)
    loop = graph_decode.Loop.start(model, 3, 20, 14, device, torch.float32)

    tokens = [graph_decode.run(loop, loop.step, 14)[1] for _ in range(2)]
    for layer in range(shape.layers):
        loop.pool.layer(layer)[1].neg_()
    changed = graph_decode.run(loop, loop.step, 14)[1]

    assert tokens[0] == tokens[1]
    assert changed != tokens[0]


def _attend() -> graph_decode.Attend:
    return graph_decode.choose(device=torch.device("cpu"), dtype=torch.float32, head_dim=128)


def test_the_report_shows_every_figure_and_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels.jsonl").write_text(
        '{"name": "decode_us_bf16_b64", "value": 12.5, "unit": "us", "share_of_copy": 0.87}\n{"name": "cut sho'
    )
    (tmp_path / "parts.jsonl").write_text(
        '{"part": "kernels", "status": 0, "seconds": 61}\n'
        '{"part": "contract", "status": 1, "seconds": 9}\n'
        '{"part": "graph_decode", "status": 124, "seconds": 90}\n'
    )

    assert gpu_report.main([str(tmp_path)]) == 1

    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "decode_us_bf16_b64 12.5 us 87%" in shown
    assert shown[-3:] == [
        "contract FAILED with status 1, see contract.log after 9 s",
        "graph_decode TOOK TOO LONG after 90 s",
        "kernels passed after 61 s",
    ]


def test_a_report_of_parts_that_all_passed_is_a_success(tmp_path: Path) -> None:
    (tmp_path / "parts.jsonl").write_text('{"part": "kernels", "status": 0, "seconds": 61}\n')

    assert gpu_report.main([str(tmp_path)]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results"

    done = subprocess.run(
        [REPOSITORY / "bench" / "gpu_check.sh", results],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 2
    assert "gpu_check: torch finds no CUDA device" in done.stderr
    assert not results.exists()
