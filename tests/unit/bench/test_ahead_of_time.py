"""The rules that compiled kernels are held to, and how their code is read. `make kernels` compiles the real ones."""

from dataclasses import replace

import pytest

from bench import ahead_of_time
from bench.ahead_of_time import Compiled

SOUND = Compiled(
    target="sm_90",
    config="8B",
    kernel="_split_kernel",
    registers=128,
    spilled=0,
    shared_bytes=39_000,
    instructions=1000,
    matrix={"HMMA": 32},
    loads={"4": 6, "16": 33},
    steps=[{"4": 1, "8": 1, "16": 16}, {"16": 17}],
    wanted_wide=16,
    multiplies=True,
)


def test_a_sound_kernel_breaks_no_rule() -> None:
    assert SOUND.broken_rules() == []


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (replace(SOUND, spilled=8), "8 spilled"),
        (replace(SOUND, shared_bytes=300_000), "300000 bytes of shared memory, 232448 there"),
        (replace(SOUND, matrix={}), "no tensor core"),
        (replace(SOUND, steps=[{"16": 16}, {"16": 15}]), "15 wide loads in a step, wanted 16"),
        (replace(SOUND, steps=[{"8": 16, "16": 16}]), "narrow loads in a step: {'8': 16}"),
        (replace(SOUND, steps=[]), "no loop over positions"),
        (replace(SOUND, loads={"2": 64, "16": 33}), "narrow loads: {'2': 64}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rule_says_what_breaks_it(broken: Compiled, rule: str) -> None:
    assert broken.broken_rules() == [rule]


def test_a_kernel_that_only_moves_needs_no_tensor_core() -> None:
    assert (
        replace(SOUND, kernel="_merge_kernel", matrix={}, multiplies=False, wanted_wide=0, steps=[]).broken_rules()
        == []
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [("LDG.E.128", 16), ("LDGSTS.E.BYPASS.128", 16), ("LDG.E.64", 8), ("LDG.E", 4), ("LDG.E.U16", 2), ("LDG.E.U8", 1)],
)
def test_a_load_of_nvidia_is_as_wide_as_its_name_says(name: str, size: int) -> None:
    assert ahead_of_time._sass_bytes(name) == size


SASS = """
        /*0000*/                   LDG.E R2, desc[UR8][R2.64] ;            /* 0x01 */
                                                                           /* 0x02 */
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R1], desc[UR8][R2.64] ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/              @!P0 BRA P1, 0x10 ;
        /*0040*/               @P0 BRA 0x0 ;
        /*0050*/                   LDG.E.64 R2, desc[UR8][R2.64] ;
        /*0060*/                   BRA 0x60;
"""


def test_steps_are_the_innermost_loops_that_multiply() -> None:
    code = ahead_of_time._sass_code(SASS)

    assert [one.name for one in code] == ["LDG", "LDGSTS", "HMMA", "BRA", "BRA", "LDG", "BRA"]
    assert ahead_of_time._loads(code) == {"4": 1, "8": 1, "16": 1}
    assert [ahead_of_time._loads(step) for step in ahead_of_time._steps(code)] == [{"16": 1}]


def test_a_kernel_without_the_tensor_core_multiplies_by_ffma() -> None:
    code = ahead_of_time._sass_code(SASS.replace("HMMA.16816.F32", "FFMA"))

    assert [ahead_of_time._loads(step) for step in ahead_of_time._steps(code)] == [{"16": 1}]


def test_code_of_amd_is_read_from_its_text() -> None:
    text = (
        ".LBB0_1:   ; =>This Inner Loop\n"
        "\tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen\n"
        "\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]\n"
        "\ts_cbranch_scc1 .LBB0_1\n"
        "\tglobal_load_ushort v1, v[2:3], off\n\ts_endpgm\n"
        "    .vgpr_count:     88\n    .vgpr_spill_count: 3\n"
    )

    registers, spilled, code = ahead_of_time._read_amdgcn({"amdgcn": text})

    assert (registers, spilled) == (88, 3)
    assert code[1].name == "v_mfma_f32_32x32x8_bf16"
    assert ahead_of_time._loads(code) == {"2": 1, "16": 1}
    assert [ahead_of_time._loads(step) for step in ahead_of_time._steps(code)] == [{"16": 1}]
