"""Where requests go, and what that costs them: Octavo's rule beside others on traces of real requests.

    python -m bench.routing [--quick] [--busy 0.7] [--prefill 8000] [--decode 40] [--plot out.png]
    python -m bench.routing --trace requests.jsonl.gz --block-tokens 512
    python -m bench.routing --half 2            # or 1: of each trace, as a trace of its own
    python -m bench.routing --sensitivity       # the rule with each of its shares halved and doubled, nothing else

Replays traces through the real gateway core and real books of 8 workers that only take time (bench/fleet_model.py),
with 25 % and 100 % of the trace's working set in the fleet: the blocks with which plain LRU finds 95 % of what could be
found in a pool without end. Each worker has an eighth of it, and room for what runs: its longest request, and twice
what it decodes on average. The policies are those of bench/routing_rivals.py; `global_cache` is the bound: one cache
that all workers reach at once.

Arrivals keep their order and proportions; they are stretched or compressed until a fleet that computes nothing twice
would compute prompts for `--busy` of the time. Of a long trace the first requests are replayed, up to 150,000 blocks
of prompts. No clock is read.

`hit_vs_global_TRACE_100` and `p95_vs_best_TRACE_25`, `_100` compare: blocks found with those of the global cache, and
the 95th percentile of the time to the first token with the least of the other policies (without the bound).
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
SEED = 1

Line = dict[str, object]


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace, and the fleet that it is played to."""

    trace: Timed
    share: int
    blocks_per_worker: int
    stretch: float
    rates: Rates

    def play(self, name: str) -> Outcome:
        """With the policy of that name."""
        fleet = ModelledFleet(
            WORKERS, self.blocks_per_worker, self.rates, self.trace.block_tokens, shared=name == BOUND
        )
        return fleet.play(self.trace.arrivals, self.stretch, (policies() | variants())[name](), SEED)


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
    """The fleet for a share of a trace's working set."""
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


class Played(Protocol):
    """Plays by each name, in order: `map`, or that of an executor."""

    def __call__(self, play: Callable[[str], Outcome], names: Iterable[str], /) -> Iterable[Outcome]:
        """One outcome a name."""
        ...


def report(
    traces: Sequence[Timed], rates: Rates, busy: float, played: Played, *, sensitivity: bool = False
) -> Iterator[Line]:
    """One object a figure."""
    names = [OWN, *variants()] if sensitivity else [*policies()]
    for trace in traces:
        for share in SHARES:
            place = setting(trace, share, rates, busy)
            outcomes = dict(zip(names, played(place.play, names), strict=True))
            yield from (_line(place, name, outcome) for name, outcome in outcomes.items())
            if not sensitivity:
                yield from _compared(place, outcomes)


def _line(place: Setting, policy: str, outcome: Outcome) -> Line:
    return {
        "name": f"ttft_p95_{place.trace.name}_{place.share}_{policy}",
        "value": round(outcome.ttft_p95, 3),
        "unit": "s",
        "trace": place.trace.name,
        "share": place.share,
        "policy": policy,
        **{name: round(value, 3) for name, value in asdict(outcome).items()},
        "requests": len(place.trace.arrivals),
        "blocks_per_worker": place.blocks_per_worker,
        "stretch": round(place.stretch, 4),
    }


def _compared(place: Setting, outcomes: dict[str, Outcome]) -> Iterator[Line]:
    own, bound = outcomes[OWN], outcomes[BOUND]
    suffix = f"{place.trace.name}_{place.share}"
    yield {
        "name": f"hit_vs_global_{suffix}",
        "value": round(own.hit_percent / bound.hit_percent, 3) if bound.hit_percent else None,
        "unit": "ratio",
    }
    rivals = {name: outcome.ttft_p95 for name, outcome in outcomes.items() if name not in (OWN, BOUND)}
    best = min(rivals, key=rivals.__getitem__)
    yield {
        "name": f"p95_vs_best_{suffix}",
        "value": round(own.ttft_p95 / rivals[best], 3),
        "unit": "ratio",
        "best": best,
        "of_global": round(own.ttft_p95 / bound.ttft_p95, 3),
    }


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
    parser.add_argument("--sensitivity", action="store_true", help="the rule alone, with other shares")
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
        for line in report(traces, rates, given.busy, played, sensitivity=given.sensitivity):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if given.plot is not None:
        plot(lines, given.plot)


if __name__ == "__main__":
    main()
