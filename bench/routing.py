"""Where requests go, and what that costs them: Octavo's rule beside others on traces of real requests.

    python -m bench.routing [--quick] [--busy 0.7] [--prefill 8000] [--decode 40] [--plot out.png]
    python -m bench.routing --trace requests.jsonl.gz --block-tokens 512
    python -m bench.routing --draws 5           # medians, and the range of what is compared
    python -m bench.routing --half 1 --shares   # the rule with other shares too, on the first half of each trace
    python -m bench.routing --half 2            # the rule as it is, on the second half

Replays traces through the real gateway core and real books of 8 workers that only take time (bench/fleet_model.py),
with 25 % and 100 % of the trace's working set in the fleet: the blocks with which plain LRU finds 95 % of what could be
found in a pool without end. Each worker has an eighth of it, and room for what runs: its longest request, and twice
what it decodes on average. The policies are those of bench/routing_rivals.py; `global_cache` is the bound: one cache
that all workers reach at once.

Arrivals keep their order and proportions; they are stretched or compressed until a fleet that computes nothing twice
would compute prompts for `--busy` of the time. Of a long trace the first requests are replayed, up to 150,000 blocks
of prompts. No clock is read. A half of a trace is a trace of its own, with its own working set: what is chosen on one
half is judged on the other.

One run is one draw. The first draw is the trace as it was recorded; in the others ties break otherwise, and every
request comes at a moment drawn evenly from its own time to the next later one, by the trace's median step at most (the
clock of `mooncake` ticks every three seconds). Of several draws each figure is the median, and what is compared has its
`least` and `most`.

`hit_vs_global_TRACE_100` and `p95_vs_best_TRACE_25`, `_100` compare: blocks found with those of the global cache, and
the 95th percentile of the time to the first token with the least of the other policies in the same draw (without the
bound).
"""

import argparse
import itertools
import json
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Protocol, cast

from bench.eviction import replay
from bench.fleet_model import ModelledFleet, Outcome, Rates
from bench.replay import TRACES, Prompt, Timed, open_books, timed, timed_file
from bench.routing_rivals import policies, variants
from octavo.ids import SequenceId

WORKERS = 8
SHARES = (25, 100)
"""Per cent of the working set."""
MAX_BLOCKS = 150_000
"""Of the prompts of a trace that are replayed."""
QUICK_BLOCKS = 3_000
BUSY = 0.7
FOUND_SHARE = 0.95
"""Of what a cache without end finds, by a working set."""
BOUND = "global_cache"
OWN = "octavo"

Line = dict[str, object]
Draw = dict[str, Outcome]
"""What became of one draw of a trace, by the name of the policy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace, and the fleet that it is played to."""

    trace: Timed
    share: int
    blocks_per_worker: int
    stretch: float
    rates: Rates
    draw: int = 1
    """Its number, and the seed by which ties break."""

    def play(self, name: str) -> Outcome:
        """With the policy of that name."""
        fleet = ModelledFleet(
            WORKERS, self.blocks_per_worker, self.rates, self.trace.block_tokens, shared=name == BOUND
        )
        return fleet.play(self.trace.arrivals, self.stretch, (policies() | variants())[name](), self.draw)


def cut(trace: Timed, most_blocks: int) -> Timed:
    """The first requests, up to so many blocks."""
    ends = itertools.accumulate(len(arrival.prompt) for arrival in trace.arrivals)
    count = sum(end <= most_blocks for end in ends)
    return Timed(trace.name, trace.block_tokens, trace.arrivals[: max(2, count)])


def half_of(trace: Timed, number: int) -> Timed:
    """The first (1) or second (2) half of the requests."""
    middle = len(trace.arrivals) // 2
    arrivals = trace.arrivals[:middle] if number == 1 else trace.arrivals[middle:]
    begins = arrivals[0].at
    return Timed(
        f"{trace.name}_half{number}", trace.block_tokens, [replace(each, at=each.at - begins) for each in arrivals]
    )


