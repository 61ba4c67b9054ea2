"""One suite for every implementation of `worker.kernels.Attend`.

On a machine with a CUDA device the Triton kernels run there; elsewhere they run in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fast_interpreter
from tests.support.paged_batch import ROUNDING_LOSS, PagedBatch, make_batch
from worker.kernels import Attend, AttendStep, Option, block_ops, native, prepare, reference, shared_prefix, torch_cpu
from worker.kernels.arguments import options_of
from worker.kernels.native_build import Level, NativeUnavailable, usable_levels
from worker.kernels.shared_prefix import SharedPrefixes

S = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL_OPTIONS: list[Option] = ["window", "soft_cap", "sinks", "scales"]
HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 2 * S + 3},
    "narrow window": {"window": 1},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "scales": {"scales": True},
    "all": {"window": 3 * S - 1, "soft_cap": 3.0, "sinks": True, "scales": True},
}
EXAMPLES = 200
"""Of any batch, for each implementation; where Triton's interpreter runs, only in CI."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Implementation:
    attend: Attend
    device: torch.device = CPU
    supports: Callable[[torch.dtype, torch.dtype, int, frozenset[Option]], str | None] = lambda *_: None
    """None, or why it takes no calls of (queries' dtype, pool's dtype, D, options): `choose` then goes elsewhere."""

    def skip_unless_supported(self, batch: PagedBatch) -> None:
        if (reason := self.lacks(batch)) is not None:
            pytest.skip(f"falls back: {reason}")

    def lacks(self, batch: PagedBatch) -> str | None:
        return self.supports(batch.q.dtype, batch.k_pool.dtype, batch.q.shape[2], options_of(batch.options))

    def __call__(self, batch: PagedBatch) -> torch.Tensor:
        return self.attend(**batch.to(self.device).arguments).cpu()


def _native(level: Level | None = None) -> Implementation:
    """At a level of instructions, by default the best that this CPU has."""
    try:
        return Implementation(native.load_level(level or usable_levels()[0]), supports=native.supports)
    except NativeUnavailable as unavailable:
        pytest.skip(str(unavailable))


def _triton() -> Implementation:
    pytest.importorskip("triton")
    from worker.kernels import triton_attend

    if torch.cuda.is_available():
        return Implementation(triton_attend.attend, device=torch.device("cuda"), supports=triton_attend.supports)
    fast_interpreter.install()
    return Implementation(triton_attend.attend, supports=triton_attend.supports)


IMPLEMENTATIONS: dict[str, Callable[[], Implementation]] = {
    "reference": lambda: Implementation(reference.attend),
    "torch": lambda: Implementation(torch_cpu.attend),
    **{f"native {level.name}": lambda level=level: _native(level) for level in usable_levels()},
    "triton": _triton,
}


def tolerance(batch: PagedBatch) -> float:
    """What the arithmetic may lose: what the pool holds is what is expected, so its own rounding is none of that."""
    return 1e-5 if batch.q.dtype == torch.float32 else 1e-2


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return IMPLEMENTATIONS[request.param]()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_decodes_of_every_length_agree_with_the_oracle(
    implementation: Implementation, group: int, dtype: torch.dtype
) -> None:
    lengths = (1, S - 1, S, S + 1, 3 * S, 1000)
    batch = make_batch([(n - 1, 1) for n in lengths], heads=2 * group, kv_heads=2, dtype=dtype)

    implementation.skip_unless_supported(batch)
    assert batch.worst_error(implementation(batch)) < tolerance(batch)


