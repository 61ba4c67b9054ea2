"""Compile one of the package's C++ files when it is first needed, and keep the result for the next start.

A file is compiled for a `Level`, the richest set of instructions that the CPU has: chosen at run time, since what was
built in an image or a shared home directory may run elsewhere. A result is named by its level, its sources and flags.
Two workers that start together both compile, each into a file of its own, and rename: the last one wins, both are
right, and nobody ever waits for a neighbour or loads half a file.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Level:
    """Instructions beyond those that every CPU of an architecture has."""

    name: str
    features: tuple[str, ...] = ()
    """In the words of /proc/cpuinfo."""
    options: tuple[str, ...] = ()
    """Further ones of the compiler."""

    @property
    def flags(self) -> tuple[str, ...]:
        """What makes a compiler use them."""
        return (*(f"-m{_in_flags(feature)}" for feature in self.features), *self.options)


def _in_flags(feature: str) -> str:
    """The compilers write avx512_bf16 as avx512bf16, amx_tile as amx-tile."""
    return feature.replace("avx512_", "avx512").replace("_", "-")


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_WIDE = ("-mprefer-vector-width=512",)
PLAIN = Level("plain")
X86_LEVELS = (Level("avx512", _AVX512, _WIDE), Level("avx2", _AVX2), PLAIN)
"""The best first. Other architectures have the plain level only, which is NEON on aarch64."""
TILES = Level("amx", (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"), _WIDE)
"""AVX-512 and matrix tiles, for what is written in them."""

SOURCES = Path(__file__).parent / "native"
"""The package's C++ files, and the headers that they share."""
WRITTEN_FOR = {"products.cpp": TILES, "chain.cpp": PLAIN}
"""Those that name instructions which other levels lack, or gain from none; every other file is for all levels."""
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
)
_ELF_HEADER = struct.Struct("40xQ10xHH2x")
"""Of 64 bits: where the table of sections begins, the size of an entry, their number."""
COMPILE_SECONDS = 300
"""Nothing waits without a bound; one file takes about ten seconds."""


class NativeUnavailable(Exception):
    """There is no native code for this call on this machine; the message is the reason."""


def levels() -> tuple[Level, ...]:
    """The levels of this architecture, the best first."""
    return X86_LEVELS if _is_x86() else (PLAIN,)


def levels_of(source: Path) -> tuple[Level, ...]:
    """Those of this architecture that a file of the package is compiled for."""
    only = WRITTEN_FOR.get(source.name)
    if only is None:
        return levels()
    return (only,) if only is PLAIN or _is_x86() else ()


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@cached
def usable_levels() -> tuple[Level, ...]:
    """Those that this CPU has, the best first; the plain one always."""
    return within(levels(), cpu_features())


@cached
def cpu_features() -> frozenset[str]:
    """What /proc/cpuinfo says that this CPU can do; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(features.split())


def within(levels: Sequence[Level], features: frozenset[str]) -> tuple[Level, ...]:
    """Those that a CPU with such features has whole, in order."""
    return tuple(level for level in levels if features.issuperset(level.features))


def load(
    source: Path, level: Level | None = None, *, cache: Path | None = None, compilers: Sequence[str] = COMPILERS
) -> ctypes.CDLL:
    """Load what `source` compiles to, from the cache where it is there.

    Args:
        source: a C++ file; what it includes lies in its own directory.
        level: one of `usable_levels()`; by default the best.
        cache: the directory of compiled files; `octavo` in the user's cache by default.
        compilers: names to look for on PATH, the best first.

    Raises:
        NativeUnavailable: no compiler, it fails, or the cache cannot be written.
    """
    level = level or usable_levels()[0]
    target = build(source, level, cache=cache, compilers=compilers)
    try:
        return ctypes.CDLL(str(target))
    except OSError:  # built where libraries are others, or damaged: build it again
        target.unlink(missing_ok=True)
    target = build(source, level, cache=cache, compilers=compilers)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailable(f"{target} does not load: {error}") from error


def build(source: Path, level: Level, *, cache: Path | None = None, compilers: Sequence[str] = COMPILERS) -> Path:
    """Compile `source` for a level, which this CPU need not have, unless the cache holds it; see `load`.

    Raises:
        NativeUnavailable: no compiler, it fails, or the cache cannot be written.
    """
    flags = (*FLAGS, *level.flags)
    target = (cache or _user_cache()) / f"{source.stem}-{level.name}-{_key(source, flags)}.so"
    if not _is_whole(target):
        _compile(source, target, flags, compilers)
    return target


def _is_whole(built: Path) -> bool:
    """Whether a file is there, and as long as its ELF header says: the table of its sections stands last.

    One that a crash cut short may well load, and kills the process when what it lacks is read (SIGBUS). Of another
    format than Linux has, the loader is to judge.
    """
    try:
        with built.open("rb") as file:
            header = file.read(_ELF_HEADER.size)
            length = file.seek(0, os.SEEK_END)
    except OSError:
        return False
    if len(header) < _ELF_HEADER.size:
        return False
    sections_begin, section_size, sections = _ELF_HEADER.unpack(header)
    return not header.startswith(b"\x7fELF") or length >= sections_begin + section_size * sections


def build_all() -> None:
    """Compile every file for every level that it is for, as an image does that may run on any CPU of it.

    Raises:
        NativeUnavailable: no compiler, it fails, or the cache cannot be written.
    """
    for source in sorted(SOURCES.glob("*.cpp")):
        for level in levels_of(source):
            build(source, level)


def openmp_parallel() -> int:
    """The address of GOMP_parallel of the OpenMP runtime that torch runs on: its threads do our work too.

    So no pool of threads fights another. 0 where torch runs on something else; native code then stays on the calling
    thread.
    """
    start = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return (start and ctypes.cast(start, ctypes.c_void_p).value) or 0


def _user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    except RuntimeError as error:
        raise NativeUnavailable(f"no directory for compiled files: {error}") from error


def _key(source: Path, flags: Sequence[str]) -> str:
    texts = (path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, " ".join((*flags, platform.machine())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(source: Path, target: Path, flags: Sequence[str], compilers: Sequence[str]) -> None:
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(f"no C++ compiler: none of {', '.join(compilers)} is on PATH")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            _run([compiler, *flags, str(source), "-o", str(built)])
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
