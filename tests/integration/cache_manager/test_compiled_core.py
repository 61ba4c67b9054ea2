"""The manager's books, compiled (ADR 38): made from this source, and held to what the plain ones are held to."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.compiled_core import MODULES, compile_core

ROOT = Path(__file__).parents[3]
RULES = [
    "tests/contract/test_wire.py",
    *(
        f"tests/unit/cache_manager/test_{name}.py"
        for name in (
            "block_pool",
            "change_queue",
            "eviction",
            "exchange",
            "keys",
            "lease",
            "ledger",
            "ledger_machine",
            "manager",
            "partial_hits",
            "prefix_index",
            "public_prefix",
            "reset",
            "restoration",
            "single_flight",
            "transcripts",
        )
    ),
]

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler on PATH"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the books are compiled, in a hurry."""
    folder = tmp_path_factory.mktemp("compiled")
    assert len(compile_core(ROOT, folder, optimize=0)) == len(MODULES) + 1  # what they share
    return folder


def test_compiled_books_keep_every_rule_of_the_plain_ones(compiled: Path) -> None:
    plugin = ["-p", "tests.support.compiled_only", "-p", "no:cacheprovider"]
    path = ["-o", f"pythonpath={compiled} {ROOT}"]
    done = run_python(compiled, "-m", "pytest", "--quiet", *plugin, *path, *RULES)
    assert done.returncode == 0, done.stdout


def test_a_figure_says_whether_the_books_are_compiled(compiled: Path) -> None:
    script = "from bench.ledger import _line; import json; print(json.dumps(_line('a', [1.0], 1)))"
    answers = [run_python(folder, "-c", script) for folder in (compiled, ROOT)]
    assert [json.loads(done.stdout)["compiled"] for done in answers] == [True, False]


def test_nothing_compiled_lies_beside_the_source(compiled: Path) -> None:
    assert not [path for module in MODULES for path in (ROOT / module).parent.glob("*.so")]
    assert [path for module in MODULES for path in (compiled / module).parent.glob("*.so")]


def run_python(first: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python that looks into this folder first, then into the project's."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (first, ROOT)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
