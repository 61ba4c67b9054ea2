"""The bench of the engine measures whole steps of both roads, and gives every figure that it promises."""

from pathlib import Path

import pytest
import torch

from bench import engine
from octavo import models
from tests.support import tiny_model


def test_each_step_is_measured_beside_its_products_the_other_road_and_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model.save_tiny_llama(tmp_path / "model")
    described = models.find(str(folder), folder.parent)
    monkeypatch.setattr(engine, "DECODES", (1, 3))
    monkeypatch.setattr(engine, "PREFILLS", (64,))

    threads = torch.get_num_threads()
    lines = {line["name"]: line for line in engine.measure_steps(described, "float32", threads, 0.0)}

    assert list(lines) == [
        "weight_mb_read",
        *(f"{name}_b{sequences}" for sequences in (1, 3) for name in STEP_NAMES),
        "prefill_tok_s_64",
        "prefill_vs_linears_64",
        "prefill_vs_generic_64",
    ]
    assert all(float(str(line["value"])) > 0 for line in lines.values())
    step = lines["step_ms_b3"]
    assert {"generic_ms", "linears_ms", "reading_ms", "continuous_batching_ms"} <= step.keys()
    assert {"linears_ms", "reading_ms"} <= lines["products_ms_b3"].keys()


STEP_NAMES = ("step_ms", "products_ms", "step_vs_linears", "step_vs_generic", "step_vs_continuous_batching")
