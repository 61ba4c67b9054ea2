"""A short table of what bench/gpu_check.sh left in a folder; status 1 where one of its parts failed.

python -m bench.gpu_report FOLDER
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file; a last line that a time-out cut short is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def report(folder: Path) -> tuple[list[str], bool]:
    """The table's lines, and whether every part ended well."""
    parts = sorted(lines_of(folder / "parts.jsonl"), key=lambda part: part["part"])
    lines = [f"{'figure':44} {'value':>12} {'unit':6} of the copy bandwidth", "-" * 86]
    for path in sorted(folder.glob("*.jsonl")):
        lines += [_row(line) for line in lines_of(path) if "name" in line]
    lines += ["", *map(_ended, parts)]
    return lines, bool(parts) and all(part["status"] == 0 for part in parts)


def _row(line: dict[str, Any]) -> str:
    share = line.get("share_of_copy", line.get("share_of_copy_bandwidth"))
    return f"{line['name']:44} {line['value']:>12} {line['unit']:6} {'' if share is None else f'{share:.0%}'}".rstrip()


def _ended(part: dict[str, Any]) -> str:
    endings = {0: "passed", 124: "TOOK TOO LONG", 137: "TOOK TOO LONG"}
    ending = endings.get(part["status"], f"FAILED with status {part['status']}, see {part['part']}.log")
    return f"{part['part']:16} {ending} after {part['seconds']} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    lines, well = report(parser.parse_args(argv).folder)
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
