"""The bench of the gateway tells a token's age by the token."""

import pytest

from bench.gateway import Relayed, report
from bench.stand_in_worker import NUM_TOKENS, STEP_SECONDS, seconds_since, token_of


@pytest.mark.parametrize("step", [5, NUM_TOKENS - 1, 7 * NUM_TOKENS])
@pytest.mark.parametrize("late", [-0.001, 0.0, 0.019, 0.5])
def test_a_token_tells_when_its_step_was_due(step: int, late: float) -> None:
    assert seconds_since(token_of(step), step * STEP_SECONDS + late) == pytest.approx(late, abs=1e-6)


def test_what_the_relay_adds_is_told_beside_the_workers_own_stream() -> None:
    lines = {line["name"]: line for line in report(Relayed(1000, 0.05, [0.004] * 10), [0.001] * 10, 64)}
    assert lines["relay_tok_s_core_64"]["value"] == 20_000
    assert lines["relay_cpu_us_per_token_64"]["value"] == 50
    assert (lines["relay_added_ms_p50"]["value"], lines["relay_added_ms_p50"]["direct_ms"]) == (3, 1)