def working_set(prompts: Sequence[Prompt]) -> int:
    """The fewest blocks with which plain LRU finds FOUND_SHARE of what it would find without end."""
    total = sum(map(len, prompts))
    wanted = FOUND_SHARE * _lru_hits(prompts, total)
    low, high = 1, total
    while low < high:
        middle = (low + high) // 2
        if _lru_hits(prompts, middle) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def _lru_hits(prompts: Sequence[Prompt], capacity: int) -> int:
    """Leading blocks found. A chain's tail counts as used before its head, so it goes first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += next((at for at, block in enumerate(prompt) if block not in cache), len(prompt))
        for block in reversed(prompt):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def setting(trace: Timed, share: int, rates: Rates, busy: float) -> Setting:
    """The fleet for a share of a trace's working set, and the trace's first draw."""
    cache = working_set([arrival.prompt for arrival in trace.arrivals]) * share // 100 // WORKERS
    blocks = cache + _room_to_run(trace, rates, _stretch(trace, cache, rates, busy))
    return Setting(trace, share, blocks, _stretch(trace, blocks, rates, busy), rates)


def _stretch(trace: Timed, blocks_per_worker: int, rates: Rates, busy: float) -> float:
    """What makes a fleet with one cache of that size compute prompts for `busy` of the time."""
    cache = open_books(max(1, blocks_per_worker) * WORKERS)
    tokens = 0
    for number, arrival in enumerate(trace.arrivals):
        fits = len(arrival.prompt) < cache.spec.num_blocks
        found = replay(cache, SequenceId(number), arrival.prompt) if fits else 0
        tokens += max(1, arrival.prompt_tokens - found * trace.block_tokens)
    return tokens / (WORKERS * rates.prefill * busy) / max(1e-9, trace.arrivals[-1].at)


def _room_to_run(trace: Timed, rates: Rates, stretch: float) -> int:
    """Blocks of a worker for its longest request, and twice for those that decode on average."""
    sizes = [len(each.prompt) + 1 + -(-each.output_tokens // trace.block_tokens) for each in trace.arrivals]
    block_seconds = sum(
        size * each.output_tokens / rates.decode for size, each in zip(sizes, trace.arrivals, strict=True)
    )
    return max(sizes) + round(2 * block_seconds / (trace.arrivals[-1].at * stretch * WORKERS))


def drawn(place: Setting, number: int) -> Setting:
    """The trace as it was recorded (1), or with each arrival moved within a step of the recording's clock."""
    if number == 1:
        return place
    trace, random = place.trace, Random(number)
    times = sorted({arrival.at for arrival in trace.arrivals})
    steps = {at: later - at for at, later in itertools.pairwise(times)}
    longest = median(steps.values())
    moved = [
        replace(each, at=each.at + random.random() * min(longest, steps.get(each.at, longest)))
        for each in trace.arrivals
    ]
    moved.sort(key=lambda each: each.at)
    return replace(place, trace=replace(trace, arrivals=moved), draw=number)


class Played(Protocol):
    """Plays by each name, in order: `map`, or that of an executor."""

    def __call__(self, play: Callable[[str], Outcome], names: Iterable[str], /) -> Iterable[Outcome]:
        """One outcome a name."""
        ...


def report(
    traces: Sequence[Timed], rates: Rates, busy: float, played: Played, *, draws: int = 1, shares: bool = False
) -> Iterator[Line]:
    """One object a figure; with `shares`, the rule with others than its own too."""
    own = [OWN, *variants()] if shares else [OWN]
    names = [*own, *(name for name in policies() if name != OWN)]
    for trace in traces:
        for share in SHARES:
            place = setting(trace, share, rates, busy)
            outcomes = [
                dict(zip(names, played(drawn(place, number + 1).play, names), strict=True)) for number in range(draws)
            ]
            yield from (_line(place, name, [draw[name] for draw in outcomes]) for name in names)
            for name in own:
                yield from _compared(f"{trace.name}_{share}" + (f"_{name}" if name != OWN else ""), name, outcomes)


def _line(place: Setting, policy: str, outcomes: Sequence[Outcome]) -> Line:
    """Medians of the draws."""
    draws = [asdict(outcome) for outcome in outcomes]
    figures = {name: round(median(draw[name] for draw in draws), 3) for name in draws[0]}
    return {
        "name": f"ttft_p95_{place.trace.name}_{place.share}_{policy}",
        "value": figures["ttft_p95"],
        "unit": "s",
        "trace": place.trace.name,
        "share": place.share,
        "policy": policy,
        **figures,
        "requests": len(place.trace.arrivals),
        "blocks_per_worker": place.blocks_per_worker,
        "stretch": round(place.stretch, 4),
    }


