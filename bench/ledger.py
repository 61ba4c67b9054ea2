"""What a request costs in the books: the ledger at 100k and 1M blocks, and the chapter's allocator beside it.

    python -m bench.ledger [--quick] [--compiled]

A request is a prompt of 1,024 tokens, half of which is found, and 64 tokens decoded, in a pool that is full of what can
be found. Everything is on: the hash chain, publishing, eviction, judging, what the worker is told. It is done in three
ways:

- `ledger_us_...`: call by call as a worker asks, which tells what it decoded and asks for more when a block is full:
  attach, reserve, commit, four times reserve and commit, free.
- `ledger_by_token_us_...`: the same with a reserve and a commit for each of the 64 tokens.
- `ledger_exchange_us_...`: whole exchanges with 64 sequences in flight, one of which starts and one ends in each, and a
  commit and a reserve for all others. The time of one exchange.

Medians of CPU time, which moves with the machine; so each line tells what a request's hashes alone cost, one for each
block that it publishes. One JSON object a line, which says whether the books are compiled (ADR 38). With `--compiled`
they are compiled, and measured after these in a process of their own.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.chapter import ChapterBooks
from cache_manager.core.ledger import Ledger, is_compiled
from deploy.compiled_core import compile_core
from octavo.hashing import HASH_BYTES, next_hash
from octavo.ids import Epoch, SequenceId
from octavo.records.attend import Attach, Commit, Exchange, Reservation
from octavo.records.fleet import PoolSpec

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
SHARED_TOKENS = PROMPT_TOKENS // 2
DECODED_TOKENS = 64
PREFIXES = 16
"""Different beginnings of prompts, each taken in its turn."""

REQUEST_BLOCKS = (PROMPT_TOKENS + DECODED_TOKENS - SHARED_TOKENS) // BLOCK_SIZE
"""Taken anew by each request."""

HASHES = (PROMPT_TOKENS + DECODED_TOKENS - SHARED_TOKENS) // BLOCK_SIZE
"""Computed for each request: one for each full block that it publishes."""

VOCAB_SIZE = 49152

Tokens = Sequence[int]
Request = Callable[[], None]


class Prompts:
    """An endless row of prompts that begin like one before them and go on like none."""

    def __init__(self) -> None:
        self._random = random.Random(25)
        self._prefixes = itertools.cycle([self.draw(SHARED_TOKENS) for _ in range(PREFIXES)])

    def draw(self, count: int) -> "array[int]":
        """Random tokens, in the form in which they come off the wire."""
        return array("I", self._random.choices(range(VOCAB_SIZE), k=count))

    def next(self) -> "array[int]":
        """The next prompt."""
        return next(self._prefixes) + self.draw(PROMPT_TOKENS - SHARED_TOKENS)


def open_ledger(num_blocks: int) -> Ledger:
    """Empty books."""
    pool = PoolSpec(
        model="bench",
        model_digest=bytes(HASH_BYTES),
        tokenizer_digest=bytes(HASH_BYTES),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_tokens=8192,
        vocab_size=VOCAB_SIZE,
    )
    return Ledger(pool, Epoch(1))


def ledger_by_block(ledger: Ledger) -> Iterator[Request]:
    """Requests that live one after the other, from a worker that tells full blocks."""
    return _ledger_call_by_call(ledger, tokens_a_call=BLOCK_SIZE)


def ledger_by_token(ledger: Ledger) -> Iterator[Request]:
    """The same from one that tells each token."""
    return _ledger_call_by_call(ledger, tokens_a_call=1)


def _ledger_call_by_call(ledger: Ledger, tokens_a_call: int) -> Iterator[Request]:
    prompts = Prompts()
    for sequence in map(SequenceId, itertools.count()):
        prompt = prompts.next()
        tokens = prompts.draw(DECODED_TOKENS)
        decoded: list[Tokens] = [tokens[at : at + tokens_a_call] for at in range(0, DECODED_TOKENS, tokens_a_call)]

        def request(sequence: SequenceId = sequence, prompt: Tokens = prompt, decoded: list[Tokens] = decoded) -> None:
            reused = ledger.attach(sequence, prompt)
            assert isinstance(reused, int), reused  # nobody else computes anything
            rest = prompt[reused:]
            ledger.reserve(sequence, len(rest))
            ledger.commit(sequence, rest)
            for part in decoded:
                ledger.reserve(sequence, len(part))
                ledger.commit(sequence, part)
            ledger.free(sequence)
            ledger.apply(Exchange(epoch=ledger.epoch, step=sequence))  # what happened is told to the worker,
            ledger.take_changes()  # and to Redis

        yield request


def ledger_by_exchange(ledger: Ledger) -> Iterator[Request]:
    """Steps of a worker that decodes 64 sequences; in each, the oldest ends and a new one is computed."""
    prompts = Prompts()
    rest: Tokens = ()
    alive: deque[SequenceId] = deque()
    for step in itertools.count(1):
        ends = (alive.popleft(),) if len(alive) > DECODED_TOKENS else ()
        written: dict[SequenceId, Tokens] = dict.fromkeys((*ends, *alive), (step % VOCAB_SIZE,))
        if alive:
            written[alive[-1]] = rest
        new, prompt = SequenceId(step), prompts.next()
        exchange = Exchange(
            epoch=ledger.epoch,
            step=step,
            commits=tuple(Commit(sequence, array("I", tokens)) for sequence, tokens in written.items()),
            finished=ends,
            attaches=(Attach(new, prompt),),
            reserves=(*(Reservation(sequence, 1) for sequence in alive), Reservation(new, PROMPT_TOKENS)),
        )
        alive.append(new)

        def request(exchange: Exchange = exchange) -> None:
            nonlocal rest
            grant = ledger.apply(exchange)
            rest = exchange.attaches[0].tokens[grant.attached[0][1] :]
            ledger.take_changes()

        yield request


def chapter(books: ChapterBooks) -> Iterator[Request]:
    """The same requests in the chapter's books, which publish prompts only."""
    prompts = Prompts()
    for sequence in itertools.count():
        prompt = prompts.next().tolist()

        def request(sequence: int = sequence, prompt: list[int] = prompt) -> None:
            rest = PROMPT_TOKENS - books.attach(sequence, prompt)
            books.reserve(sequence, rest)
            books.commit(sequence, rest)
            books.remember(sequence, prompt)
            for _ in range(DECODED_TOKENS):
                books.reserve(sequence, 1)
                books.commit(sequence, 1)
            books.free(sequence)

        yield request


