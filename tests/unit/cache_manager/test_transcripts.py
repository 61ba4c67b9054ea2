"""The transcripts beside this file, played against a ledger.

    pool blocks=8 size=4                open the books
    attach a 1..10 [salt=x]             sequences have letters; tokens are numbers and ranges
    reserve a 2
    commit a 5 6
    fork a -> b c [reserve=1]
    truncate a 4
    free a
    step                                lines of the above, indented, as one exchange
    order                               the free list, the next block to be taken first
    figures                             what was counted and is not 0

The answer tells what the worker is told (tables, copies), what the copies of the index are told (with a block's tokens
in place of its hash), and how many blocks are free, cached and held. The books are checked after every command.
"""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from cache_manager.core.changes import Change, Published
from cache_manager.core.ledger import Ledger
from cache_manager.core.single_flight import WaitFor
from octavo.errors import OctavoError
from octavo.hashing import next_hash
from octavo.ids import BlockHash, SequenceId
from octavo.records.attend import Attach, Commit, Exchange, Fork, Grant, Reservation, Truncation
from octavo.records.scope import Scope
from tests.support.books import EPOCH, idle, pool_spec
from tests.support.transcript import check_transcript

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_books_answer_as_written(path, request):
    """S5, S10, S18, S28 and S30 are among them, each named in its file."""
    check_transcript(path, Player().answer, rewrite=request.config.getoption("rewrite"))


def test_there_are_transcripts():
    assert TRANSCRIPTS


class Player:
    """Plays commands against a ledger and puts its answers into words."""

    ledger: Ledger

    def __init__(self):
        self.block_tokens = {}
        """What each hash stands for: the tokens of its block."""

    def answer(self, command: str) -> str:
        try:
            lines = self.play(command)
        except OctavoError as error:
            lines = [f"{type(error).__name__}: {with_letters(str(error))}"]
        self.ledger.check()
        audit = self.ledger.audit()
        lines += [line for change in self.ledger.take_changes() for line in self.change(change)]
        return "\n".join([*lines, f"{audit.free_blocks} free, {audit.cached_blocks} cached, {audit.held_blocks} held"])

    def play(self, command: str) -> list[str]:
        first, *indented = command.split("\n")
        verb, *words = first.split()
        if verb == "pool":
            fields = dict(word.split("=") for word in words)
            spec = pool_spec(num_blocks=int(fields["blocks"]), block_size=int(fields["size"]))
            self.ledger = Ledger(spec, EPOCH, next_hash=self.remember_hash)
            return []
        if verb == "step":
            return self.step([parse(line) for line in indented])
        if verb == "order":
            return [" ".join(map(str, self.ledger.free_list()))]
        if verb == "figures":
            return [f"{name} {count}" for name, count in asdict(self.ledger.stats()).items() if count]
        return self.call(parse(first))

    def call(self, part) -> list[str]:
        ledger, lines = self.ledger, []
        match part:
            case Attach(sequence, tokens, scope):
                lines.append(attached(part, ledger.attach(sequence, tokens, scope)))
            case Reservation(sequence, count):
                ledger.reserve(sequence, count)
            case Commit(sequence, tokens):
                ledger.commit(sequence, tokens)
            case Fork(parent, children, count):
                ledger.fork(parent, children, count)
            case Truncation(sequence, length):
                ledger.truncate(sequence, length)
            case sequence:
                ledger.free(sequence)
        return lines + told(idle(ledger))

    def step(self, parts: list) -> list[str]:
        def all_of(kind):
            return tuple(part for part in parts if isinstance(part, kind))

        attaches = all_of(Attach)
        grant = self.ledger.apply(
            Exchange(
                epoch=EPOCH,
                step=1,
                truncations=all_of(Truncation),
                commits=all_of(Commit),
                forks=all_of(Fork),
                finished=all_of(int),
                attaches=attaches,
                reserves=all_of(Reservation),
            )
        )
        answers = dict(grant.attached) | {sequence: WaitFor(leader) for sequence, leader in grant.waiting}
        lines = [attached(attach, answers[attach.sequence]) for attach in attaches]
        lines += told(grant)
        return lines + ["unmet " + " ".join(map(letter, grant.unmet))] * bool(grant.unmet)

    def remember_hash(self, parent: bytes, tokens: bytes) -> BlockHash:
        block_hash = next_hash(parent, tokens)
        self.block_tokens[block_hash] = " ".join(map(str, memoryview(tokens).cast("I")))
        return block_hash

    def change(self, change: Change) -> list[str]:
        verb = "published" if isinstance(change, Published) else "evicted"
        return [f"{verb} [{self.block_tokens[block_hash]}]" for block_hash in change.hashes]


def parse(line: str):
    """A part of an exchange from its words; a plain sequence id is to be freed."""
    verb, name, *words = line.split()
    sequence = SequenceId(ord(name) - ord("a") + 1)
    options = dict(word.split("=") for word in words if "=" in word)
    words = [word for word in words if "=" not in word]
    match verb:
        case "attach":
            return Attach(sequence, tokens_in(words), Scope(salt=options.get("salt", "").encode()))
        case "commit":
            return Commit(sequence, tokens_in(words))
        case "fork":
            children = tuple(SequenceId(ord(child) - ord("a") + 1) for child in words[1:])
            return Fork(sequence, children, int(options.get("reserve", 0)))
        case "reserve":
            return Reservation(sequence, int(words[0]))
        case "truncate":
            return Truncation(sequence, int(words[0]))
        case "free":
            return sequence
    raise ValueError(f"no such command: {line}")


def tokens_in(words: list[str]) -> tuple[int, ...]:
    tokens: list[int] = []
    for word in words:
        start, _, end = word.partition("..")
        tokens += range(int(start), int(end or start) + 1)
    return tuple(tokens)


def letter(sequence: int) -> str:
    return chr(ord("a") + sequence - 1)


def with_letters(message: str) -> str:
    return re.sub(r"sequence (\d+)", lambda found: f"sequence {letter(int(found[1]))}", message)


def attached(attach: Attach, answer: int | WaitFor) -> str:
    if isinstance(answer, WaitFor):
        return f"{letter(attach.sequence)} waits for {letter(answer.leader)}"
    return f"{letter(attach.sequence)} reuses {answer} of {len(attach.tokens)} tokens"


def told(grant: Grant) -> list[str]:
    """Table entries as `a[0..] = 4 5`, copies as `copy 4 to 6`."""
    tables = [
        f"{letter(change.sequence)}[{change.start}..] = {' '.join(map(str, change.blocks))}" for change in grant.tables
    ]
    return tables + [f"copy {copy.source} to {copy.target}" for copy in grant.copies]
