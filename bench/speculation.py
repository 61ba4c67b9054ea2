"""What guesses bring: the same texts with and without, one after another, on the same runner.

    python -m bench.speculation [--model smollm2] [--draft MODEL] [--temperature 0] [--tokens 128] [--repeats 3]

The scheduler, a ledger and the runner in one process, one sequence at a time and eight at once, with and without
guesses in turns. Three kinds of text: a list to be continued, which repeats itself, one to be copied, and a story,
which hardly does. Guesses are what the text has said before or, with `--draft`, what that model says.
Prints, for each, tokens a second without and with guesses, their ratio, tokens a step, and the share of right guesses.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

from tokenizers import Tokenizer

from cache_manager.core.ledger import Ledger
from octavo import models
from octavo.commands.model import models_dir
from octavo.ids import Epoch
from octavo.models import ModelFolder
from octavo.records.fleet import PoolSpec
from octavo.records.sampling import SamplingParams
from octavo.records.serve import Submission
from worker.core.drafting import Drafter, Lookups, Source
from worker.core.scheduler import Scheduler
from worker.core.sequence import GatewayKey
from worker.draft_model import DraftModel, require_same_tokens
from worker.runner import Runner, RunnerOptions, open_runner

EPOCH = Epoch(1)
GATEWAY = GatewayKey(1)
DRAFT_BYTES = 256 << 20
TEXTS = {
    "list": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday,",
    "copy": "<|im_start|>user\nRepeat this text word by word: A printer folds a sheet three times, and sixteen pages "
    "lie in order. Cut, they are a section of a book; sewn to others, they are a book.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "story": "Once upon a time there was a library whose books could be bound into one another, and",
}


@dataclass(frozen=True)
class Measured:
    """One run."""

    tokens_per_second: float
    tokens_per_step: float
    texts: list[tuple[int, ...]]
    accepted: float
    """Share of the guesses that were right."""


def measure(  # noqa: PLR0913 - by keyword
    runner: Runner,
    pool: PoolSpec,
    prompt: list[int],
    *,
    batch: int,
    tokens: int,
    source: Source | None,
    temperature: float = 0.0,
) -> Measured:
    """Serve `batch` equal requests, whose prompts differ in their first token, on empty books."""
    drafter = None if source is None else Drafter(source)
    sampling = SamplingParams(temperature=temperature, seed=1)
    scheduler = Scheduler(pool, max_step_tokens=512, max_running=64, max_waiting=64, drafter=drafter)
    ledger = Ledger(pool, EPOCH)
    for number in range(batch):
        request = Submission(request=number, prompt=(number + 3, *prompt), max_tokens=tokens, sampling=sampling)
        scheduler.submit(request, GATEWAY)
    texts: list[list[int]] = [[] for _ in range(batch)]
    steps, exchanges = 0, 0
    started = time.perf_counter()
    while scheduler.busy:
        while (exchange := scheduler.ask(EPOCH, exchanges + 1)) is not None:
            exchanges += 1
            scheduler.granted(ledger.apply(exchange))
        steps += 1
        for report in scheduler.apply(runner.execute(scheduler.plan_step())).values():
            for new in report.tokens:
                texts[new.request] += new.tokens
    seconds = time.perf_counter() - started
    drawn = sum(map(len, texts))
    counts = scheduler.drafts
    share = counts.accepted / counts.drafted if counts.drafted else 0.0
    return Measured(drawn / seconds, drawn / steps / batch, [tuple(text) for text in texts], share)


def draft_source(folder: ModelFolder, served: ModelFolder, options: RunnerOptions) -> Source:
    """What the model of a folder says, on a pool for any eight texts.

    Raises:
        ValueError: it has other tokens than the served one.
    """
    require_same_tokens(folder, served)
    runner, pool = open_runner(folder, replace(options, kv_memory_bytes=DRAFT_BYTES))
    return DraftModel(
        runner.execute,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_tokens=folder.max_model_tokens,
    )


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description="What guesses bring, with and without.")
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--draft", help="a model with the same tokens, which guesses")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = models.find(options.model, models_dir())
    how = RunnerOptions(dtype=options.dtype, threads=options.threads)
    runner, pool = open_runner(folder, how)
    source: Source = Lookups()
    if options.draft is not None:
        source = draft_source(models.find(options.draft, models_dir()), folder, how)
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    print(f"{'text':6} {'batch':>5} {'plain tok/s':>12} {'guessing':>9} {'ratio':>6} {'tok/step':>9} {'right':>6} same")
    for name, text in TEXTS.items():
        prompt = tokenizer.encode(text).ids
        for batch in (1, 8):
            load = partial(
                measure, runner, pool, prompt, batch=batch, tokens=options.tokens, temperature=options.temperature
            )
            turns = [(load(source=None), load(source=source)) for _ in range(options.repeats)]
            plain, guessing = zip(*turns, strict=True)
            before, after = (statistics.median(one.tokens_per_second for one in runs) for runs in (plain, guessing))
            ratio = statistics.median(now.tokens_per_second / then.tokens_per_second for then, now in turns)
            last = guessing[-1]
            same = plain[-1].texts == last.texts
            print(
                f"{name:6} {batch:5} {before:12.1f} {after:9.1f} {ratio:6.2f} "
                f"{last.tokens_per_step:9.2f} {last.accepted:6.0%} {same}"
            )


if __name__ == "__main__":
    main()
