"""What a request is reckoned to take, wherever it runs."""

from typing import Any

import pytest

from gateway.placement import work_of
from octavo.records.sampling import BeamSearch
from octavo.records.serve import Submission


def submission(**fields: Any) -> Submission:
    return Submission(request=0, prompt=(1, 2, 3, 4, 5), max_tokens=10, **fields)


@pytest.mark.parametrize(
    ("fields", "output_tokens"),
    [
        ({}, 10),
        ({"samples": 3}, 30),
        ({"samples": 2, "beam": BeamSearch(width=4)}, 40),
        ({"carried_tokens": 2}, 8),
    ],
    ids=["alone", "samples", "beams", "carried"],
)
def test_every_sequence_that_runs_side_by_side_counts(fields: dict[str, Any], output_tokens: int) -> None:
    whole = submission(**fields)
    work = work_of([whole], whole)
    assert (work.prompt, work.output_tokens) == (whole.prompt, output_tokens)
