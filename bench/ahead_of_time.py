"""What the Triton kernels compile to, on every target, without a GPU.

    python -m bench.ahead_of_time             a table of every kernel, configuration and target
    python -m bench.ahead_of_time --check     the same, and status 1 where a rule is broken
    python -m bench.ahead_of_time --json      one JSON object a line

A stand-in driver names the target, and each launch of our own launchers becomes a compilation: with the arguments, the
specialisation and the options that it would have on that GPU. The compilers come with Triton's wheel, as do the
tools that read what they made. The rules:

    spills          no register goes to memory
    memory          a program's shared memory is there, on the smallest part of its target
    tensor core     a kernel that multiplies uses the tensor core's instructions (`mma`, `wgmma`, `tcgen05`, `mfma`),
                    but for chunks of float32 with heads beyond 128, whose launcher does without
    wide loads      in every loop over positions keys and values are loaded 16 bytes at a time; other loads there, of
                    the table's entries, are too few to be a tile; nowhere is anything loaded in less than four
"""

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

HALF, SINGLE = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The attention of one kind of model."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = HALF
    kv_dtype: torch.dtype | None = None
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


CONFIGS = {
    "8B": Config(heads=32, kv_heads=8, head_dim=128),
    "8B, e4m3": Config(heads=32, kv_heads=8, head_dim=128, kv_dtype=E4M3),
    "8B, e5m2": Config(heads=32, kv_heads=8, head_dim=128, kv_dtype=E5M2),
    "8B, fp32": Config(heads=32, kv_heads=8, head_dim=128, dtype=SINGLE),
    "group of 3, D 64": Config(heads=9, kv_heads=3, head_dim=64),
    "sinks, window, D 64": Config(heads=64, kv_heads=8, head_dim=64, window=128, sinks=True, block_size=32),
    "soft cap, window, D 256": Config(heads=8, kv_heads=4, head_dim=256, window=4096, soft_cap=50.0),
    "D 80, fp16, blocks of 1": Config(heads=32, kv_heads=32, head_dim=80, dtype=torch.float16, block_size=1),
    "D 96": Config(heads=32, kv_heads=8, head_dim=96),
    "D 192, blocks of 256": Config(heads=16, kv_heads=2, head_dim=192, block_size=256),
    "D 96, fp32, e4m3": Config(heads=32, kv_heads=8, head_dim=96, dtype=SINGLE, kv_dtype=E4M3),
    "D 256, e5m2": Config(heads=8, kv_heads=4, head_dim=256, kv_dtype=E5M2),
    "D 256, fp32": Config(heads=8, kv_heads=1, head_dim=256, dtype=SINGLE),
}

# Shared memory of one program, in bytes: what the smallest GPU of each target allows.
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}

_TENSOR_CORE = re.compile(r"HMMA|HGMMA|UTC\w*MMA|v_mfma")
_PLAIN_PRODUCT = re.compile(r"FFMA")
_ATTENDING = ("_split_kernel", "_shared_kernel", "_prefill_kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of one launch."""

    target: str
    config: str
    kernel: str
    registers: int
    spilled: int
    """Bytes of stack on NVIDIA, registers on AMD."""
    shared_bytes: int
    instructions: int
    matrix: dict[str, int] = field(default_factory=dict)
    """Instructions of the tensor core."""
    loads: dict[str, int] = field(default_factory=dict)
    """Global loads, by bytes."""
    steps: list[dict[str, int]] = field(default_factory=list)
    """The same of each innermost loop that multiplies: a step over positions."""
    wanted_wide: int = 0
    """How many wide loads one step of keys and values takes."""
    multiplies: bool = False
    """On the tensor core."""

    def broken_rules(self) -> list[str]:
        """What must not be; empty for a sound kernel."""
        limit = TARGETS[self.target][3]
        narrow = {size: count for size, count in self.loads.items() if int(size) < 4}
        rules = {
            f"{self.spilled} spilled": self.spilled > 0,
            f"{self.shared_bytes} bytes of shared memory, {limit} there": self.shared_bytes > limit,
            "no tensor core": self.multiplies and not self.matrix,
            "no loop over positions": self.wanted_wide > 0 and not self.steps,
            f"narrow loads: {narrow}": bool(narrow) and self.kernel in _ATTENDING,
        }
        for step in self.steps:
            wide = sum(count for size, count in step.items() if int(size) >= 16)
            between = {size: count for size, count in step.items() if 4 < int(size) < 16}
            rules[f"{wide} wide loads in a step, wanted {self.wanted_wide}"] = wide < self.wanted_wide
            rules[f"narrow loads in a step: {between}"] = sum(between.values()) >= self.wanted_wide
        return [rule for rule, broken in rules.items() if broken]


class _Stand:
    """A driver for a device that is not there: enough for Triton to compile, not to launch."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> tuple[str, str, Any]:
        return "ahead of time", self._target.backend, self._target.arch

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def _captured(target: str) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Launches inside compile for `target`; the list fills with (kernel, what was compiled, its arguments)."""
    from triton import KernelInterface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    backend, arch, warp, _ = TARGETS[target]
    launches: list[tuple[str, Any, dict[str, Any]]] = []

    def launcher(kernel: Any, grid: object) -> Any:
        def compile_only(*args: object, **named: object) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **named)
            launches.append((kernel.fn.__name__, compiled, named))

        return compile_only

    active: Any = driver
    interface: Any = KernelInterface
    before, launch = active._active, interface.__getitem__
    active._active, interface.__getitem__ = _Stand(GPUTarget(backend, arch, warp)), launcher
    try:
        yield launches
    finally:
        active._active, interface.__getitem__ = before, launch


