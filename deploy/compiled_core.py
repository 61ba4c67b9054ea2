"""The cache manager's books, compiled: the same source, run as C by mypyc (ADR 38).

    python -m deploy.compiled_core build/compiled

makes a folder with the packages `octavo` and `cache_manager`, in which the modules that every exchange goes through are
compiled for this interpreter. It is a copy: nothing compiled ever lies beside source that may change. To run it, put it
first on PYTHONPATH. A wheel holds the same (build_hook.py).
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ("mypy>=2.4", "setuptools>=80")
"""What compiling needs, besides a C compiler. What was compiled needs none of it."""

MODULES = (
    *(
        f"cache_manager/core/{name}.py"
        for name in (
            "accounts",
            "block",
            "block_pool",
            "block_table",
            "branches",
            "changes",
            "draft",
            "eviction",
            "lease",
            "ledger",
            "partial_hits",
            "prefix_index",
            "rehearsal",
            "retention",
            "rings",
            "single_flight",
            "untold",
            "vocabulary",
        )
    ),
    "cache_manager/change_queue.py",
    "cache_manager/manager.py",
    "octavo/hashing.py",
    "octavo/index_schema.py",
    "octavo/records/attend.py",
    "octavo/wire/attend.py",
    "octavo/wire/flat.py",
    "octavo/wire/fleet.py",
)
"""Those that every exchange goes through."""


def compile_core(source: Path, target: Path, *, optimize: int = 3) -> list[Path]:
    """Copy the packages from `source` to the empty folder `target` and compile `MODULES` there.

    `optimize` is the C compiler's level: 0 takes a third of the time.

    Returns:
        What was compiled, as paths within `target`.

    Raises:
        RuntimeError: it does not compile; the message is what the compilers say.
    """
    for package in ("octavo", "cache_manager"):
        shutil.copytree(source / package, target / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    environment = os.environ | {"MYPYC_OPT_LEVEL": str(optimize), "MYPYC_DEBUG_LEVEL": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", "--follow-imports=silent", "--ignore-missing-imports", *MODULES],
        cwd=target,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the cache manager's books do not compile:\n{done.stdout}")
    for left in ("build", ".mypy_cache"):
        shutil.rmtree(target / left, ignore_errors=True)
    return sorted(path.relative_to(target) for path in target.rglob("*.so"))


def main() -> None:
    """Compile into the folder that is named; it is made anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    target: Path = parser.parse_args().target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    compiled = compile_core(Path(__file__).parent.parent, target)
    print(f"{len(compiled)} modules compiled; to use them: PYTHONPATH={target.resolve()}")


if __name__ == "__main__":
    main()
