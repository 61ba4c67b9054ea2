"""How many blocks of real requests are found, under the cache manager's eviction order and under plain LRU.

    python -m bench.eviction [--quick]

Replays the four traces of bench/traces through the real books (attach, reserve, commit, free; one request after
another), in a pool of 25 % and of 100 % of the trace's working set: the blocks with which plain LRU finds 95 % of what
could be found in a pool without end. Each trace alone, and mixed with sweeps: after every two pools of blocks that it
asks for comes a pool of blocks in prompts that nobody asks for again. A figure is the part of the trace's own blocks
that was found, in per cent; beside it plain LRU's, from the same run. One JSON object a line.

A prompt that the pool cannot hold is left out. Answers are not replayed: the traces do not say what is in them.
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.replay import TRACES, Prompt, open_books
from cache_manager.core.eviction import PLAIN_LRU, SEGMENTED, EvictionPolicy
from cache_manager.core.ledger import Ledger
from octavo.ids import SequenceId

WORKING_SETS = {"mooncake": 33_064, "ragpulse": 1_535, "claude_code": 24_321, "agent_text": 2_177}
"""Blocks: found by bisection with plain LRU."""

SHARES = (25, 100)
"""Per cent of the working set."""

FIRST_SWEPT = 1 << 30
"""The first number of a block that is swept; traces have smaller ones."""

END = (1 << 31) - 1
"""The token after a prompt's blocks, which is not written: a hit leaves at least one token to compute."""

QUICK_REQUESTS = 60


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    prompt: Prompt
    counts: bool
    """Whether it is the trace's own."""


def alone(prompts: Iterable[Prompt]) -> Iterator[Request]:
    """The trace as it is."""
    return (Request(prompt, counts=True) for prompt in prompts)


def with_sweeps(prompts: Sequence[Prompt], num_blocks: int) -> Iterator[Request]:
    """The trace, and a pool of blocks that come once after every two pools of its own."""
    mean = sum(map(len, prompts)) // len(prompts)
    length = max(1, min(mean, num_blocks // 8))
    fresh = itertools.count(FIRST_SWEPT)
    asked = 0
    for prompt in prompts:
        yield Request(prompt, counts=True)
        asked += len(prompt)
        if asked >= 2 * num_blocks:
            asked = 0
            for _ in range(0, num_blocks, length):
                yield Request(list(itertools.islice(fresh, length)), counts=False)


def hit_percent(requests: Iterable[Request], num_blocks: int, policy: EvictionPolicy) -> float:
    """Of the trace's blocks, those found."""
    ledger = open_books(num_blocks, policy)
    asked = found = 0
    for sequence, request in enumerate(requests):
        prompt = request.prompt
        if not 0 < len(prompt) < num_blocks:
            continue
        hit = replay(ledger, SequenceId(sequence % (1 << 32)), prompt)
        if request.counts:
            asked, found = asked + len(prompt), found + hit
    return 100 * found / asked


def replay(ledger: Ledger, sequence: SequenceId, prompt: Prompt) -> int:
    """Compute a prompt and let it go. Returns how many of its blocks were found."""
    found = ledger.attach(sequence, [*prompt, END])
    assert isinstance(found, int), found  # nobody else computes anything
    if rest := prompt[found:]:
        ledger.reserve(sequence, len(rest))
        ledger.commit(sequence, rest)
    ledger.free(sequence)
    ledger.take_changes()
    return found


def report(quick: bool) -> Iterator[dict[str, object]]:
    """One object a figure."""
    for name, load in TRACES.items():
        prompts = load()[: QUICK_REQUESTS if quick else None]
        for share in SHARES:
            num_blocks = max(64, WORKING_SETS[name] * share // 100)
            for mixed in (False, True):
                requests = list(with_sweeps(prompts, num_blocks) if mixed else alone(prompts))
                lru, value = (hit_percent(requests, num_blocks, policy) for policy in (PLAIN_LRU, SEGMENTED))
                yield {
                    "name": f"hit_percent_{name}_{share}" + ("_swept" if mixed else ""),
                    "value": round(value, 2),
                    "unit": "%",
                    "lru": round(lru, 2),
                    "ratio_to_lru": round(value / lru, 3) if lru else None,
                    "num_blocks": num_blocks,
                    "requests": sum(request.counts for request in requests),
                }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests a trace: shows that it runs")
    for line in report(parser.parse_args(arguments).quick):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