def compile_all(target: str, name: str) -> list[Compiled]:
    """Compile all kernels of one configuration for one target, in this process."""
    config = CONFIGS[name]
    with _captured(target) as launches:
        _attend(config)
        _write_and_move(config)
    return [_read(target, name, *launch) for launch in launches]


def _attend(config: Config) -> None:
    """A batch that goes through every kernel: a decode, a chunk, and decodes that share a prefix."""
    from worker.kernels.arguments import Options
    from worker.kernels.shared_prefix import SharedPrefixes
    from worker.kernels.triton_attend import attend

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    q = torch.zeros(12, config.heads, config.head_dim, dtype=config.dtype)
    shape = (4, config.kv_heads, config.block_size, config.head_dim)
    pool = torch.zeros(shape, dtype=config.kv_dtype or config.dtype)
    tables = torch.zeros(4, -(-8192 // config.block_size), dtype=torch.int32)
    options = Options(window=config.window, soft_cap=config.soft_cap)
    if config.sinks:
        options["sinks"] = torch.zeros(config.heads)
    if config.kv_dtype is not None:
        options["k_scale"] = options["v_scale"] = torch.ones(config.kv_heads)
    attend(q, pool, pool, tables, ints(9, 9, 9, 9), ints(0, 1, 2, 3, 12), config.head_dim**-0.5, **options)
    if config.window is None:
        shared = SharedPrefixes(
            members=ints(0, 1),
            member_starts=ints(0, 2),
            group_positions=ints(4096),
            positions=ints(4096, 4096, 0, 0),
            most_members=2,
            most_positions=4096,
        )
        options["shared"] = shared
        attend(q[:4], pool, pool, tables, ints(9, 9, 9, 9), ints(0, 1, 2, 3, 4), config.head_dim**-0.5, **options)


def _write_and_move(config: Config) -> None:
    """A token into its slot, and a block from one place to another, into a buffer and back."""
    from worker.kernels import block_ops_triton

    kv_dtype = config.kv_dtype or config.dtype
    planes = torch.zeros(2, 4, config.kv_heads, config.block_size, config.head_dim, dtype=kv_dtype)
    k = torch.zeros(2, config.kv_heads, config.head_dim, dtype=config.dtype)
    scale = torch.ones(config.kv_heads) if config.kv_dtype is not None else None
    block_ops_triton.write(planes[0], planes[1], k, k, torch.zeros(2, dtype=torch.int64), scale, scale)
    block_ops_triton.copy(planes, [0], [1])
    block_ops_triton.scatter(planes, [0], block_ops_triton.gather(planes, [0]))


def _read(target: str, config: str, kernel: str, compiled: Any, named: dict[str, Any]) -> Compiled:
    read = _read_cubin if "cubin" in compiled.asm else _read_amdgcn
    registers, spilled, code = read(compiled.asm)
    counts, attends = Counter(one.name for one in code), kernel in _ATTENDING
    return Compiled(
        target=target,
        config=config,
        kernel=kernel,
        registers=registers,
        spilled=spilled,
        shared_bytes=compiled.metadata.shared,
        instructions=sum(counts.values()),
        matrix={name: count for name, count in sorted(counts.items()) if _TENSOR_CORE.match(name)},
        loads=_loads(code),
        steps=[_loads(step) for step in _steps(code)] if attends else [],
        wanted_wide=_wide_loads(CONFIGS[config], named, compiled.metadata) if attends else 0,
        multiplies=attends and not _exact(named),
    )


def _exact(named: dict[str, Any]) -> bool:
    """Whether a launch multiplies float32 as it is, which NVIDIA's tensor cores do not."""
    return str(named["DOT"]) == "fp32" and named["PRECISION"] == "ieee"


def _wide_loads(config: Config, named: dict[str, Any], metadata: Any) -> int:
    """Loads of 16 bytes that one step takes: a tile of keys and one of values, among all threads."""
    size = (config.kv_dtype or config.dtype).itemsize
    tile = named["TILE"] * named["D_PADDED"] * size / (16 * metadata.num_warps * metadata.warp_size)
    return 2 * math.ceil(tile)


class Instruction(NamedTuple):
    """One of a kernel's."""

    name: str
    bytes_loaded: int | None = None
    """From global memory."""
    jumps_to: int | None = None
    """The number of the instruction that a branch leads to."""


def _loads(code: Sequence[Instruction]) -> dict[str, int]:
    """Global loads, by bytes."""
    counts = Counter(one.bytes_loaded for one in code if one.bytes_loaded is not None)
    return {str(size): count for size, count in sorted(counts.items())}


def _steps(code: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """The innermost loops that multiply: on the tensor core, or, of a kernel that does without, by FFMA."""
    product = _TENSOR_CORE if any(_TENSOR_CORE.match(one.name) for one in code) else _PLAIN_PRODUCT
    loops = [(one.jumps_to, at + 1) for at, one in enumerate(code) if one.jumps_to is not None and one.jumps_to <= at]
    steps = [loop for loop in loops if any(product.match(one.name) for one in code[slice(*loop)])]
    return [
        code[slice(*outer)]
        for outer in steps
        if not any(outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1] for inner in steps)
    ]


def _read_cubin(asm: dict[str, Any]) -> tuple[int, int, list[Instruction]]:
    """Registers, bytes of stack, instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(option: str, path: str) -> str:
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True, timeout=120).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage, sass = dump("-res-usage", file.name), dump("-sass", file.name)
    spilled = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index] - a tool that says nothing is broken
    return int(re.search(r"REG:(\d+)", usage)[1]), spilled, _sass_code(sass)  # type: ignore[index]


def _sass_code(sass: str) -> list[Instruction]:
    """What cuobjdump shows: an address, perhaps a predicate, a name and operands a line."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)", re.MULTILINE)
    found = line.findall(sass)
    numbers = {int(address, 16): number for number, (address, *_) in enumerate(found)}
    code: list[Instruction] = []
    for _, name, operands in found:
        short = name.split(".")[0]
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if short == "BRA" else None
        code.append(
            Instruction(
                short,
                bytes_loaded=_sass_bytes(name) if short in ("LDG", "LDGSTS") else None,
                jumps_to=numbers.get(int(target[1], 16)) if target else None,
            )
        )
    return code


def _sass_bytes(name: str) -> int:
    for suffix, size in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)):
        if suffix in name:
            return size
    return 4


