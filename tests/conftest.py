"""Settings for all tests: how hard hypothesis tries, and where Triton kernels run."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The machine that runs the tests may be busy, so no example is judged by its time.
_patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("dev", max_examples=50, **_patient)
settings.register_profile("ci", max_examples=300, **_patient)
settings.register_profile("gpu", max_examples=20, **_patient)  # each example compiles kernels for its shapes
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _has_cuda() -> bool:
    """Whether kernels can be launched. Asks torch, which takes seconds to import, only where a driver is there."""
    if not Path("/dev/nvidiactl").exists() or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Triton reads this when it is imported; the interpreter runs the real kernels on tensors of the CPU.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where several processes run the tests (pytest -n), they share the cores out, and so does what they start.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# A worker's default follows its CPU; texts are compared with transformers' in float32, whatever the CPU.
os.environ.setdefault("OCTAVO_DTYPE", "float32")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write what happens now into the transcripts, to be read in the diff"
    )
