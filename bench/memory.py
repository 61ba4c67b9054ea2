"""How much of the reserved cache memory holds tokens: the chapter's three figures, from the real ledger.

    python -m bench.memory                   one JSON object a line
    python -m bench.memory --plot out.png    and utilisation against the block size, drawn

Nothing is computed here: sequences are attached, reserved and committed as a worker would, and the blocks counted.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cache_manager.core.block_table import blocks_needed
from cache_manager.core.ledger import Ledger
from octavo.ids import Epoch, SequenceId
from octavo.records.fleet import PoolSpec
from octavo.records.scope import Scope

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIVE_LENGTHS = (
    *(188, 227, 481, 284, 298, 479, 422, 255, 220, 251, 470, 261, 499, 255, 425, 163),
    *(339, 307, 46, 200, 240, 392, 153, 91, 471, 410, 120, 254, 479, 423, 475, 346),
)
"""Tokens of the chapter's 32 live requests."""

SLOT_TOKENS = 1024
"""What an engine without paging reserves for every request."""

BLOCK_SIZE = 16

Figure = dict[str, float]


def packing(lengths: Sequence[int] = LIVE_LENGTHS, block_size: int = BLOCK_SIZE) -> Figure:
    """Live requests that share nothing: slots reserved in fixed pieces, and in blocks."""
    ledger = _open(block_size, num_blocks=sum(blocks_needed(length, block_size) for length in lengths))
    for number, length in enumerate(lengths):
        _compute(ledger, number, [number] * length)
    stored, static = sum(lengths), len(lengths) * SLOT_TOKENS
    paged = ledger.num_held * block_size
    return {
        "requests": len(lengths),
        "tokens_stored": stored,
        "static_slots_reserved": static,
        "paged_slots_reserved": paged,
        "static_utilization": round(stored / static, 3),
        "paged_utilization": round(stored / paged, 3),
    }


def forks(prompt_tokens: int = 40, samples: int = 4) -> Figure:
    """Samples of one prompt, whose parent lives on: blocks before the fork, after it, and after each wrote a token."""
    ledger = _open(BLOCK_SIZE, num_blocks=64)
    parent, children = SequenceId(0), [SequenceId(1 + sample) for sample in range(samples)]
    _compute(ledger, parent, list(range(prompt_tokens)))
    before = ledger.num_held
    ledger.fork(parent, children)
    forked = ledger.num_held
    for sample in children:
        ledger.reserve(sample, 1)
        ledger.commit(sample, [1000 + sample])
    return {
        "parent_blocks": before,
        f"new_blocks_after_{samples}_forks": forked - before,
        "new_blocks_after_each_sample_writes_a_token": ledger.num_held - forked,
    }


def sharing(requests: int = 8, shared_tokens: int = 96, own_tokens: int = 8) -> Figure:
    """Live requests that begin alike: tokens prefilled and blocks held, against tenants who may not share."""
    system = list(range(shared_tokens))
    prompts = [system + [1000 + number] * own_tokens for number in range(requests)]
    together, apart = _open(BLOCK_SIZE, num_blocks=1024), _open(BLOCK_SIZE, num_blocks=1024)
    prefilled = 0
    for number, prompt in enumerate(prompts):
        prefilled += _compute(together, number, prompt)
        _compute(apart, number, prompt, salt=number.to_bytes(32, "little"))
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "tokens_prefilled": prefilled,
        "blocks_in_use": together.num_held,
        "blocks_without_sharing": apart.num_held,
    }


def _open(block_size: int, num_blocks: int) -> Ledger:
    spec = PoolSpec(
        model="none",
        model_digest=bytes(32),
        tokenizer_digest=bytes(32),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_tokens=SLOT_TOKENS,
        vocab_size=1 << 16,
    )
    return Ledger(spec, Epoch(1))


def _compute(ledger: Ledger, number: int, prompt: list[int], salt: bytes = b"") -> int:
    """Take a prompt in, as a worker does. Returns how many of its tokens had to be computed."""
    sequence = SequenceId(number)
    reused = ledger.attach(sequence, prompt, Scope(salt=salt))
    assert isinstance(reused, int), reused  # one after another: nobody waits
    missing = prompt[reused:]
    ledger.reserve(sequence, len(missing))
    ledger.commit(sequence, missing)
    return len(missing)


INK, QUIET, GRID, BLUE, RED = "#1b2a41", "#77829a", "#e3e7ee", "#2563a8", "#c2452d"


def plot(path: Path) -> None:
    """Draw utilisation against block sizes 1-128, for the chapter's requests, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    sizes = range(1, 129)
    curve = [packing(block_size=size)["paged_utilization"] for size in sizes]
    static, chosen = packing()["static_utilization"], curve[BLOCK_SIZE - 1]

    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=160)
    figure.subplots_adjust(left=0.105, right=0.875, top=0.81, bottom=0.115)
    _set_up(axes)
    axes.fill_between(sizes, static, curve, color=BLUE, alpha=0.07, linewidth=0)
    axes.plot(sizes, curve, color=BLUE, linewidth=2.4, solid_capstyle="round")
    axes.plot([1, 128], [static, static], color=RED, linewidth=1.8, linestyle=(0, (4, 2.5)))
    axes.plot([BLOCK_SIZE] * 2, [0, chosen], color=BLUE, linewidth=1, linestyle=(0, (1, 2)))
    axes.plot([BLOCK_SIZE], [chosen], "o", color=BLUE, markersize=9, markeredgecolor="white", markeredgewidth=1.8)
    bold = {"fontweight": "bold", "fontsize": 11}
    axes.text(15, chosen - 0.075, f"blocks of {BLOCK_SIZE}: {chosen:.1%}", color=INK, ha="right", va="center", **bold)
    axes.text(136, curve[-1], "paged", color=BLUE, va="center", **bold)
    axes.text(136, static, f"fixed slots\nof {SLOT_TOKENS:,}", color=RED, va="center", **bold)
    axes.text(1.06, static + 0.02, f"{static:.1%}", color=RED, va="bottom", **bold)
    figure.text(0.105, 0.92, "How much of the reserved cache holds tokens", color=INK, fontsize=16, fontweight="bold")
    figure.text(
        0.105,
        0.865,
        f"{len(LIVE_LENGTHS)} live requests of {min(LIVE_LENGTHS)} to {max(LIVE_LENGTHS)} tokens, nothing shared: "
        f"blocks of {BLOCK_SIZE} fit {chosen / static:.1f} times as many into the same memory",
        color=QUIET,
        fontsize=10,
    )
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _set_up(axes: "Axes") -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, 128)
    ticks = [1, 2, 4, 8, 16, 32, 64, 128]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("block size, token positions (log scale)", color=INK, labelpad=8)
    axes.set_ylabel("utilisation of reserved slots", color=INK, labelpad=8)
    axes.tick_params(colors=INK, length=0, which="both", pad=6)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures, and draw the plot if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description="The memory figures of the real ledger."
    )
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw utilisation against block sizes 1-128 (PNG)")
    options = parser.parse_args(arguments)
    for name, unit, key, figure in (
        ("paged_utilization", "ratio", "paged_utilization", packing()),
        ("fork_new_blocks", "blocks", "new_blocks_after_each_sample_writes_a_token", forks()),
        ("prefix_tokens_prefilled", "tokens", "tokens_prefilled", sharing()),
    ):
        print(json.dumps({"name": name, "value": figure[key], "unit": unit, **figure}))
    if options.plot:
        plot(options.plot)


if __name__ == "__main__":
    main()
