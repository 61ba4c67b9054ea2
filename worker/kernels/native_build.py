"""Compile one of the package's C++ files when it is first needed, and keep the result for the next start.

A result is named by its sources, the flags and the instruction set of the CPU, so a home directory shared by several
machines is safe. Two workers that start together both compile, each into a file of its own, and rename: the last one
wins, both are right, and nobody ever waits for a neighbour or loads half a file.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
)
COMPILE_SECONDS = 300
"""Nothing waits without a bound; one file takes about five seconds."""


class NativeUnavailable(Exception):
    """There is no native code for this call on this machine; the message is the reason."""


def load(source: Path, *, cache: Path | None = None, compilers: Sequence[str] = COMPILERS) -> ctypes.CDLL:
    """Load what `source` compiles to, from the cache where it is there.

    Args:
        source: a C++ file; what it includes lies in its own directory.
        cache: the directory of compiled files; `octavo` in the user's cache by default.
        compilers: names to look for on PATH, the best first.

    Raises:
        NativeUnavailable: no compiler, it fails, or the cache cannot be written.
    """
    target = (cache or _user_cache()) / f"{source.stem}-{_key(source)}.so"
    if target.exists():
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # cut short by a full disk or a crash: build it again
            target.unlink(missing_ok=True)
    _compile(source, target, compilers)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailable(f"{target} does not load: {error}") from error


def _user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    except RuntimeError as error:
        raise NativeUnavailable(f"no directory for compiled files: {error}") from error


def _key(source: Path) -> str:
    texts = (path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, " ".join(FLAGS).encode(), _instruction_set().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _instruction_set() -> str:
    """What -march=native depends on: the architecture and the features that the kernel lists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {features}"


def _compile(source: Path, target: Path, compilers: Sequence[str]) -> None:
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler: none of {', '.join(compilers)} is on PATH")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            _run([compiler, *FLAGS, str(source), "-o", str(built)])
            built.replace(target)
    except OSError as error:
        raise NativeUnavailable(f"cannot write {target.parent}: {error}") from error


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took more than {COMPILE_SECONDS} s") from error
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise NativeUnavailable(f"{command[0]} failed with status {done.returncode}: {first}")
