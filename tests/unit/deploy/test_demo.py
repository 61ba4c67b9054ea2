"""What the demo says of a visit, and when it calls it a failure."""

import io

import pytest
from rich.console import Console

from deploy.demo import Story, Visit, as_table, check, what_was_saved
from gateway.core.events import Usage
from octavo.commands.console import CommandFailed
from octavo.ids import WorkerId


def visit(title: str, *, cached: int = 0, first: float = 1.0, texts: tuple[str, ...] = ("Yes.",)) -> Visit:
    usage = Usage(
        prompt_tokens=600,
        cached_tokens=cached,
        output_tokens=11 * len(texts),
        worker_id=WorkerId("worker-1"),
        time_to_first_token_seconds=first,
        total_seconds=first + 2,
    )
    return Visit(title=title, usage=usage, texts=texts)


def story(**replaced: Visit | tuple[Visit, ...]) -> Story:
    parts = {
        "questions": (visit("first"), visit("second", cached=560, first=0.2), visit("third", cached=560, first=0.3)),
        "follow_up": visit("follow-up", cached=592, first=0.25),
        "samples": visit("samples", texts=("a\nlong\nway", "b", "c", "d")),
    }
    return Story(**(parts | replaced))  # type: ignore[arg-type]


def printed(told: Story) -> list[str]:
    console = Console(file=io.StringIO(), width=132)
    console.print(as_table(told))
    assert isinstance(console.file, io.StringIO)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_the_table_has_a_row_for_every_request_and_one_for_every_further_sample() -> None:
    header, _, *rows = printed(story())

    assert header.split() == ["request", "worker", "prompt", "cached", "first", "token", "tokens/s", "text"]
    assert rows[1].split() == ["second", "worker-1", "600", "560", "0.20", "s", "5", "Yes."]
    assert [row.split()[-1] for row in rows[-4:]] == ["way", "b", "c", "d"]
    assert len(rows) == 5 + 3


def test_the_sentence_counts_what_was_not_computed_and_compares_the_first_tokens() -> None:
    said = what_was_saved(story())

    assert "Of 3,000 prompt tokens 1,712 (57%) were remembered" in said
    assert "after 1.00 s where nothing was remembered, and after 0.25 s" in said
    assert "4.0 times sooner" in said


def test_a_visit_that_shows_what_it_should_passes() -> None:
    check(story())


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"questions": (visit("first", cached=16), visit("second", cached=560))}, "just started"),
        ({"questions": (visit("first"), visit("second"))}, "second found nothing"),
        ({"follow_up": visit("follow-up")}, "follow-up found nothing"),
        ({"samples": visit("samples", texts=("a", ""))}, "an answer is empty"),
    ],
)
def test_a_visit_that_does_not_is_a_failure(replaced: dict[str, Visit], said: str) -> None:
    with pytest.raises(CommandFailed, match=said):
        check(story(**replaced))
