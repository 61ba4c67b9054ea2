"""The chapter's three figures come out of the real ledger."""

import json

import pytest

from bench.memory import forks, main, packing, sharing


def test_thirty_two_live_requests_fill_nearly_all_of_their_blocks():
    assert packing() == {
        "requests": 32,
        "tokens_stored": 9924,
        "static_slots_reserved": 32768,
        "paged_slots_reserved": 10144,
        "static_utilization": 0.303,
        "paged_utilization": 0.978,
    }


def test_a_fork_costs_blocks_only_where_samples_write():
    assert forks() == {
        "parent_blocks": 3,
        "new_blocks_after_4_forks": 0,
        "new_blocks_after_each_sample_writes_a_token": 4,
    }


def test_a_shared_prefix_is_computed_and_held_once():
    assert sharing() == {
        "prompt_tokens": 832,
        "tokens_prefilled": 160,
        "blocks_in_use": 14,
        "blocks_without_sharing": 56,
    }


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_request_wastes_less_than_a_block(length):
    """Boundary lengths kS-1, kS, kS+1."""
    assert 0 <= packing([length], 16)["paged_slots_reserved"] - length < 16


def test_blocks_of_one_position_waste_nothing():
    assert packing(block_size=1)["paged_utilization"] == 1.0


def test_every_figure_is_printed_as_one_json_object_a_line(capsys):
    main([])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["name"], line["value"], line["unit"]) for line in lines] == [
        ("paged_utilization", 0.978, "ratio"),
        ("fork_new_blocks", 4, "blocks"),
        ("prefix_tokens_prefilled", 160, "tokens"),
    ]
    assert lines[0].items() >= packing().items()


def test_the_plot_is_a_png(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "utilisation.png"
    main(["--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
