"""Paged attention against attention without pages: time, bytes a second, and the share of what memory can give.

On a CPU also what stands between the matrix products of a layer, native against torch.

    python -m bench.kernels                       one JSON object a line
    python -m bench.kernels --plot out.png        and all times, drawn
    python -m bench.kernels --flex                and flex attention, which compiles for seconds each time

Everybody reads the same memory, layer after layer, and takes turns: what else the machine does hurts all alike. A ratio
is the median of the turns' own ratios, a time the median of the turns' times.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.kernel_rivals import Batch, Case, paged, rivals
from bench.kernel_small_ops import SmallCase, small_cases, small_races

DECODES = ((32, 512), (8, 2048), (1, 1024))
"""(sequences, positions of each)"""
HISTORIES = (0, 512)
"""Of prompts of which 512 tokens are new."""
SMOL = Case(sequences=1, history=0, new=1)
"""Heads of SmolLM2."""
LLAMA = Case(sequences=1, history=0, new=1, heads=32, kv_heads=8, head_dim=128)
"""Heads of an 8B model."""
FP8 = torch.float8_e4m3fn
WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", FP8: "fp8"}

Runner = Callable[[int], object]
"""Takes a layer."""

Times = Mapping[str, list[float]]
"""Seconds of every turn."""


def cases(device: torch.device) -> list[Case]:
    """The grid: decodes and prefills, in the dtypes and sizes that the device is for."""
    if device.type == "cuda":
        llama = replace(LLAMA, dtype=torch.bfloat16)
        grid = [_decode(llama, b, n) for b, n in ((64, 4096), (32, 512), (8, 2048), (1, 8192))]
        prompts = [replace(llama, sequences=4, history=history, new=2048) for history in (0, 2048)]
        return [*grid, *(replace(case, kv_dtype=FP8) for case in grid), *prompts]
    grid = []
    for dtype in (torch.float32, torch.bfloat16):
        smol, llama = replace(SMOL, dtype=dtype), replace(LLAMA, dtype=dtype)
        grid += [*(_decode(smol, b, n) for b, n in DECODES), _decode(llama, 8, 2048)]
        grid += [replace(smol, history=history, new=512) for history in HISTORIES]
    return grid + [_decode(replace(SMOL, dtype=torch.bfloat16, kv_dtype=FP8), b, n) for b, n in DECODES]


def _decode(case: Case, sequences: int, length: int) -> Case:
    return replace(case, sequences=sequences, history=length - 1)


def race(device: torch.device, layers: int, runners: Mapping[str, Runner], seconds: float) -> Times:
    """Let all runners take turns for about so long, each turn on another layer; at least nine turns."""
    for attention in runners.values():
        attention(0)
    times: dict[str, list[float]] = {name: [] for name in runners}
    layer = turn = 0
    deadline = time.perf_counter() + seconds
    names = list(runners)
    while turn < 9 or time.perf_counter() < deadline:
        turn += 1
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            layer = (layer + 1) % layers
            times[name].append(_time(device, runners[name], layer))
    return times


def _time(device: torch.device, attention: Runner, layer: int) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attention(layer)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    attention(layer)
    return time.perf_counter() - begun


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of torch's copy of 256 MB, read and written: what memory gives at its best."""
    source = torch.ones(64 << 20, device=device)
    target = torch.empty_like(source)
    copied = [_time(device, lambda _: target.copy_(source), 0) for _ in range(9)]
    return 2 * source.numel() * source.itemsize / min(copied)


def ratio(times: Times, runner: str, rival: str) -> float:
    """The median of the turns' own ratios."""
    return statistics.median(a / b for a, b in zip(times[runner], times[rival], strict=True))


def name_of(case: Case) -> str:
    """What the figures of a case are called: fp32_b32, bf16_b8_llama, fp8_b1; a prompt by its history."""
    size = f"b{case.sequences}" if case.new == 1 else f"h{case.history}"
    heads = "_llama" if case.heads == LLAMA.heads else ""
    return f"{WORDS[case.kv_dtype or case.dtype]}_{size}{heads}"