RAGGED = [(0, S + 1), (40, 1), (S, S), (2 * S - 1, 2), (0, 1), (5, 40), (70, 1)]
"""Sequences as (history, new tokens): chunks and decodes, around the ends of blocks."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_chunks_and_decodes_in_one_batch_agree_with_the_oracle(
    implementation: Implementation, group: int, dtype: torch.dtype
) -> None:
    spans = [(0, S + 1), (40, 1), (S, S), (2 * S - 1, 2), (0, 2), (5, 75), (0, 1), (150, 3)]
    batch = make_batch(spans, heads=group, kv_heads=1, dtype=dtype)

    implementation.skip_unless_supported(batch)
    assert batch.worst_error(implementation(batch)) < tolerance(batch)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("group", [1, 3])
def test_every_option_agrees_with_the_oracle(implementation: Implementation, group: int, option: str) -> None:
    batch = make_batch(RAGGED, heads=2 * group, kv_heads=2, head_dim=32, **OPTIONS[option])

    implementation.skip_unless_supported(batch)
    assert batch.worst_error(implementation(batch)) < tolerance(batch)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pools_of_eight_bits_agree_with_the_oracle(
    implementation: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Held to what the bits stand for, to a tenth of what rounding to them costs: they are read exactly."""
    spans = [*RAGGED, *((n - 1, 1) for n in (1, S - 1, S, S + 1, 3 * S, 1000))]
    batch = make_batch(spans, heads=6, kv_heads=2, head_dim=32, dtype=dtype, kv_dtype=kv_dtype, scales=True)

    implementation.skip_unless_supported(batch)
    assert batch.worst_error(implementation(batch)) < tolerance(batch)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_every_number_of_eight_bits_is_read_as_torch_reads_it(
    implementation: Implementation, kv_dtype: torch.dtype
) -> None:
    """A sequence of one position has all the weight. Of what is not finite, only the NaN that a write makes."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[~codes.view(kv_dtype).float().isfinite() & (codes & 0x7F != 0x7F)] = 0
    v_pool = codes.view(kv_dtype).reshape(1, 1, 1, 256)
    k_pool, q = torch.zeros_like(v_pool.float()).to(kv_dtype), torch.zeros(1, 1, 256)
    plan = {"tables": torch.zeros(1, 1).int(), "lengths": torch.ones(1).int(), "query_starts": torch.arange(2).int()}
    batch = PagedBatch(q=q, k_pool=k_pool, v_pool=v_pool, scale=1.0, options={}, expected=v_pool[0, 0].double(), **plan)

    torch.testing.assert_close(implementation(batch), v_pool[0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_in_eight_bits_loses_no_more_than_its_rounding(
    implementation: Implementation, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Written by `block_ops`, read by the implementation, compared with keys and values that were never rounded."""
    spans = [(0, S + 1), (S, S), (5, 40), *((n - 1, 1) for n in (S, S + 1, 3 * S, 1000))]
    exact = make_batch(spans, heads=6, kv_heads=2, scales=True)
    scales = {name: exact.options.pop(name) for name in ("k_scale", "v_scale")}
    written = replace(exact, q=exact.q.to(dtype), **_rounded(exact, kv_dtype, **scales), options=exact.options | scales)

    implementation.skip_unless_supported(written)
    assert written.worst_error(implementation(written)) < ROUNDING_LOSS[kv_dtype]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_heads_of_every_size_agree_with_the_oracle(implementation: Implementation, head_dim: int) -> None:
    batch = make_batch([(0, S + 1), (40, 1), (S, 1), (2 * S, 3)], heads=9, kv_heads=3, head_dim=head_dim)

    implementation.skip_unless_supported(batch)
    assert batch.worst_error(implementation(batch)) < tolerance(batch)


@pytest.mark.parametrize("block_size", [1, 2, 7, 32, 256])
def test_blocks_of_every_size_agree_with_the_oracle(implementation: Implementation, block_size: int) -> None:
    batch = make_batch([(0, 9), (40, 1), (300, 1), (255, 2)], head_dim=32, block_size=block_size)

    implementation.skip_unless_supported(batch)
    assert batch.worst_error(implementation(batch)) < tolerance(batch)


