"""The transcripts beside this file, played against a scheduler with a real ledger.

    worker blocks=8 size=4 budget=8 running=4 [overlap=1]     everything starts
    submit a 1..10 max=4 [n=2] [stop=12] [priority=1]         requests have letters; tokens are numbers and ranges
    cancel a
    step                                         a step, with its exchanges: before it, or if they overlap beside it
    rest                                         steps until nothing is left to do or to tell

The model counts: sample i of a request says the last token + 1 + i. Sequences are called by their request, samples but
the first with their number behind: a, a.1, a.2.

The answer shows each exchange (what is told and asked, what is unmet or reused, who waits for whom), the tokens that
the step computes, and what the gateway hears. `a[0..8)` are positions. The last line is what the worker's load says,
and the free blocks.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.errors import OctavoError
from octavo.ids import SequenceId
from octavo.records.attend import Exchange, Grant
from octavo.records.sampling import SamplingParams
from octavo.records.serve import StepReport
from tests.support.scheduling import GATEWAY, World, submission
from tests.support.transcript import check_transcript
from worker.core.step import StepPlan

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_scheduler_answers_as_written(path, request):
    """S14, S18, S23 and S28 are among them, each named in its file."""
    check_transcript(path, Player().answer, rewrite=request.config.getoption("rewrite"))


def test_there_are_transcripts():
    assert TRANSCRIPTS


def counting(tokens: Sequence[int], sampling: SamplingParams, sample: int, vocab_size: int) -> int:
    return (tokens[-1] + 1 + sample) % vocab_size


class Player:
    """Plays commands against a world and puts what happens into words."""

    world: World

    def __init__(self):
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.names: dict[SequenceId, str] = {}

    def answer(self, command: str) -> str:
        try:
            lines = self.play(command)
        except OctavoError as error:
            lines = [f"{type(error).__name__}: {error}"]
        load, audit = self.world.scheduler.load(), self.world.ledger.audit()
        counts = f"{load.running_sequences} run, {load.waiting_sequences} wait, {load.preemptions} preempted"
        return "\n".join([*lines, f"{counts}; {audit.free_blocks + audit.cached_blocks} blocks free"])

    def play(self, command: str) -> list[str]:
        verb, *words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        match verb:
            case "worker":
                self.world = World(
                    num_blocks=int(options["blocks"]),
                    block_size=int(options["size"]),
                    max_step_tokens=int(options["budget"]),
                    max_running=int(options["running"]),
                    model=counting,
                    overlap="overlap" in options,
                )
            case "submit":
                self.submit(words[0], tokens_in(word for word in words[1:] if "=" not in word), options)
            case "cancel":
                self.world.scheduler.cancel(GATEWAY, number(words[0]))
            case "step":
                return self.step()
            case "rest":
                return self.rest()
            case _:
                raise ValueError(f"no such command: {command}")
        return []

    def submit(self, letter: str, prompt: tuple[int, ...], options: dict[str, str]) -> None:
        stops = frozenset({int(options["stop"])} if "stop" in options else ())
        wanted = submission(
            number(letter),
            prompt,
            int(options["max"]),
            samples=int(options.get("n", 1)),
            stop_tokens=stops,
            priority=int(options.get("priority", 0)),
        )
        self.world.submit(wanted)
        self.prompts[letter] = prompt

    def step(self) -> list[str]:
        rounds, reports = len(self.world.exchanges), len(self.world.reports)
        plan = self.world.step()
        before = self.world.rounds_before_step
        lines = [line for asked in self.world.exchanges[rounds:before] for line in self.exchange(*asked)]
        if plan.chunks:
            lines.append("compute " + self.chunks(plan))
        for asked in self.world.exchanges[before:]:
            first, *others = self.exchange(*asked)
            lines += [f"meanwhile {first}", *others]
        return lines + [line for report in self.world.reports[reports:] for line in self.heard(report)]

    def rest(self) -> list[str]:
        lines = []
        while self.world.scheduler.has_news:
            lines += self.step()
        return lines

    def exchange(self, exchange: Exchange, grant: Grant) -> list[str]:
        for attach in exchange.attaches:
            self.names[attach.sequence] = self.name_of(attach.tokens)
        asked = [f"commit {self.names[part.sequence]} +{len(part.tokens)}" for part in exchange.commits]
        for fork in exchange.forks:
            parent = self.names[fork.parent]
            self.names |= {child: f"{parent}.{at}" for at, child in enumerate(fork.children, 1)}
            asked.append(f"fork {parent} -> {self.all(fork.children)}")
        asked += [f"free {self.names[part]}" for part in exchange.finished]
        asked += [f"attach {self.names[part.sequence]}" for part in exchange.attaches]
        asked += [f"reserve {self.names[part.sequence]} {part.positions}" for part in exchange.reserves]
        reused = [f"{self.names[sequence]} reuses {count}" for sequence, count in grant.attached if count]
        reused += [f"{self.names[sequence]} waits for {self.names[leader]}" for sequence, leader in grant.waiting]
        unmet = [f"unmet {self.all(grant.unmet)}"] if grant.unmet else []
        return ["; ".join(asked or ["nothing to tell or ask"])] + ["    " + line for line in reused + unmet]

    def name_of(self, tokens: tuple[int, ...]) -> str:
        """Prompts differ, and so do the first words of a request's samples."""
        letter = next(letter for letter, prompt in self.prompts.items() if tokens[: len(prompt)] == prompt)
        at = len(self.prompts[letter])
        sample = tokens[at] - tokens[at - 1] - 1 if len(tokens) > at else 0
        return f"{letter}.{sample}" if sample else letter

    def all(self, sequences: Sequence[SequenceId]) -> str:
        return " ".join(self.names[sequence] for sequence in sequences)

    def chunks(self, plan: StepPlan) -> str:
        return " ".join(f"{self.names[chunk.sequence]}[{chunk.start}..{chunk.end})" for chunk in plan.chunks)

    def heard(self, report: StepReport) -> list[str]:
        said = [f"{sample_name(new.request, new.sample)} says {new.tokens[0]}" for new in report.tokens]
        ended = [f"{sample_name(end.request, end.sample)} ends: {end.reason.value}" for end in report.finished]
        prefilled = [
            f"{letter_of(done.request)} is prefilled, {done.cached_tokens} cached" for done in report.prefilled
        ]
        return ["; ".join(prefilled + said + ended)]


def tokens_in(words) -> tuple[int, ...]:
    tokens: list[int] = []
    for word in words:
        start, _, end = word.partition("..")
        tokens += range(int(start), int(end or start) + 1)
    return tuple(tokens)


def number(letter: str) -> int:
    return ord(letter) - ord("a")


def letter_of(request: int) -> str:
    return chr(ord("a") + request)


def sample_name(request: int, sample: int) -> str:
    return f"{letter_of(request)}.{sample}" if sample else letter_of(request)
