"""Log lines: one JSON object each, whatever is logged."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from octavo import telemetry


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging belongs to the process: put it back."""
    root, ours = logging.getLogger(), logging.getLogger("octavo")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_event_is_one_line_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("worker")
    logging.getLogger("octavo.worker").info("sequence_preempted", extra={"sequence": 7, "blocks": 12})
    (line,) = logged(capsys)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "info",
        "service": "worker",
        "event": "sequence_preempted",
        "sequence": 7,
        "blocks": 12,
    }


def test_an_exception_stays_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("worker")
    try:
        raise RuntimeError("first line\nsecond line")
    except RuntimeError:
        logging.getLogger("octavo").exception("call_failed")
    (line,) = logged(capsys)
    assert line["level"] == "error"
    assert line["traceback"].endswith("RuntimeError: first line\nsecond line")


def test_a_field_that_json_does_not_know_is_written_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("worker")
    logging.getLogger("octavo").info("event", extra={"error": ValueError("why")})
    assert logged(capsys)[0]["error"] == "why"


def test_ours_speak_from_the_level_asked_for_and_libraries_from_warning(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("worker", "debug")
    logging.getLogger("octavo.engine").debug("step")
    logging.getLogger("grpc").info("chatter")
    logging.getLogger("grpc").warning("trouble")
    assert [line["event"] for line in logged(capsys)] == ["step", "trouble"]


def test_a_quiet_service_says_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("worker", "warning")
    logging.getLogger("octavo.engine").info("step")
    assert logged(capsys) == []


def test_what_stays_away_is_said_once_a_reason_and_again_after_a_while_and_when_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    telemetry.configure("gateway")
    log, now = logging.getLogger("octavo.gateway"), 100.0
    outage = telemetry.Outage(lambda: now)
    outage.back(log, "found", address="m")
    for reason in ("refused", "refused", "no route", "refused", "no route"):
        now += 0.5
        outage.away(log, "lost", address="m", reason=reason)
    now = 100.5 + telemetry.SAY_AGAIN_SECONDS
    for _ in range(2):
        outage.away(log, "lost", address="m", reason="refused")
    outage.back(log, "found", address="m")
    outage.back(log, "found", address="m")
    outage.away(log, "lost", address="m", reason="refused", level=logging.ERROR)

    said = [(line["level"], line["event"], line.get("reason"), line["seconds"]) for line in logged(capsys)]
    assert said == [
        ("warning", "lost", "refused", 0.0),
        ("warning", "lost", "no route", 1.0),
        ("warning", "lost", "refused", 60.0),
        ("info", "found", None, 60.0),
        ("error", "lost", "refused", 0.0),
    ]
