"""The bench of the eviction order replays what the traces say."""

import json

import pytest

from bench.eviction import alone, hit_percent, main, replay, with_sweeps
from bench.replay import TRACES, open_books
from cache_manager.core.eviction import PLAIN_LRU, SEGMENTED


def test_every_figure_is_printed_as_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [
        f"hit_percent_{name}_{share}{mixed}" for name in TRACES for share in (25, 100) for mixed in ("", "_swept")
    ]
    assert all(line["unit"] == "%" and line["value"] >= line["lru"] for line in lines)


def test_a_block_of_a_trace_is_found_where_it_was_computed_after_the_same_blocks() -> None:
    books = open_books(64, SEGMENTED)
    assert [replay(books, 1, [1, 2, 3]), replay(books, 2, [1, 2, 4]), replay(books, 3, [2, 3])] == [0, 2, 0]
    assert replay(books, 4, [1, 2, 3]) == 3


def test_sweeps_are_asked_for_and_do_not_count() -> None:
    prompts = [[1, 2], [1, 2], [1, 2], [1, 2]]
    swept = list(with_sweeps(prompts, num_blocks=2))
    assert [request.counts for request in swept] == [True, True, False, False, True, True, False, False]
    assert hit_percent(alone(prompts), 64, PLAIN_LRU) == 75
    assert hit_percent(swept, 64, PLAIN_LRU) == 75
