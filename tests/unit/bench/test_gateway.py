"""The bench of the gateway tells a token's age by the token."""

import pytest

from bench.gateway import Cost, Heard, Load, report
from bench.stand_in_worker import NUM_TOKENS, STEP_SECONDS, seconds_since, token_of


@pytest.mark.parametrize("step", [5, NUM_TOKENS - 1, 7 * NUM_TOKENS])
@pytest.mark.parametrize("late", [-0.001, 0.0, 0.019, 0.5])
def test_a_token_tells_when_its_step_was_due(step: int, late: float) -> None:
    assert seconds_since(token_of(step), step * STEP_SECONDS + late) == pytest.approx(late, abs=1e-6)


def test_what_the_relay_adds_is_told_beside_the_workers_own_stream() -> None:
    cost, heard = Cost(tokens=1000, seconds=2.0, cpu_seconds=0.05), Heard(1100, 550, [0.004] * 10)
    lines = {line["name"]: line for line in report(cost, heard, [0.001] * 10, Load(streams=64, interval=1, steps=100))}
    assert lines["relay_tok_s_core_64"]["value"] == 20_000
    assert lines["relay_cpu_us_per_token_64"]["value"] == 50
    assert (lines["relay_added_ms_p50"]["value"], lines["relay_added_ms_p50"]["direct_ms"]) == (3, 1)
    told = lines["relay_tok_s_core_64"]
    assert (told["asked_tok_s"], told["told_tok_s"], told["a_message"]) == (3200, 500, 2)


def test_a_figure_is_named_after_its_streams_and_the_tokens_of_a_message() -> None:
    assert Load(streams=64, interval=1, steps=1).name == "_64"
    assert Load(streams=512, interval=4, steps=1).name == "_512_by_4"
