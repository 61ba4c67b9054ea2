"""Building the native code: once, by several at a time, not at all; and which implementation a worker gets."""

import json
import logging
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paged_batch import make_batch
from worker.kernels import choose, native, native_build, native_products, native_small_ops, reference, torch_cpu
from worker.kernels.native_build import Level, NativeUnavailable

CPU = torch.device("cpu")
AARCH64_COMPILER = "aarch64-linux-gnu-g++"
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'

FILES = sorted(native_build.SOURCES.glob("*.cpp"))

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native_build.COMPILERS), reason="no C++ compiler on PATH"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(ANSWER)
    return path


def _name(parameter: Path | Level) -> str:
    return parameter.stem if isinstance(parameter, Path) else parameter.name


def _compiler() -> str:
    return next(path for name in native_build.COMPILERS if (path := shutil.which(name)))


def _complaints(compiler: str, file: Path, flags: Sequence[str] = ()) -> str:
    """What a compiler says of a source file; warnings are errors."""
    strict = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", *native_build.FLAGS, *flags]
    done = subprocess.run([compiler, *strict, str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit status {done.returncode}"


def _counting_compiler(folder: Path) -> Path:
    """A compiler that leaves one line in `calls` for each time it is used."""
    script = folder / "counting-compiler"
    script.write_text(f'#!/bin/sh\necho called >> {folder / "calls"}\nexec {_compiler()} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@needs_compiler
def test_a_source_is_compiled_once_and_found_again(tmp_path: Path, source: Path) -> None:
    compiler = _counting_compiler(tmp_path)

    for _ in range(2):
        library = native_build.load(source, cache=tmp_path / "cache", compilers=[str(compiler)])
        assert library.answer() == 42

    assert (tmp_path / "calls").read_text() == "called\n"
    assert len(list((tmp_path / "cache").iterdir())) == 1


@needs_compiler
def test_a_changed_source_is_compiled_again(tmp_path: Path, source: Path) -> None:
    native_build.load(source, cache=tmp_path / "cache")
    source.write_text(ANSWER.replace("42", "43"))

    assert native_build.load(source, cache=tmp_path / "cache").answer() == 43


@needs_compiler
def test_a_changed_header_is_compiled_again(tmp_path: Path, source: Path) -> None:
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    source.write_text('#include "number.h"\n' + ANSWER.replace("42", "NUMBER"))
    native_build.load(source, cache=tmp_path / "cache")
    header.write_text("#define NUMBER 2\n")

    assert native_build.load(source, cache=tmp_path / "cache").answer() == 2


@needs_compiler
def test_a_file_cut_short_is_built_anew(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    native_build.load(source, cache=cache)
    (built,) = cache.iterdir()
    built.unlink()  # the loaded one stays mapped; the name gets a broken file
    built.write_bytes(b"\x7fELF")

    assert native_build.load(source, cache=cache).answer() == 42


def _load_at_once(start: Barrier, source: Path, cache: Path) -> None:
    start.wait(60)
    sys.exit(0 if native_build.load(source, cache=cache).answer() == 42 else 1)


@needs_compiler
@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.6, 0.99])
def test_no_file_is_loaded_of_which_a_part_is_missing(tmp_path: Path, source: Path, part: float) -> None:
    """Of one that is cut within what is mapped, a load would end the process."""
    plain, cache = native_build.PLAIN, tmp_path / "cache"
    built = native_build.build(source, plain, cache=cache)
    whole = built.stat().st_size
    with built.open("rb+") as file:
        file.truncate(int(part * whole))
    assert native_build.build(source, plain, cache=cache).stat().st_size == whole


@needs_compiler
def test_workers_that_build_at_once_all_get_whole_code(tmp_path: Path, source: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    cache = tmp_path / "cache"
    workers = [context.Process(target=_load_at_once, args=(start, source, cache)) for _ in range(2)]

    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)

    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(list(cache.iterdir())) == 1, "no half-made file is left behind"


def test_without_a_compiler_the_reason_names_those_that_were_sought(tmp_path: Path, source: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler: none of no-such-cc, nor-this is on PATH"):
        native_build.load(source, cache=tmp_path / "cache", compilers=["no-such-cc", "nor-this"])


@needs_compiler
def test_a_compiler_that_fails_is_quoted(tmp_path: Path, source: Path) -> None:
    source.write_text("this is not C++\n")

    with pytest.raises(NativeUnavailable, match=r"failed with status 1: .*answer\.cpp:1:1: error"):
        native_build.load(source, cache=tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_a_user_without_a_home_is_a_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a number that no user database knows; the worker then goes on in torch."""
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)

    with pytest.raises(NativeUnavailable, match="no directory for compiled files: "):
        native_build.load(source)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(NativeUnavailable, match=r"cannot write .*/file/octavo"):
        native_build.load(source, cache=tmp_path / "file" / "octavo")


@needs_compiler
@pytest.mark.parametrize(
    ("file", "level"), [(file, level) for file in FILES for level in native_build.levels_of(file)], ids=_name
)
def test_the_package_compiles_without_a_warning(file: Path, level: Level) -> None:
    assert _complaints(_compiler(), file, level.flags) == ""


@pytest.mark.skipif(shutil.which(AARCH64_COMPILER) is None, reason=f"no {AARCH64_COMPILER}")
@pytest.mark.parametrize("file", [file for file in FILES if file.name not in native_build.WRITTEN_FOR], ids=_name)
def test_the_package_compiles_for_aarch64_without_a_warning(file: Path) -> None:
    assert _complaints(AARCH64_COMPILER, file) == ""


@needs_compiler
def test_every_level_has_a_file_of_its_own(tmp_path: Path, source: Path) -> None:
    files = {native_build.build(source, level, cache=tmp_path / "cache").name for level in native_build.levels()}

    assert len(files) == len(native_build.levels())
    assert {path.name for path in (tmp_path / "cache").iterdir()} == files


@needs_compiler
def test_an_image_holds_every_file_of_the_package_for_every_level() -> None:
    native_build.build_all()

    assert {native.SOURCE, native_small_ops.SOURCE, native_products.SOURCE} <= set(FILES)
    for file in FILES:
        for level in native_build.levels_of(file):
            assert native_build.build(file, level, compilers=[]).exists(), "found without a compiler"


@pytest.mark.parametrize(
    ("features", "usable"),
    [
        ("sse2 avx2 fma f16c avx512f avx512bw avx512dq avx512vl", ["avx512", "avx2", "plain"]),
        ("avx2 fma f16c avx512f", ["avx2", "plain"]),
        ("avx2 fma", ["plain"]),
    ],
)
def test_a_level_is_usable_where_the_cpu_has_all_its_features(features: str, usable: list[str]) -> None:
    levels = native_build.within(native_build.X86_LEVELS, frozenset(features.split()))

    assert [level.name for level in levels] == usable


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "reason"),
    [
        (torch.float16, torch.float32, 64, "queries of torch.float16"),
        (torch.float32, torch.float16, 64, "a pool of torch.float16"),
        (torch.float32, torch.float32, 40, "heads of 40 elements"),
        (torch.float32, torch.float32, 272, "heads of 272 elements"),
        (torch.float32, torch.float32, 0, "heads of 0 elements"),
    ],
)
def test_what_the_native_code_lacks_goes_to_torch_with_the_reason(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        attend = choose(device=CPU, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)

    assert attend is torch_cpu.attend
    (record,) = caplog.records
    assert record.getMessage() == "attention_backend"
    assert record.__dict__["backend"] == "torch"
    assert record.__dict__["reason"].startswith(f"slower than native: {reason}")


@needs_compiler
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": torch.float16}, "the native code got queries of torch.float16"),
        ({"device": "meta"}, "q is on meta, the native code wants the CPU"),
    ],
)
def test_tensors_that_the_native_code_cannot_read_are_refused(changed: dict[str, Any], message: str) -> None:
    attend = native.load(torch.float32, torch.float32, 64)
    batch = make_batch([(3, 1)])
    moved = {name: x.to(**changed) for name, x in batch.arguments.items() if isinstance(x, torch.Tensor)}
    plan = {name: moved[name].int() for name in ("tables", "lengths", "query_starts")}

    with pytest.raises(ValueError, match=message):
        attend(**(batch.arguments | moved | plan))


@needs_compiler
def test_a_cpu_with_a_compiler_gets_the_native_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        attend = choose(device=CPU, dtype=torch.float32, head_dim=64)

    assert isinstance(attend, native.NativeAttention)
    assert [(r.getMessage(), r.__dict__["backend"], r.__dict__["device"]) for r in caplog.records] == [
        ("attention_backend", "native", "cpu")
    ]


def test_an_unknown_device_gets_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        attend = choose(device=torch.device("meta"), dtype=torch.float32, head_dim=64)

    assert attend is reference.attend
    assert caplog.records[0].__dict__["reason"] == "slower: no kernel is written for meta"


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "chosen", "reason"),
    [
        (64, None, "triton", "kernels for this GPU, compiled as they are needed"),
        (272, None, "reference", "slower than Triton: heads of 272 elements; they take up to 256"),
        (
            33,
            torch.float8_e5m2,
            "reference",
            "slower than Triton: heads of 33 elements of torch.float8_e5m2; they read two at a time",
        ),
    ],
)
def test_a_gpu_gets_triton_where_its_kernels_take_the_heads(
    caplog: pytest.LogCaptureFixture, head_dim: int, kv_dtype: torch.dtype | None, chosen: str, reason: str
) -> None:
    pytest.importorskip("triton")

    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        choose(device=torch.device("cuda"), dtype=torch.float32, kv_dtype=kv_dtype, head_dim=head_dim)

    assert [(r.__dict__["backend"], r.__dict__["reason"]) for r in caplog.records] == [(chosen, reason)]


BARE_MACHINE = """
import json, logging, sys, torch
sys.modules["triton"] = None  # importing it fails, as where it is not installed
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record)
logging.getLogger("octavo.worker").addHandler(handler)
logging.getLogger("octavo.worker").setLevel(logging.INFO)
import worker.kernels
attend = worker.kernels.choose(device=torch.device("cpu"), dtype=torch.float32, head_dim=64)
on_gpu = worker.kernels.choose(device=torch.device("cuda"), dtype=torch.float32, head_dim=64)
modules = [attend.__module__, on_gpu.__module__]
print(json.dumps({"modules": modules, "reasons": [record.reason for record in records]}))
"""


def test_a_machine_without_compiler_and_triton_still_attends_and_says_why(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    done = subprocess.run(
        [sys.executable, "-c", BARE_MACHINE], env=environment, capture_output=True, text=True, check=True, timeout=120
    )

    said = json.loads(done.stdout)
    assert said["modules"] == ["worker.kernels.torch_cpu", "worker.kernels.reference"]
    assert said["reasons"][0] == "slower than native: no C++ compiler: none of g++, c++, clang++ is on PATH"
    assert said["reasons"][1].startswith("slower than Triton: ")