_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "sbyte": 1}


def _read_amdgcn(asm: dict[str, Any]) -> tuple[int, int, list[Instruction]]:
    """Registers, registers that went to memory, instructions."""
    text: str = asm["amdgcn"]
    numbers = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    return numbers["vgpr_count"], numbers["vgpr_spill_count"], _amdgcn_code(text)


def _amdgcn_code(text: str) -> list[Instruction]:
    """What the compiler wrote: labels, and a name and operands a line."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for label, name, operands in re.findall(r"^(?:(\.\w+):|\t([a-z]\w+)([^;\n]*))", text, re.MULTILINE):
        if label:
            labels[label] = len(found)
        else:
            found.append((name, operands.strip()))
    code: list[Instruction] = []
    for name, operands in found:
        load = re.match(r"(?:global|buffer)_load_(?:\w*?)(dwordx?\d?|u?short|[us]byte)", name)
        branch = name.startswith(("s_branch", "s_cbranch"))
        code.append(
            Instruction(
                name,
                bytes_loaded=_AMD_BYTES[load[1]] if load else None,
                jumps_to=labels.get(operands) if branch else None,
            )
        )
    return code


def _start_worker() -> None:
    """What compiles must not have been told to interpret; and one compilation uses one core."""
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)


def compile_everywhere(targets: Sequence[str], configs: Sequence[str]) -> Iterator[Compiled]:
    """Every configuration on every target, as many at once as there are cores."""
    pairs = [(target, config) for config in configs for target in targets]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_start_worker) as pool:
        for compiled in pool.map(compile_all, *zip(*pairs, strict=True)):
            yield from compiled


COLUMNS = (
    "target",
    "configuration",
    "kernel",
    "registers",
    "spilled",
    "shared KB",
    "instructions",
    "tensor core",
    "loads",
)


def _row(compiled: Compiled) -> str:
    none = "none, by choice" if compiled.steps and not compiled.multiplies else "-"
    matrix = ", ".join(f"{count} {name}" for name, count in compiled.matrix.items()) or none
    loads = ", ".join(f"{size}: {count}" for size, count in compiled.loads.items())
    cells = (
        *(compiled.target, compiled.config, compiled.kernel.strip("_").removesuffix("_kernel")),
        *(compiled.registers, compiled.spilled, round(compiled.shared_bytes / 1024, 1), compiled.instructions),
        *(matrix, loads),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was asked for; 1 where --check finds a broken rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a rule is broken")
    parser.add_argument("--json", action="store_true", help="JSON lines in place of a table")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this target (may be repeated)")
    parser.add_argument("--config", choices=CONFIGS, action="append", help="only this configuration (may be repeated)")
    options = parser.parse_args(argv)
    broken = 0
    if not options.json:
        print("| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", sep="\n")
    for compiled in compile_everywhere(options.target or list(TARGETS), options.config or list(CONFIGS)):
        print(json.dumps(asdict(compiled)) if options.json else _row(compiled), flush=True)
        for rule in compiled.broken_rules():
            broken += 1
            print(f"{compiled.target}, {compiled.config}, {compiled.kernel}: {rule}", file=sys.stderr, flush=True)
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