def timed(requests: Iterator[Request], warm_up: int, count: int) -> list[float]:
    """CPU microseconds of each of `count` requests, after `warm_up` that fill the pool."""
    for request in itertools.islice(requests, warm_up):
        request()
    taken: list[float] = []
    for request in itertools.islice(requests, count):
        started = time.thread_time_ns()
        request()
        taken.append((time.thread_time_ns() - started) / 1000)
    return taken


def measure_ledger(drive: Callable[[Ledger], Iterator[Request]], num_blocks: int, count: int) -> list[float]:
    """Microseconds of each request. The pool is full and half of each prompt is found, or this raises."""
    ledger = open_ledger(num_blocks)
    requests = drive(ledger)
    timed(requests, warm_up=num_blocks // (REQUEST_BLOCKS - 2) + PREFIXES, count=1)
    before = ledger.stats()
    taken = timed(requests, warm_up=0, count=count)
    after = ledger.stats()
    hit = after.hit_tokens - before.hit_tokens
    evicted = after.evicted_blocks - before.evicted_blocks
    assert hit == count * SHARED_TOKENS, f"{hit} tokens found, {count * SHARED_TOKENS} expected"
    assert evicted >= count * (REQUEST_BLOCKS - 1), f"{evicted} blocks evicted by {count} requests"
    return taken


def measure_chapter(num_blocks: int, count: int) -> list[float]:
    """Microseconds of each request, the pool full."""
    books = ChapterBooks(num_blocks, BLOCK_SIZE)
    requests = chapter(books)
    new_blocks = (PROMPT_TOKENS - SHARED_TOKENS) // BLOCK_SIZE
    taken = timed(requests, warm_up=num_blocks // new_blocks, count=count)
    assert books.num_free < REQUEST_BLOCKS, f"{books.num_free} blocks free: nothing had to be evicted"
    return taken


def hashing_us() -> float:
    """What the hashes of one request cost."""
    block, parent = bytes(4 * BLOCK_SIZE), bytes(HASH_BYTES)
    taken: list[float] = []
    for _ in range(200):
        started = time.thread_time_ns()
        for _ in range(HASHES):
            parent = next_hash(parent, block)
        taken.append((time.thread_time_ns() - started) / 1000)
    return statistics.median(taken)


def report(sizes: dict[str, int], count: int, chapter_count: int) -> Iterator[dict[str, object]]:
    """One object a figure."""
    at_first: dict[str, float] = {}
    drives = {
        "ledger_us": ledger_by_block,
        "ledger_by_token_us": ledger_by_token,
        "ledger_exchange_us": ledger_by_exchange,
    }
    for size, num_blocks in sizes.items():
        for name, drive in drives.items():
            taken = measure_ledger(drive, num_blocks, count)
            least = at_first.setdefault(name, statistics.median(taken))
            yield _line(f"{name}_{size}", taken, num_blocks, ratio_to_smallest=statistics.median(taken) / least)
    size, num_blocks = next(iter(sizes.items()))
    taken = measure_chapter(num_blocks, chapter_count)
    ratio = statistics.median(taken) / at_first["ledger_us"]
    yield _line(f"chapter_us_{size}", taken, num_blocks, ratio_to_ledger=ratio)


def _line(name: str, taken: Sequence[float], num_blocks: int, **ratios: float) -> dict[str, object]:
    return {
        "name": name,
        "value": round(statistics.median(taken), 1),
        "unit": "us",
        "mean_us": round(statistics.fmean(taken), 1),
        "p99_us": round(sorted(taken)[int(0.99 * (len(taken) - 1))], 1),
        "hashing_us": round(hashing_us(), 1),
        "compiled": is_compiled(),
        "num_blocks": num_blocks,
        "requests": len(taken),
        **{ratio: round(value, 2) for ratio, value in ratios.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small pools and few requests: shows that it runs")
    parser.add_argument("--compiled", action="store_true", help="measure compiled books too")
    options = parser.parse_args(arguments)
    quick: bool = options.quick
    sizes = {"4k": 4_000, "8k": 8_000} if quick else {"100k": 100_000, "1m": 1_000_000}
    count, chapter_count = (50, 3) if quick else (1_000, 3)
    for line in report(sizes, count, chapter_count):
        print(json.dumps(line), flush=True)
    if options.compiled:
        measure_compiled(["--quick"] if quick else [])


def measure_compiled(arguments: Sequence[str]) -> None:
    """Do the same with compiled books. Raises RuntimeError where they cannot be compiled."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        compile_core(root, Path(folder))
        path = os.pathsep.join((folder, str(root)))
        command = [sys.executable, "-P", "-m", "bench.ledger", *arguments]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)


if __name__ == "__main__":
    main()