def measure(
    case: Case, device: torch.device, *, bandwidth: float, seconds: float, flex: bool
) -> list[dict[str, object]]:
    """The lines of one case: our time with what explains it, and our ratio to what it is measured against."""
    batch = Batch(case, device)
    times = race(device, batch.layers, {"paged": paged(batch), **dict(rivals(batch, flex=flex))}, seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    kind, name = ("decode" if case.new == 1 else "prefill"), name_of(case)
    rate = case.bytes_read / medians["paged"]
    lines: list[dict[str, object]] = [
        {
            "name": f"{kind}_us_{name}",
            "value": round(medians["paged"] * 1e6, 1),
            "unit": "us",
            "sequences": case.sequences,
            "length": case.length,
            "heads": f"{case.heads}/{case.kv_heads}",
            "head_dim": case.head_dim,
            "dtype": str(case.dtype).removeprefix("torch."),
            "mb_read": round(case.bytes_read / 1e6, 2),
            "gb_per_second": round(rate / 1e9, 1),
            "share_of_copy": round(rate / bandwidth, 2),
            **{f"{rival}_us": round(value * 1e6, 1) for rival, value in medians.items() if rival != "paged"},
        }
    ]
    rival, word = ("contiguous_sdpa", "contiguous") if case.new == 1 else ("gather_sdpa", "gather")
    if rival in times:
        value = round(ratio(times, "paged", rival), 3)
        lines.append({"name": f"{kind}_vs_{word}_{name}", "value": value, "unit": "ratio", "turns": len(times[rival])})
    return lines


def small_name_of(case: SmallCase) -> str:
    """What the figures of a step's small operations are called: bf16_t32."""
    return f"{WORDS[case.dtype]}_t{case.tokens}"


def measure_small(case: SmallCase, *, seconds: float) -> Iterator[dict[str, object]]:
    """A line for each small operation: the native code's time as a share of torch's, and both."""
    for name, runners in small_races(case):
        times = race(torch.device("cpu"), case.layers, runners, seconds)
        yield {
            "name": f"{name}_vs_torch_{small_name_of(case)}",
            "value": round(ratio(times, "native", "torch"), 3),
            "unit": "ratio",
            "turns": len(times["torch"]),
            **{f"{who}_us": round(statistics.median(values) * 1e6, 1) for who, values in times.items()},
        }


COLOURS = {"paged": "#2563a8", "contiguous_sdpa": "#c2452d", "gather_sdpa": "#d99a2b", "flex": "#7a8a3c"}
OTHER, INK, GRID = "#77829a", "#1b2a41", "#e3e7ee"


def plot(lines: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draw the times of every case, in units of the paged one, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figures = [line for line in lines if line["unit"] == "us"]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(figures)), dpi=160, layout="constrained")
    for row, line in enumerate(figures):
        ours = float(str(line["value"]))
        times = {key.removesuffix("_us"): value for key, value in line.items() if key.endswith("_us")}
        for rival, value in {"paged": ours, **times}.items():
            axes.plot(float(str(value)) / ours, row, "o", markersize=8, color=COLOURS.get(rival, OTHER))
    axes.set_yticks(range(len(figures)), [f"{line['name']}   {line['value']} us" for line in figures], color=INK)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("time, in units of the paged attention's", color=INK)
    axes.grid(axis="x", which="both", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    for rival, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=rival.replace("_", " "))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=len(COLOURS), frameon=False)
    figure.savefig(path, format="png")
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, and draw the plot if asked to; 1 where a case failed, and the others were measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description="Paged attention and its rivals.")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw all times (PNG)")
    parser.add_argument("--flex", action="store_true", help="let flex attention run too, where torch can compile it")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each race (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this, such as bf16_b8")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = copy_bandwidth(device)
    lines: list[dict[str, object]] = [
        {"name": "copy_gb_per_second", "value": round(bandwidth / 1e9, 1), "unit": "GB/s", "device": device.type}
    ]
    print(json.dumps(lines[0]), flush=True)
    failed = 0
    for case in cases(device):
        if options.only not in name_of(case):
            continue
        try:
            measured = measure(case, device, bandwidth=bandwidth, seconds=options.seconds, flex=options.flex)
        except (RuntimeError, ValueError):  # too little memory, or a kernel's own: the others are still told
            failed += 1
            print(f"{name_of(case)} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        for line in measured:
            print(json.dumps(line), flush=True)
            lines.append(line)
    for case in small_cases() if device.type == "cpu" else ():
        if options.only in small_name_of(case):
            for line in measure_small(case, seconds=options.seconds / 4):
                print(json.dumps(line), flush=True)
    if options.plot:
        plot(lines, options.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