def _compared(suffix: str, policy: str, outcomes: Sequence[Draw]) -> Iterator[Line]:
    """With the bound and the best of the others, draw by draw."""
    hits = [draw[policy].hit_percent / draw[BOUND].hit_percent for draw in outcomes if draw[BOUND].hit_percent]
    yield {"name": f"hit_vs_global_{suffix}", **_in_short(hits), "unit": "ratio"}
    rivals = [_rivals(draw) for draw in outcomes]
    waits = [draw[policy].ttft_p95 / min(others.values()) for draw, others in zip(outcomes, rivals, strict=True)]
    yield {
        "name": f"p95_vs_best_{suffix}",
        **_in_short(waits),
        "unit": "ratio",
        "best": sorted({min(others, key=others.__getitem__) for others in rivals}),
        "of_global": round(median(draw[policy].ttft_p95 / draw[BOUND].ttft_p95 for draw in outcomes), 3),
    }


def _rivals(draw: Draw) -> dict[str, float]:
    """The 95th percentile of each policy that is used elsewhere."""
    return {name: draw[name].ttft_p95 for name in policies() if name not in (OWN, BOUND)}


def _in_short(ratios: Sequence[float]) -> Line:
    """The median of the draws and, of several, the range."""
    if not ratios:
        return {"value": None}
    ends = {"least": round(min(ratios), 3), "most": round(max(ratios), 3)} if len(ratios) > 1 else {}
    return {"value": round(median(ratios), 3), **ends}


def plot(lines: Sequence[Line], path: Path) -> None:
    """Draw hits against the 95th percentile of the time to the first token, a panel for each trace and share."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    places = list(dict.fromkeys((line["trace"], line["share"]) for line in lines if "policy" in line))
    columns = len(SHARES)
    figure, grid = pyplot.subplots(
        -(-len(places) // columns), columns, figsize=(11, 3.2 * -(-len(places) // columns)), dpi=100, squeeze=False
    )
    for axes, (trace, share) in zip(grid.flat, places, strict=False):
        axes.set(title=f"{trace}, {share} % of the working set", xlabel="blocks found, %", ylabel="TTFT p95, s")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.3, y=0.15)
        axes.grid(alpha=0.3, linewidth=0.5)
        here = [line for line in lines if (line.get("trace"), line.get("share")) == (trace, share)]
        for place, line in enumerate(sorted(here, key=lambda line: cast("float", line["ttft_p95"]))):
            colour = {OWN: "tab:blue", BOUND: "tab:green"}.get(str(line["policy"]), "0.4")
            at = line["hit_percent"], line["ttft_p95"]
            side = ("left", 5) if place % 2 else ("right", -5)  # neighbours' names stand apart
            axes.plot(*at, "o", color=colour, markersize=5)
            axes.annotate(
                str(line["policy"]),
                at,
                (side[1], 0),
                textcoords="offset points",
                fontsize=7,
                color=colour,
                ha=side[0],
                va="center",
            )
    figure.tight_layout()
    figure.savefig(path)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BLOCKS} blocks a trace: shows that it runs")
    parser.add_argument("--only", choices=sorted(TRACES), help="one of the shipped traces")
    parser.add_argument("--trace", type=Path, help="another trace, in the form of bench/traces/README.md")
    parser.add_argument("--block-tokens", type=int, default=512, help="tokens of a block of --trace")
    parser.add_argument("--busy", type=float, default=BUSY, help="of the time, by a fleet with one cache")
    parser.add_argument("--prefill", type=float, default=Rates().prefill, help="prompt tokens a second and worker")
    parser.add_argument("--decode", type=float, default=Rates().decode, help="tokens a second and request")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="policies played at once")
    parser.add_argument("--half", type=int, choices=(1, 2), help="of each trace")
    parser.add_argument("--shares", action="store_true", help="the rule with other shares too")
    parser.add_argument("--draws", type=_positive, default=1, help="of each trace")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw hits against waits (PNG)")
    given = parser.parse_args(arguments)
    most = QUICK_BLOCKS if given.quick else MAX_BLOCKS
    if given.trace is not None:
        traces = [cut(timed_file(given.trace, given.block_tokens), most)]
    else:
        traces = [cut(timed(name), most) for name in ([given.only] if given.only else TRACES)]
    if given.half is not None:
        traces = [half_of(trace, given.half) for trace in traces]
    lines: list[Line] = []
    rates = Rates(prefill=given.prefill, decode=given.decode)
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as processes:
        played: Played = map if given.processes == 1 else processes.map
        for line in report(traces, rates, given.busy, played, draws=given.draws, shares=given.shares):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if given.plot is not None:
        plot(lines, given.plot)


if __name__ == "__main__":
    main()