@pytest.mark.parametrize("group", [2, 7, 16, 20])
def test_groups_of_every_size_agree_with_the_oracle(implementation: Implementation, group: int) -> None:
    batch = make_batch([(0, 9), (40, 1), (S, 4)], heads=group, kv_heads=1, head_dim=32)

    assert batch.worst_error(implementation(batch)) < tolerance(batch)


def test_a_window_reads_no_block_before_it(implementation: Implementation) -> None:
    """A table may forget blocks that no query sees any more: they hold NaN here, as another sequence's might."""
    batch = make_batch([(6 * S + 3, 1), (5 * S, 4)], head_dim=32, window=S)
    implementation.skip_unless_supported(batch)
    k_pool, v_pool = batch.k_pool.clone(), batch.v_pool.clone()
    for pool in (k_pool, v_pool):
        pool[batch.tables[:, :4].flatten().long()] = torch.nan

    assert batch.worst_error(implementation(replace(batch, k_pool=k_pool, v_pool=v_pool))) < tolerance(batch)


def test_a_sink_larger_than_every_score_takes_all_the_weight(implementation: Implementation) -> None:
    batch = make_batch([(20, 1), (3, 9)], heads=2, head_dim=32, sinks=True)
    implementation.skip_unless_supported(batch)
    sunk = replace(batch, options=batch.options | {"sinks": torch.full((2,), 200.0)})

    out = implementation(sunk)

    assert out.abs().max() < 1e-30, "exp(-200) of the weight is left"


