"""One step of the worker's engine beside what it is made of, what it replaces, and another engine.

    python -m bench.engine [--model smollm2] [--dtype bfloat16] [--threads 2] [--seconds 10]

A step is the whole of `Runner.execute`: tensors of the plan, forward pass, drawn tokens. Beside it run, in turns, so
that what else the machine does hurts all alike:

- `linears`: the model's matrix products alone, one `F.linear` each, on the same numbers of rows;
- `products`: the same, by the fast road's own products (`packed`: by oneDNN's packed ones, where those are others);
- `reading`: the same weights summed by torch: about what this machine takes at this hour to read them;
- `generic`: the same step through transformers' own modules.

transformers' continuous batching runs by itself in between, in the same process, with as many threads. A ratio is the
median of the turns' own ratios. `wait_share` is of a real worker with a real manager process: of the time in which it
had work, the share in which no step ran since an answer of the manager was not there yet. One JSON object a line.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from bench.engine_rivals import ContinuousBatching, Linears, Reading
from bench.engine_wait import measure_waits
from bench.kernels import Times, race, ratio
from octavo import models
from octavo.commands.model import fetch_model, models_dir
from octavo.ids import BlockId, SequenceId
from octavo.models import ModelFolder
from octavo.records.sampling import SamplingParams
from worker.core.step import Chunk, Draw, StepPlan
from worker.model import linear
from worker.model.loader import Road
from worker.runner import Runner, RunnerOptions, open_runner

DECODES = (1, 8, 32)
"""Sequences."""
LENGTH = 256
"""Positions of each, the new one included."""
PREFILLS = (512, 1024)
"""Tokens of one prompt."""
CPU = torch.device("cpu")


def open_road(folder: ModelFolder, road: Road, dtype: str, threads: int) -> Runner:
    """The model on one of its roads, with a pool for the largest step."""
    options = RunnerOptions(
        kv_memory_bytes=512 << 20, dtype=dtype, kv_dtype=dtype, device="cpu", threads=threads, road=road
    )
    return open_runner(folder, options)[0]


def decode_plan(sequences: int, block_size: int) -> StepPlan:
    """Every sequence computes its last position and draws greedily; its blocks lie wherever they lie."""
    width = LENGTH // block_size
    blocks = torch.randperm(sequences * width, generator=torch.Generator().manual_seed(0)).tolist()
    return StepPlan(
        tuple(
            _chunk(which, LENGTH - 1, (which + 1,), blocks[which * width : (which + 1) * width])
            for which in range(sequences)
        )
    )


def prefill_plan(tokens: int, block_size: int, vocab_size: int) -> StepPlan:
    """A prompt that nobody knows, in one step."""
    ids = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return StepPlan((_chunk(0, 0, tuple(ids), range(-(-tokens // block_size))),))


def _chunk(sequence: int, start: int, tokens: tuple[int, ...], blocks: Sequence[int]) -> Chunk:
    end = start + len(tokens)
    table = tuple(BlockId(block) for block in blocks)
    draws = (Draw(SamplingParams(), 0, end),)
    return Chunk(sequence=SequenceId(sequence), start=start, tokens=tokens, table=table, draws=draws)


class Parts:
    """What a step is made of, alone: its products, multiplied in several ways, and their weights, read."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        ours = linear.choose(device=CPU, dtype=dtype)
        ways = {"linears": linear.plain, "products": ours} | (
            {} if ours is linear.packed else {"packed": linear.packed}
        )
        self.ways = {name: Linears(model, make) for name, make in ways.items()}
        self.reading = Reading(model)

    def runners(self, plan: StepPlan) -> dict[str, Callable[[int], object]]:
        """Each by its name."""
        rows, logit_rows = sum(len(chunk.tokens) for chunk in plan.chunks), len(plan.chunks)

        def of(products: Linears) -> Callable[[int], object]:
            return lambda _: products(rows, logit_rows)

        return {**{name: of(way) for name, way in self.ways.items()}, "reading": lambda _: self.reading()}


