"""The bench of routing plays requests as they came."""

import json
from pathlib import Path

import pytest

from bench.fleet_model import ModelledFleet, Rates
from bench.replay import Arrival, timed
from bench.routing import SHARES, cut, drawn, half_of, main, setting, working_set
from bench.routing_rivals import octavo, policies, variants


def test_every_policy_is_played_and_compared_in_one_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--quick", "--processes", "1", "--only", "agent_text", "--plot", str(tmp_path / "plot.png")])
    lines = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    for share in SHARES:
        assert all(f"ttft_p95_agent_text_{share}_{policy}" in lines for policy in policies())
        assert set(lines[f"p95_vs_best_agent_text_{share}"]["best"]) <= set(policies())
    assert 0 < lines["hit_vs_global_agent_text_100"]["value"] <= 1.05
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_other_shares_are_played_and_compared_beside_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--processes", "1", "--only", "agent_text", "--half", "2", "--shares", "--draws", "2"])
    lines = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert sorted(variants()) == ["positions_x0.5", "positions_x2", "remembered_x0.5", "remembered_x2"]
    for share in SHARES:
        for policy in ("", *(f"_{name}" for name in variants())):
            waits = lines[f"p95_vs_best_agent_text_half2_{share}{policy}"]
            assert waits["least"] <= waits["value"] <= waits["most"]
            assert f"hit_vs_global_agent_text_half2_{share}{policy}" in lines


def test_a_draw_moves_arrivals_within_a_step_of_the_clock_and_the_first_moves_none() -> None:
    """Three seconds is what most steps of chat's clock have."""
    place = setting(cut(timed("mooncake"), 3_000), 25, Rates(), busy=0.7)
    recorded = place.trace.arrivals
    assert drawn(place, 1).trace.arrivals == recorded

    moved = drawn(place, 2)
    assert (moved.draw, moved.blocks_per_worker) == (2, place.blocks_per_worker)
    assert moved.trace.arrivals == drawn(place, 2).trace.arrivals != drawn(place, 3).trace.arrivals
    came = {id(each.prompt): each.at for each in recorded}
    late = [each.at - came[id(each.prompt)] for each in moved.trace.arrivals]
    assert 0 <= min(late) < 0.1
    assert 2.5 < max(late) <= 3


def test_no_draw_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--draws", "0"])
    assert "argument --draws: 0 is less than 1" in capsys.readouterr().err


def test_two_halves_are_the_whole_and_each_begins_at_once() -> None:
    trace = timed("agent_text")
    first, second = half_of(trace, 1), half_of(trace, 2)
    assert [each.prompt for half in (first, second) for each in half.arrivals] == [
        each.prompt for each in trace.arrivals
    ]
    assert first.arrivals[0].at == second.arrivals[0].at == 0


def test_another_trace_is_read_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 40, "output_length": 4, "hash_ids": [1, 2, 3]}
    trace = tmp_path / "mine.jsonl"
    trace.write_text("".join(json.dumps({**row, "timestamp": 1000 * at}) + "\n" for at in range(6)))
    main(["--trace", str(trace), "--block-tokens", "16", "--processes", "1"])
    assert '"hit_vs_global_mine_100", "value": ' in capsys.readouterr().out


def test_a_working_set_is_what_plain_lru_needs() -> None:
    assert working_set([[1, 2], [3, 4], [1, 2], [3, 4]]) == 4
    assert working_set([[1, 2], [1, 2], [3, 4], [3, 4]]) == 2


def test_a_prompt_that_came_before_waits_for_nothing_but_its_last_tokens() -> None:
    """S46: what was predicted is what was found."""
    arrivals = [Arrival(at=at, prompt=[1, 2, 3, 4], prompt_tokens=64, output_tokens=8) for at in (0.0, 10.0)]
    fleet = ModelledFleet(2, 32, Rates(prefill=16.0), block_tokens=16)
    outcome = fleet.play(arrivals, 1.0, octavo, seed=1)
    assert (outcome.hit_percent, outcome.prediction_error_percent) == (50, 0)
    assert outcome.ttft_p95 == pytest.approx(4.0)


def test_over_a_trace_what_is_predicted_is_within_one_per_cent_of_what_is_found() -> None:
    """S46, with an index that is exact: what errs is what is evicted, or computed elsewhere, while a request waits."""
    trace = cut(timed("agent_text"), 20_000)
    outcome = setting(trace, 25, Rates(), busy=0.7).play("octavo")
    assert outcome.hit_percent > 50
    assert outcome.prediction_error_percent <= 1