@pytest.mark.parametrize("option", ["none", "sinks", "all but window", "window"])
def test_a_plan_of_shared_prefixes_changes_no_result(
    implementation: Implementation, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {
        "none": {},
        "sinks": {"sinks": True},
        "all but window": {"sinks": True, "soft_cap": 3.0, "scales": True},
        "window": {"window": 2 * S},
    }
    spans = [(330, 1), (0, 20), (20 * S, 1), (3, 1), (20 * S + 15, 1), (19 * S, 1), (20 * S, 5), (600, 1), (20 * S, 1)]
    batch = make_batch(spans, heads=6, kv_heads=2, head_dim=32, shared_blocks=20, **asked[option])
    implementation.skip_unless_supported(batch)
    monkeypatch.setattr(shared_prefix, "LAUNCH_POSITIONS", 1)
    plan = shared_prefix.plan(
        *(x.numpy() for x in (batch.tables, batch.lengths, batch.query_starts)),
        block_size=S,
        device=implementation.device,
    )
    assert plan is not None
    assert plan.positions.tolist() == [320, 0, 320, 0, 320, 0, 0, 320, 320]

    out = implementation(replace(batch, options=batch.options | {"shared": plan}))

    assert batch.worst_error(out) < tolerance(batch)


def test_a_plan_for_other_sequences_is_refused(implementation: Implementation) -> None:
    plan = SharedPrefixes(**dict.fromkeys(SharedPrefixes.__slots__, torch.zeros(7, dtype=torch.int32)))

    with pytest.raises(ValueError, match="shared was planned for 7 sequences, lengths has 3"):
        implementation.attend(**GOOD.arguments, shared=plan)


def test_a_chunk_of_several_panels_agrees_with_the_oracle(implementation: Implementation) -> None:
    batch = make_batch([(70, 130)], heads=3, kv_heads=1, head_dim=32)

    assert batch.worst_error(implementation(batch)) < tolerance(batch)


def test_what_an_unwritten_slot_holds_never_leaks(implementation: Implementation) -> None:
    """S55: every slot that no position owns holds NaN; any length from 1 to three blocks."""
    batch = make_batch([(n - 1, 1) for n in range(1, 3 * S + 1)], heads=1, head_dim=16)

    out = implementation(batch)

    assert not out.isnan().any()
    assert batch.worst_error(out) < tolerance(batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_company_in_the_batch_changes_no_bit(implementation: Implementation, dtype: torch.dtype) -> None:
    spans = [(599, 1), (3, 9), (0, 1), (S, 1), (30, 17), (2 * S, 1), (0, 40)]
    batch = make_batch(spans, heads=3, kv_heads=1, dtype=dtype)
    implementation.skip_unless_supported(batch)

    together = implementation(batch)

    for b, span in enumerate(batch.spans):
        assert torch.equal(implementation(batch.alone(b)), together[span]), f"sequence {b} differs alone"


def test_the_number_of_threads_changes_no_bit_of_the_native_result(threads: Callable[[int], None]) -> None:
    batch = make_batch([(999, 1), (0, 70), (300, 1), (100, 30)], heads=6, kv_heads=2)
    results = []

    for count in (1, 2, 5):
        threads(count)
        results.append(_native()(batch))

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_cut_of_a_prompt_into_chunks_changes_no_bit_of_the_native_result() -> None:
    """What a cold prompt computes in one chunk, a hit computes in a shorter one (S1)."""
    whole = make_batch([(0, 200)], heads=3, kv_heads=1)
    tail = replace(
        whole,
        q=whole.q[77:],
        query_starts=torch.tensor([0, 123], dtype=torch.int32),
        expected=whole.expected[77:],
    )

    assert torch.equal(_native()(whole)[77:], _native()(tail))


@pytest.mark.parametrize("kv_dtype", [torch.float32, *FP8], ids=str)
def test_pools_and_queries_may_be_strided_views(implementation: Implementation, kv_dtype: torch.dtype) -> None:
    batch = make_batch([(20, 1), (0, 5), (40, 1)], heads=4, kv_heads=2, head_dim=32, kv_dtype=kv_dtype)
    strided = replace(
        batch,
        q=batch.q.transpose(0, 1).contiguous().transpose(0, 1),
        k_pool=torch.stack([batch.k_pool, batch.v_pool], dim=3)[:, :, :, 0],
        v_pool=batch.v_pool.transpose(1, 2).contiguous().transpose(1, 2),
    )

    assert torch.equal(implementation(strided), implementation(batch))


def test_blocks_beyond_two_to_the_31_elements_are_reached(implementation: Implementation) -> None:
    if implementation.device != CPU and torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 9 GB of the GPU's memory; on a CPU pages that nobody touches cost nothing")
    batch = make_batch([(20, 1), (3, 6)], heads=1, head_dim=64, dtype=torch.bfloat16)
    far = 2**31 // batch.k_pool[0].numel()
    count = batch.k_pool.shape[0]
    k_pool, v_pool = (torch.empty(far + count, *batch.k_pool.shape[1:], dtype=torch.bfloat16) for _ in range(2))
    k_pool[far:], v_pool[far:] = batch.k_pool, batch.v_pool
    moved = replace(batch, k_pool=k_pool, v_pool=v_pool, tables=batch.tables.clamp(max=count) + far)

    assert torch.equal(implementation(moved), implementation(batch))


def test_an_empty_batch_has_an_empty_result(implementation: Implementation) -> None:
    batch = make_batch([(3, 1)])
    empty = replace(
        batch,
        q=batch.q[:0],
        tables=batch.tables[:0],
        lengths=batch.lengths[:0],
        query_starts=torch.zeros(1, dtype=torch.int32),
    )

    assert implementation(empty).shape == (0, 3, 64)


CALLS = [
    (dtype, kv_dtype, head_dim, frozenset(options))
    for dtype, kv_dtype, head_dim in product(DTYPES, DTYPES + FP8, [8, 16, 40, 64, 80, 128, 208])
    for count in range(len(ALL_OPTIONS) + 1)
    for options in combinations(ALL_OPTIONS, count)
]


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_blocks_of_eight_bits_are_shared_forked_and_moved_without_loss(
    implementation: Implementation, kv_dtype: torch.dtype
) -> None:
    """S56: the scales are the layer's, so that a block means the same wherever it lies, and whoever reads it."""
    exact = make_batch([(3 * S, 1), (50, 1), (60, 4)], heads=6, kv_heads=2, head_dim=32, scales=True)
    scales = {name: exact.options.pop(name) for name in ("k_scale", "v_scale")}
    cold = replace(exact, **_rounded(exact, kv_dtype, **scales), options=exact.options | scales)
    implementation.skip_unless_supported(cold)
    planes = torch.stack([cold.k_pool, cold.v_pool])
    private = int(cold.tables[0, 3])

    forked = planes.clone()
    block_ops.copy_blocks(forked, [(int(cold.tables[1, 0]), private)])  # copy on write, into a block of nobody else
    out = block_ops.gather_blocks(planes, list(range(planes.shape[1])))
    elsewhere = torch.full((2, 40, *planes.shape[2:]), torch.nan, dtype=kv_dtype)
    block_ops.scatter_blocks(elsewhere, list(range(39, 39 - planes.shape[1], -1)), out)
    tables = cold.tables.clone()
    tables[1, 0] = private
    fork = replace(cold, k_pool=forked[0], v_pool=forked[1], tables=tables).alone(1)
    moved = replace(cold, k_pool=elsewhere[0], v_pool=elsewhere[1], tables=39 - cold.tables.clamp(max=39))

    result = implementation(cold)

    assert cold.worst_error(result) < ROUNDING_LOSS[kv_dtype]
    assert torch.equal(implementation(moved), result)
    assert torch.equal(implementation(fork), result[cold.spans[1]])


def _rounded(
    batch: PagedBatch, kv_dtype: torch.dtype, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The pools of a batch as `block_ops.write` would fill them; what nobody wrote holds NaN as before."""
    pools = {"k_pool": batch.k_pool, "v_pool": batch.v_pool}
    rows = [pool.transpose(1, 2).flatten(0, 1) for pool in pools.values()]  # [N * S, Hkv, D], slot by slot
    meant = [x * scale[:, None] for x, scale in zip(rows, (k_scale, v_scale), strict=True)]
    written = [torch.full(pool.shape, torch.nan, dtype=kv_dtype) for pool in pools.values()]
    slots = (~rows[0].isnan().any(dim=2).any(dim=1)).nonzero()[:, 0]
    block_ops.write(*written, *(x[slots] for x in meant), slots, k_scale=k_scale, v_scale=v_scale)
    return dict(zip(pools, written, strict=True))


@st.composite
def batches(draw: st.DrawFn, supports: Callable[..., str | None]) -> PagedBatch:
    """Any batch that an implementation takes."""
    taken = [call for call in CALLS if supports(*call) is None]
    dtype, kv_dtype, head_dim, options = draw(st.sampled_from(taken))
    kv_heads = draw(st.integers(1, 3))
    block_size = draw(st.integers(1, 40))
    ends = [0, block_size - 1, block_size, block_size + 1, 3 * block_size, 999]
    histories = st.one_of(st.integers(0, 70), st.sampled_from(ends))
    spans = st.tuples(histories, st.one_of(st.just(1), st.integers(2, 30)))
    return make_batch(
        draw(st.lists(spans, min_size=1, max_size=4)),
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=draw(st.integers(1, 90)) if "window" in options else None,
        soft_cap=draw(st.floats(0.5, 50)) if "soft_cap" in options else None,
        sinks="sinks" in options,
        scales="scales" in options,
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_any_batch_agrees_with_the_oracle_and_its_last_sequence_with_itself_alone(name: str) -> None:
    implementation = IMPLEMENTATIONS[name]()

    @settings(max_examples=EXAMPLES if name != "triton" else min(settings().max_examples, EXAMPLES))
    @given(batches(implementation.supports))
    def agrees(batch: PagedBatch) -> None:
        together = implementation(batch)
        last = len(batch.spans) - 1
        assert batch.worst_error(together) < tolerance(batch)
        assert torch.equal(implementation(batch.alone(last)), together[batch.spans[last]])

    agrees()


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, two apart in memory."""
    return torch.stack([x, x], dim=-1)[..., 0]


GOOD = make_batch([(20, 1), (0, 5), (30, 1)], heads=4, kv_heads=2)
BAD: dict[str, tuple[dict[str, object], str]] = {
    "q axes": ({"q": GOOD.q[0]}, "q has 2 axes, wanted 3"),
    "v_pool shape": ({"v_pool": GOOD.v_pool[1:]}, r"v_pool is \[7, .*, k_pool \[8, "),
    "q dtype": ({"q": GOOD.q.double()}, "q is torch.float64, wanted torch.float32 or torch.bfloat16 or torch.float16"),
    "pool dtype": (
        {"k_pool": GOOD.k_pool.double(), "v_pool": GOOD.v_pool.double()},
        "k_pool is torch.float64, wanted torch.float32 or .* or torch.float8_e5m2",
    ),
    "v_pool dtype": ({"v_pool": GOOD.v_pool.half()}, r"v_pool is .* torch.float16 .*, k_pool .* torch.float32"),
    "head size": ({"q": GOOD.q[..., :32]}, "k_pool has heads of 64 elements, q of 32"),
    "heads": ({"q": GOOD.q[:, :3]}, "q has 3 heads, no multiple of k_pool's 2"),
    "q stride": (
        {"q": GOOD.q.transpose(1, 2).contiguous().transpose(1, 2)},
        "q has stride 4 on its last axis, wanted 1",
    ),
    "k_pool stride": ({"k_pool": _strided(GOOD.k_pool)}, "k_pool has stride 2 on its last axis, wanted 1"),
    "v_pool stride": ({"v_pool": _strided(GOOD.v_pool)}, "v_pool has stride 2 on its last axis, wanted 1"),
    "tables stride": ({"tables": _strided(GOOD.tables)}, "tables has stride 2 on its last axis, wanted 1"),
    "lengths stride": ({"lengths": _strided(GOOD.lengths)}, "lengths has stride 2 on its last axis, wanted 1"),
    "sinks stride": ({"sinks": _strided(torch.zeros(4))}, "sinks has stride 2 on its last axis, wanted 1"),
    "v_pool device": ({"v_pool": GOOD.v_pool.to("meta")}, "v_pool is .* on meta, k_pool .* on cpu"),
    "pools' device": (
        {"k_pool": GOOD.k_pool.to("meta"), "v_pool": GOOD.v_pool.to("meta")},
        "k_pool is on meta, q on cpu",
    ),
    "tables dtype": ({"tables": GOOD.tables.long()}, "tables is torch.int64, wanted torch.int32"),
    "lengths": ({"lengths": GOOD.lengths[:2]}, "lengths has 2 entries, wanted 3 for 3 rows of tables"),
    "starts": ({"query_starts": GOOD.query_starts[:3]}, "query_starts has 3 entries, wanted 4 for 3 rows of tables"),
    "window": ({"window": 0}, "window is 0, wanted at least 1: a query sees itself"),
    "soft cap": ({"soft_cap": 0.0}, r"soft_cap is 0.0, wanted more than 0"),
    "soft cap of NaN": ({"soft_cap": float("nan")}, "soft_cap is nan, wanted more than 0"),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks has 2 entries, wanted one for each of 4 heads"),
    "sinks dtype": ({"sinks": torch.zeros(4).half()}, "sinks is torch.float16, wanted torch.float32"),
    "sinks axes": ({"sinks": torch.zeros(4, 1)}, "sinks has 2 axes, wanted 1"),
    "k_scale": ({"k_scale": torch.ones(4)}, "k_scale has 4 entries, wanted one for each of 2 heads"),
    "v_scale dtype": ({"v_scale": torch.ones(2).double()}, "v_scale is torch.float64, wanted torch.float32"),
    "v_scale device": ({"v_scale": torch.ones(2, device="meta")}, "v_scale is on meta, q on cpu"),
    "device": ({"lengths": GOOD.lengths.to("meta")}, "lengths is on meta, q on cpu"),
}
OUT_OF_BOUNDS: dict[str, tuple[dict[str, list[object]], str]] = {
    "rows of q": ({"query_starts": [0, 1, 6, 9]}, "query_starts go from 0 to 9, wanted 0 to 7, the rows of q"),
    "no query": ({"query_starts": [0, 1, 1, 7]}, r"query_starts\[1\] is 1 and the next 1: every sequence has a query"),
    "backwards": ({"query_starts": [0, 9, 6, 7]}, r"query_starts\[1\] is 9 and the next 6"),
    "too short": ({"lengths": [21, 4, 31]}, r"lengths\[1\] is 4, fewer than its 5 queries"),
    "too long": ({"lengths": [21, 5, 65]}, r"lengths\[2\] is 65, its row of tables holds 64 positions"),
    "no such block": ({"tables": [[0, 8, 0], [1, 0, 0], [2, 3, 0]]}, r"tables\[0, 1\] is block 8, the pool has 8"),
    "negative block": ({"tables": [[0, 1, 0], [-1, 0, 0], [2, 3, 0]]}, r"tables\[1, 0\] is block -1, the pool has 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_do_not_fit_are_refused_by_name(implementation: Implementation, case: str) -> None:
    changed, message = BAD[case]

    with pytest.raises(ValueError, match=message):
        implementation.attend(**(GOOD.arguments | changed))


@pytest.mark.parametrize("case", OUT_OF_BOUNDS)
def test_values_out_of_bounds_are_refused_by_name(implementation: Implementation, case: str) -> None:
    changed, message = OUT_OF_BOUNDS[case]
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in changed.items()}

    with pytest.raises(ValueError, match=message):
        implementation.attend(**(GOOD.arguments | tensors))


def _prepared(implementation: Implementation, batch: PagedBatch, layers: int = 3) -> tuple[AttendStep, torch.Tensor]:
    """A step over pools of several layers, of which the last is the batch's; others hold NaN. And the queries."""
    here = batch.to(implementation.device).arguments
    k_pool, v_pool, q, scale = (here.pop(name) for name in ("k_pool", "v_pool", "q", "scale"))
    planes = torch.full((2 * layers, *k_pool.shape), torch.nan, device=k_pool.device).to(k_pool.dtype)
    planes[-2], planes[-1] = k_pool, v_pool
    return prepare(implementation.attend, planes, scale=scale, q_like=torch.empty_like(q), **here), q


@pytest.mark.parametrize("options", ["window", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prepared_step_attends_as_a_call_does(
    implementation: Implementation, dtype: torch.dtype, options: str
) -> None:
    batch = make_batch(RAGGED, heads=6, kv_heads=2, dtype=dtype, **OPTIONS[options])
    implementation.skip_unless_supported(batch)

    step, q = _prepared(implementation, batch)

    assert torch.equal(step(2, q).cpu(), implementation(batch))


def test_a_prepared_step_refuses_what_does_not_fit(implementation: Implementation) -> None:
    batch = make_batch([(20, 1), (3, 2)], heads=6, kv_heads=2)
    step, q = _prepared(implementation, batch)

    for layer in (-1, 3):
        with pytest.raises(IndexError, match=f"layer {layer}, the pool has 3"):
            step(layer, q)
    for wrong in (q[:2], q[:, :4], q[..., :32]):
        with pytest.raises(ValueError, match=r"q is .* wanted \[3, 6, 64\] of torch.float32"):
            step(2, wrong)
    far = replace(batch, tables=torch.full_like(batch.tables, 99))
    if implementation.device == CPU:
        with pytest.raises(ValueError, match=r"tables\[0, 0\] is block 99, the pool has "):
            _prepared(implementation, far)[0](2, q)
    with pytest.raises(ValueError, match="lengths has 1 entries, wanted 2 for 2 rows of tables"):
        _prepared(implementation, replace(batch, lengths=batch.lengths[:1]))[0](2, q)
