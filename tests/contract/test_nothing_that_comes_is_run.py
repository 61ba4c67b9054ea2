"""No pickle, no eval, no template outside the sandbox: the linter refuses each, so that none comes in unseen."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUNS_WHAT_IT_READS = {
    "pickle": "import pickle\n\npickle.loads(b'')\n",
    "a part of pickle": "from pickle import loads\n\nloads(b'')\n",
    "marshal": "import marshal\n\nmarshal.loads(b'')\n",
    "shelve": "import shelve\n\nshelve.open('x')\n",
    "a checkpoint of torch": "import torch\n\ntorch.load('x')\n",
    "eval": "eval('1')\n",
    "exec": "exec('1')\n",
    "a shell": "import subprocess\n\nsubprocess.run('ls', shell=True, check=True)\n",
    "a template that reaches the host": "import jinja2\n\njinja2.Environment(autoescape=True)\n",
}


def refusals(source: str, name: str) -> list[str]:
    """The rules that a file of that name would break."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", name, "-"]
    told = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=False).stdout
    return [line.split()[1] for line in told.splitlines() if line.startswith(name)]


@pytest.mark.parametrize("source", RUNS_WHAT_IT_READS.values(), ids=list(RUNS_WHAT_IT_READS))
def test_what_runs_what_it_reads_is_refused_in_every_service(source: str) -> None:
    for name in ("gateway/new.py", "worker/new.py", "cache_manager/new.py", "octavo/new.py"):
        assert {"TID251", "S307", "S102", "S602"} & set(refusals(f'"""A file."""\n\n{source}', name)), name


def test_what_reads_only_is_not() -> None:
    assert refusals('"""A file."""\n\nimport json\n\nCOUNT = json.loads("1")\n', "gateway/new.py") == []