def time_steps(roads: Mapping[Road, Runner], plan: StepPlan, parts: Parts, seconds: float) -> Times:
    """Seconds of every turn of each road, and of its parts alone."""

    def step(runner: Runner) -> Callable[[int], object]:
        return lambda _: runner.execute(plan)

    steps = {road: step(runner) for road, runner in roads.items()}
    return race(CPU, 1, {**steps, **parts.runners(plan)}, seconds)


def decode_lines(sequences: int, times: Times, rival_seconds: float) -> Iterator[dict[str, object]]:
    """The figures of decodes of so many sequences."""
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    turns = len(times["linears"])
    yield {
        "name": f"step_ms_b{sequences}",
        "value": round(medians["fast"], 2),
        "unit": "ms",
        "length": LENGTH,
        "generic_ms": round(medians["generic"], 2),
        "linears_ms": round(medians["linears"], 2),
        "reading_ms": round(medians["reading"], 2),
        "continuous_batching_ms": round(rival_seconds * 1e3, 2),
    }
    yield {
        "name": f"products_ms_b{sequences}",
        "value": round(medians["products"], 2),
        "unit": "ms",
        **{f"{way}_ms": round(medians[way], 2) for way in ("packed", "linears", "reading") if way in medians},
    }
    yield _ratio(f"step_vs_linears_b{sequences}", ratio(times, "fast", "linears"), turns)
    yield _ratio(f"step_vs_generic_b{sequences}", ratio(times, "generic", "fast"), turns)
    yield _ratio(f"step_vs_continuous_batching_b{sequences}", rival_seconds * 1e3 / medians["fast"], turns)


def prefill_lines(tokens: int, times: Times, rival_seconds: float) -> Iterator[dict[str, object]]:
    """The figures of a prompt of so many tokens."""
    rates = {name: tokens / statistics.median(values) for name, values in times.items()}
    turns = len(times["linears"])
    yield {
        "name": f"prefill_tok_s_{tokens}",
        "value": round(rates["fast"]),
        "unit": "tokens/s",
        "generic_tok_s": round(rates["generic"]),
        "linears_tok_s": round(rates["linears"]),
        "continuous_batching_tok_s": round(tokens / rival_seconds),
    }
    yield _ratio(f"prefill_vs_linears_{tokens}", ratio(times, "linears", "fast"), turns)
    yield _ratio(f"prefill_vs_generic_{tokens}", ratio(times, "generic", "fast"), turns)


def _ratio(name: str, value: float, turns: int) -> dict[str, object]:
    return {"name": name, "value": round(value, 3), "unit": "ratio", "turns": turns}


def measure_steps(folder: ModelFolder, dtype: str, threads: int, seconds: float) -> Iterator[dict[str, object]]:
    """All figures of single steps."""
    roads: dict[Road, Runner] = {road: open_road(folder, road, dtype, threads) for road in ("fast", "generic")}
    block_size = roads["fast"].pool.shape.block_size
    rival = ContinuousBatching(folder.path, dtype)
    parts = Parts(rival.model, getattr(torch, dtype))
    yield {"name": "weight_mb_read", "value": round(parts.reading.num_bytes / 1e6, 1), "unit": "MB"}
    for sequences in DECODES:
        times = time_steps(roads, decode_plan(sequences, block_size), parts, seconds)
        yield from decode_lines(sequences, times, rival.decode_seconds(sequences, LENGTH))
    for tokens in PREFILLS:
        times = time_steps(roads, prefill_plan(tokens, block_size, folder.vocab_size), parts, seconds)
        yield from prefill_lines(tokens, times, rival.prefill_seconds(tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="The engine's step and its rivals.")
    parser.add_argument("--model", default=models.DEFAULT, help="a name, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each race (default: 10)")
    options = parser.parse_args(arguments)
    fetch_model(options.model)
    folder = models.find(options.model, models_dir())
    for line in measure_steps(folder, options.dtype, options.threads, options.seconds):
        print(json.dumps(line), flush=True)
    for line in asyncio.run(measure_waits(folder, options.dtype, options.threads)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
