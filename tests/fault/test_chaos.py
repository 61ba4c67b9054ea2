"""The chaos run, as long as a test may take; `python -m tests.fault.chaos --minutes 10` is the whole one."""

import os

import pytest

from tests.fault.chaos import BEAT_SECONDS, MISHAPS, report, run

MINUTES = float(os.environ.get("OCTAVO_CHAOS_MINUTES", "2"))


@pytest.mark.chaos
@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.timeout(900)
async def test_whatever_is_killed_frozen_replaced_or_cut_off_no_request_is_lost() -> None:
    """S15, S25, S38, S57 at once: nothing wrong, nothing hung, nothing left behind."""
    account = await run(MINUTES, seed=1)
    assert not account.faults, f"{report(account, minutes=MINUTES)} {account.faults[:3]}"
    assert len(account.mishaps) >= min(len(MISHAPS), MINUTES * 60 // BEAT_SECONDS // 2)
