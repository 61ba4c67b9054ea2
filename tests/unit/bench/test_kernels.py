"""The rivals of the paged attention compute what it computes, and its figures say what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import kernels
from bench.kernel_rivals import Batch, Case, if_it_runs, paged, rivals
from bench.kernel_small_ops import SmallCase

CPU = torch.device("cpu")
DECODE = Case(sequences=3, history=31, new=1, heads=6, kv_heads=2, head_dim=32)
PROMPT = Case(sequences=2, history=16, new=8, heads=6, kv_heads=2, head_dim=32)
COLD = Case(sequences=1, history=0, new=24, heads=6, kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "LAYERS", 2)


@pytest.mark.parametrize("case", [DECODE, PROMPT, COLD], ids=["decode", "prompt", "cold"])
@pytest.mark.parametrize("block_size", [8, 32])
def test_all_runners_agree(case: Case, block_size: int) -> None:
    batch = Batch(replace(case, block_size=block_size), CPU)
    for tensor in (tensor for layer in range(batch.layers) for tensor in batch.pool.layer(layer)):
        tensor.normal_()
    if block_size == 32:  # a block a sequence, in order: read without a table they mean the same
        batch.tables = torch.arange(case.sequences, dtype=torch.int32)[:, None]
    wanted = [paged(batch)(layer) for layer in range(batch.layers)]

    others = dict(rivals(batch, flex=False))

    assert set(others) == {"contiguous_sdpa", "gather_sdpa"}
    for name in ("gather_sdpa", "contiguous_sdpa") if block_size == 32 else ("gather_sdpa",):
        for layer, expected in enumerate(wanted):
            torch.testing.assert_close(others[name](layer), expected)


def test_a_rival_that_does_not_run_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(layer: int) -> torch.Tensor:
        raise OSError(f"no compiler for layer {layer}")

    assert list(if_it_runs("broken", lambda: broken)) == []
    assert capsys.readouterr().err == "broken does not run here: no compiler for layer 0\n"


def test_a_case_that_fails_leaves_the_others_their_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    misfit = replace(DECODE, heads=5)  # no multiple of its KV heads
    monkeypatch.setattr(kernels, "cases", lambda device: [misfit, DECODE])

    assert kernels.main(["--seconds", "0", "--only", "b3"]) == 1

    said = capsys.readouterr()
    assert "decode_us_fp32_b3" in said.out
    assert "fp32_b3 failed:" in said.err


def test_a_case_reads_keys_and_values_of_every_position_once() -> None:
    assert Case(sequences=32, history=511, new=1).bytes_read == 32 * 512 * 3 * 64 * 4 * 2
    assert Case(sequences=1, history=0, new=8, kv_dtype=kernels.FP8).bytes_read == 8 * 3 * 64 * 2


def test_the_lines_of_a_case_name_it_and_give_the_ratio_of_turns() -> None:
    ours, versus = kernels.measure(DECODE, CPU, bandwidth=1e9, seconds=0, flex=False)

    assert (ours["name"], ours["unit"], ours["length"]) == ("decode_us_fp32_b3", "us", 32)
    assert {"gb_per_second", "share_of_copy", "contiguous_sdpa_us", "gather_sdpa_us"} <= set(ours)
    assert (versus["name"], versus["unit"], versus["turns"]) == ("decode_vs_contiguous_fp32_b3", "ratio", 9)


def test_the_small_operations_of_a_step_have_their_lines() -> None:
    step = SmallCase(tokens=2, dtype=torch.bfloat16, layers=2)

    lines = list(kernels.measure_small(step, seconds=0))

    assert [line["name"] for line in lines] == [
        "norm_vs_torch_bf16_t2",
        "rope_write_vs_torch_bf16_t2",
        "silu_mul_vs_torch_bf16_t2",
    ]
    assert all({"value", "native_us", "torch_us"} <= set(line) for line in lines)


def test_a_ratio_is_the_median_of_turns_that_were_disturbed_together() -> None:
    times = {"paged": [1.0, 50.0, 1.0], "gather_sdpa": [2.0, 100.0, 1.0]}

    assert kernels.ratio(times, "paged", "gather_sdpa") == 0.5


def test_every_figure_that_is_promised_has_a_case() -> None:
    names = [kernels.name_of(case) for case in kernels.cases(CPU)]
    steps = {kernels.small_name_of(case) for case in kernels.small_cases()}

    assert len(set(names)) == len(names)
    assert {f"{dtype}_{size}" for dtype in ("fp32", "bf16") for size in ("b32", "b8", "b1", "h0", "h512")} <= set(names)
    assert steps == {"fp32_t1", "fp32_t32", "bf16_t1", "bf16_t32"}


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    kernels.plot(kernels.measure(DECODE, CPU, bandwidth=1e9, seconds=0, flex=False), tmp_path / "times.png")

    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_a_json_object_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cases", lambda device: [DECODE, PROMPT])

    kernels.main(["--seconds", "0", "--only", "b3"])

    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    assert names == ["copy_gb_per_second", "decode_us_fp32_b3", "decode_vs_contiguous_fp32_b3"]
