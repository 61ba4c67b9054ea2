"""Tests that read as documentation: a file of commands, each with what it answers.

    # what this is about

    command
    ----
    answer

A command may have several lines; an empty line ends the answer. `pytest --rewrite` writes the answers of now into the
file, so that a change of behaviour is read as a diff.
"""

from collections.abc import Callable
from pathlib import Path

SEPARATOR = "----"


def check_transcript(path: Path, answer: Callable[[str], str], *, rewrite: bool) -> None:
    """Give every command of the file to `answer` and compare; or write the answers into the file."""
    before = path.read_text()
    after = "\n\n".join(_answered(part, answer) for part in before.strip().split("\n\n")) + "\n"
    if rewrite:
        path.write_text(after)
    else:
        assert after == before


def _answered(part: str, answer: Callable[[str], str]) -> str:
    """A comment as it is, a command with its answer of now."""
    if part.startswith("#"):
        return part
    command = part.split(f"\n{SEPARATOR}")[0]
    return f"{command}\n{SEPARATOR}\n{answer(command)}"
