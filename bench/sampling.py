"""What each form of sampling adds to a step: rows of SmolLM2's vocabulary, drawn in every way, beside a plain look.

    python -m bench.sampling [--quick]

`sampling_us_FORM` is the time to draw a token for each of 32 rows, of sequences with 256 tokens, on one thread;
`ratio` is over `floor`, one look at all of them for each row's highest, which no sampler does without. Every form but
`greedy` and the beams draws at temperature 0.8; `plain` asks for nothing else. Medians; one JSON object a line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.ids import BlockId, SequenceId
from octavo.records.sampling import SamplingParams
from worker.core.step import Chunk, Draw
from worker.model.outcome import outcome

ROWS = 32
VOCAB_SIZE = 49_152
LENGTH = 256
PLAIN = SamplingParams(temperature=0.8, seed=1)

FORMS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "greedy": (SamplingParams(), {}),
    "plain": (PLAIN, {}),
    "top_k_top_p": (replace(PLAIN, top_k=50, top_p=0.95), {}),
    "min_p": (replace(PLAIN, min_p=0.05), {}),
    "bias": (replace(PLAIN, logit_bias=tuple((token, 1.0) for token in range(16))), {}),
    "repetition": (replace(PLAIN, repetition_penalty=1.2), {}),
    "presence_frequency": (replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.5), {}),
    "logprobs_5": (PLAIN, {"logprobs": 5}),
    "beams_of_4": (SamplingParams(), {"continuations": 8}),
}


def chunks_of(params: SamplingParams, wishes: dict[str, Any]) -> list[Chunk]:
    """A decode step of as many sequences as there are rows."""
    history = tuple(token * 37 % VOCAB_SIZE for token in range(LENGTH)) if params.penalises else ()
    draw = Draw(params, 0, LENGTH, history, LENGTH // 2, **wishes)
    return [
        Chunk(sequence=SequenceId(row), start=LENGTH - 1, tokens=(0,), table=(BlockId(0),), draws=(draw,))
        for row in range(ROWS)
    ]


def median_us(run: Callable[[], object], times: int) -> float:
    """Of one call."""
    run()
    spent: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    times = 3 if parser.parse_args(arguments).quick else 60
    torch.set_num_threads(1)
    logits = 3 * torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        floor = median_us(lambda: logits.amax(-1).tolist(), times)
        _tell("floor", floor, 1.0)
        for name, (params, wishes) in FORMS.items():
            chunks = chunks_of(params, wishes)
            value = median_us(lambda chunks=chunks: outcome(chunks, logits), times)
            _tell(name, value, value / floor)


def _tell(name: str, value: float, ratio: float) -> None:
    print(json.dumps({"name": f"sampling_us_{name}", "value": round(value, 1), "unit": "us", "ratio": round(ratio, 2)}))


if __name__ == "__main__":
    main()
