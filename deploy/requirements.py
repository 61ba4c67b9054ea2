"""Print what the project depends on, one requirement a line: the always-needed ones and those of the extras named.

    python deploy/requirements.py worker

The images install these before they see the code, so that a change of code does not install torch again.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the project and of `extras`. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).parent.parent / "pyproject.toml", sys.argv[1:])))
