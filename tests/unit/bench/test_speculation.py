"""The benchmark of guesses serves the same texts with and without them."""

from pathlib import Path

import pytest

from bench.speculation import draft_source, measure
from octavo import models
from tests.support import tiny_model
from worker.core.drafting import Lookups
from worker.runner import RunnerOptions, open_runner


@pytest.mark.parametrize("guesses", ["lookups", "draft model"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_run_with_guesses_says_what_a_run_without_says_in_no_more_steps(
    tmp_path: Path, batch: int, guesses: str
) -> None:
    folder = models.find(str(tiny_model.save_tiny_llama(tmp_path / "tiny")), tmp_path)
    options = RunnerOptions(kv_memory_bytes=1 << 20, dtype="float32", device="cpu")
    runner, pool = open_runner(folder, options)

    plain, guessing = (
        measure(runner, pool, [5, 6, 7, 8] * 3, batch=batch, tokens=12, source=source)
        for source in (None, Lookups() if guesses == "lookups" else draft_source(folder, folder, options))
    )

    assert guessing.texts == plain.texts
    assert [len(text) for text in plain.texts] == [12] * batch
    assert guessing.tokens_per_step >= plain.tokens_per_step
    assert plain.accepted == 0
