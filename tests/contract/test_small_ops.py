"""One suite for every implementation of `worker.kernels.small_ops.SmallOps`, held to float64 and to transformers."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from worker.kernels import block_ops, native_small_ops
from worker.kernels.native_build import Level, NativeUnavailable, usable_levels
from worker.kernels.small_ops import HeadNorms, RopeStep, SmallOps, TorchSmallOps, choose

EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
POOL_TOLERANCES = {**TOLERANCES, torch.float8_e4m3fn: 6e-2, torch.float8_e5m2: 1.2e-1}
"""A pool of 8 bits loses what its fraction of 3 or 2 bits cannot hold."""
EXAMPLES = 100
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
pool_dtypes = pytest.mark.parametrize("kv_dtype", POOL_TOLERANCES, ids=str)


def _native(level: Level) -> SmallOps:
    try:
        return native_small_ops.load_level(level)
    except NativeUnavailable as unavailable:
        pytest.skip(str(unavailable))


IMPLEMENTATIONS: dict[str, Callable[[], SmallOps]] = {
    "torch": TorchSmallOps,
    **{f"native {level.name}": lambda level=level: _native(level) for level in usable_levels()},
}


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def ops(request: pytest.FixtureRequest) -> SmallOps:
    return IMPLEMENTATIONS[request.param]()


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Their distance, as a share of what was wanted; of no numbers, none."""
    wanted = wanted.double()
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, in rows that are part of longer ones: as a packed projection's parts are."""
    whole = torch.randn(*shape[:-1], shape[-1] + 3, generator=torch.Generator().manual_seed(seed))
    return whole.to(dtype)[..., 1:-2]


class Turn:
    """A step of one layer: planes that hold NaN, scattered slots, angles that no two positions share."""

    def __init__(
        self,
        tokens: int,
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 32,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.dtype = heads, dtype
        self.packed = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
        self.q, self.k, self.v = self.packed.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        angles = torch.rand(tokens + 50, dim // 2, generator=generator) * 7
        self.cos, self.sin = (torch.cat((table, table), dim=-1) for table in (angles.cos(), angles.sin()))
        self.positions = torch.randint(tokens + 50, (tokens,), generator=generator)
        blocks = tokens // block_size + 2
        interleaved = torch.full((blocks, block_size, kv_heads, 2, dim), float("nan")).to(kv_dtype)
        self.planes = interleaved.permute(3, 0, 2, 1, 4)  # [2, N, Hkv, S, D], nothing contiguous
        self.slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("planes", "cos", "sin", "positions", "slots", "heads", "dtype")
        return {name: getattr(self, name) for name in names}

    def prepared(self, ops: SmallOps, **changed: Any) -> RopeStep:
        return ops.prepare_rope(**(self.arguments | changed))

    def made_by(self, ops: SmallOps, norms: HeadNorms | None = None) -> torch.Tensor:
        """The turned queries."""
        return self.prepared(ops)(0, self.packed, norms)

    @property
    def keys(self) -> torch.Tensor:
        """What lies in the slots that were written: [T, Hkv, D], float64."""
        return self._held(self.planes[0])

    @property
    def values(self) -> torch.Tensor:
        return self._held(self.planes[1])

    def _held(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.transpose(1, 2).flatten(0, 1).double()[self.slots]

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """transformers' own rotation of x [T, H, D], in float64."""
        cos, sin = (table[self.positions].double()[None] for table in (self.cos, self.sin))
        rotated, _ = apply_rotary_pos_emb(x.double()[None], x.double()[None], cos, sin, unsqueeze_dim=2)
        return rotated[0]


@dtypes
@settings(max_examples=EXAMPLES)
@given(tokens=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 2**32), summed=st.booleans())
def test_a_norm_is_that_of_transformers(
    ops: SmallOps, dtype: torch.dtype, tokens: int, width: int, seed: int, summed: bool
) -> None:
    x, weight = _random(seed, tokens, width, dtype=dtype), _random(seed + 1, width, dtype=dtype)
    residual = _random(seed + 2, tokens, width, dtype=dtype) if summed else None
    total = x if residual is None else residual + x
    module = LlamaRMSNorm(width, EPS)
    module.weight.data = weight

    out = ops.rms_norm(x, weight, EPS, residual=residual)

    wide = total.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert _error(out, exact) < TOLERANCES[dtype]
    assert _error(out, module(total)) < TOLERANCES[dtype]
    assert residual is None or torch.equal(residual, total)


@dtypes
@pytest.mark.parametrize("dim", [32, 50, 80, 128, 256])
def test_heads_are_normed_each_by_itself(ops: SmallOps, dtype: torch.dtype, dim: int) -> None:
    x, weight = _random(1, 5, 3, dim, dtype=dtype), _random(2, dim, dtype=dtype)

    out = ops.rms_norm(x, weight, EPS)

    rows = [ops.rms_norm(x[:, h], weight, EPS) for h in range(3)]
    assert _error(out, torch.stack(rows, dim=1)) < TOLERANCES[dtype]
    assert out.is_contiguous()


@dtypes
@settings(max_examples=EXAMPLES)
@given(
    tokens=st.integers(1, 40),
    half=st.integers(16, 128),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.sampled_from([1, 4, 16, 256]),
    kv_dtype=st.sampled_from(list(POOL_TOLERANCES)),
    seed=st.integers(0, 2**32),
)
def test_queries_and_keys_turn_as_in_transformers_and_land_in_their_slots(
    ops: SmallOps,
    dtype: torch.dtype,
    tokens: int,
    half: int,
    kv_heads: int,
    group: int,
    block_size: int,
    kv_dtype: torch.dtype,
    seed: int,
) -> None:
    """S56: whatever no position owns holds NaN before and after, and none of it comes out."""
    sizes = {"heads": group * kv_heads, "kv_heads": kv_heads, "dim": 2 * half, "block_size": block_size}
    turn = Turn(tokens, dtype=dtype, kv_dtype=kv_dtype, seed=seed, **sizes)

    out = turn.made_by(ops)

    assert out.dtype == dtype
    assert out.is_contiguous()
    assert _error(out, turn.wanted(turn.q)) < TOLERANCES[dtype]
    assert _error(turn.keys, turn.wanted(turn.k)) < POOL_TOLERANCES[kv_dtype]
    assert torch.equal(turn.values, block_ops.stored(turn.v, kv_dtype, None).double())
    assert turn.planes.float().isnan().sum() == turn.planes.numel() - 2 * turn.k.numel()


@dtypes
@pytest.mark.parametrize("dim", [32, 50, 80, 128])
def test_heads_are_normed_before_they_turn(ops: SmallOps, dtype: torch.dtype, dim: int) -> None:
    turn, bare = (Turn(9, dim=dim, dtype=dtype, kv_dtype=dtype) for _ in range(2))
    norms = HeadNorms(_random(7, dim, dtype=dtype), _random(8, dim, dtype=dtype), EPS)
    q, k = (x.double() for x in (turn.q, turn.k))
    q, k = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() for x in (q, k))

    out = turn.made_by(ops, norms)

    assert _error(out, turn.wanted(q * norms.q.double())) < TOLERANCES[dtype]
    assert _error(turn.keys, turn.wanted(k * norms.k.double())) < TOLERANCES[dtype]
    bare.made_by(ops)
    assert torch.equal(turn.values, bare.values)


@dtypes
@pytest.mark.parametrize("normed", [False, True])
def test_a_step_does_to_each_layer_what_it_does_to_one_alone(ops: SmallOps, dtype: torch.dtype, normed: bool) -> None:
    turn, layers = Turn(9, dtype=dtype), 3
    planes, alone = (torch.full((2 * layers, 5, 2, 4, 32), torch.nan, dtype=dtype) for _ in range(2))
    norms = HeadNorms(_random(7, 32, dtype=dtype), _random(8, 32, dtype=dtype), EPS) if normed else None

    step = turn.prepared(ops, planes=planes)

    for layer in range(layers):
        packed, end = _random(layer, 9, 10 * 32, dtype=dtype).contiguous(), 2 * layer + 2
        out = turn.prepared(ops, planes=alone[2 * layer : end])(0, packed, norms)
        assert torch.equal(step(layer, packed, norms), out)
        assert torch.equal(planes[:end].nan_to_num(), alone[:end].nan_to_num())
        assert planes[end:].isnan().all()


@pool_dtypes
def test_a_pool_gets_the_nearest_number_torch_knows(ops: SmallOps, kv_dtype: torch.dtype) -> None:
    """Every number of 8 bits and every bfloat16, the middles between two, and both neighbours of each of these."""
    numbers = torch.arange(256, dtype=torch.uint8)
    eights = [numbers.view(dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    exact = torch.cat([*eights, halves[halves.isfinite()], torch.tensor([torch.inf, -torch.inf, torch.nan])])
    finite = exact[exact.isfinite()].unique()
    exact = torch.cat([exact, (finite[1:] + finite[:-1]) / 2])
    near = [exact, *(torch.nextafter(exact, torch.tensor(end)) for end in (torch.inf, -torch.inf))]
    values = torch.cat(near)
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).reshape(-1, 1, 64)
    turn = Turn(len(values), heads=1, kv_heads=1, dim=64, kv_dtype=kv_dtype)
    turn.v.copy_(values)

    turn.made_by(ops)

    wanted = block_ops.stored(values, kv_dtype, None).double()
    torch.testing.assert_close(turn.values, wanted, rtol=0, atol=0, equal_nan=True)


@dtypes
@settings(max_examples=EXAMPLES)
@given(tokens=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_a_gate_is_that_of_transformers(ops: SmallOps, dtype: torch.dtype, tokens: int, width: int, seed: int) -> None:
    gate_up = _random(seed, tokens, 2 * width, dtype=dtype) * torch.tensor([10.0, 1.0]).repeat_interleave(width)
    gate_up = gate_up.to(dtype)
    gate, up = gate_up.chunk(2, dim=1)

    out = ops.silu_mul(gate_up)

    wide = gate.double()
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert _error(out, wide / (1 + (-wide).exp()) * up.double()) < TOLERANCES[dtype]
    assert _error(out, ACT2FN["silu"](gate) * up) < TOLERANCES[dtype]


def test_the_ends_of_a_gate_are_those_of_torch(ops: SmallOps) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e-30, 200.0, -200.0, 1e38, -1e38, torch.inf, torch.nan, 88.0, -88.0]])

    out = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))

    torch.testing.assert_close(out, torch.nn.functional.silu(gate), equal_nan=True)


@dtypes
def test_a_row_gets_the_same_bits_in_any_company_and_on_any_threads(
    ops: SmallOps, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """S55: alone on one thread, or among enough others that several threads share the rows."""
    tokens, dim = 80, 96
    x, gate_up = (_random(i, tokens, 4 * 299, dtype=dtype) for i in range(2))
    turn, alone = (Turn(tokens, heads=9, kv_heads=3, dim=dim, dtype=dtype, kv_dtype=dtype) for _ in range(2))

    threads(2)
    together = [ops.rms_norm(x, gate_up[0], EPS), ops.silu_mul(gate_up), turn.made_by(ops)]

    threads(1)
    for t in (0, 1, 42, tokens - 1):
        row = slice(t, t + 1)
        step = alone.prepared(ops, positions=alone.positions[row], slots=alone.slots[row])
        singly = [ops.rms_norm(x[row], gate_up[0], EPS), ops.silu_mul(gate_up[row]), step(0, alone.packed[row])]
        assert all(torch.equal(a[row], b) for a, b in zip(together, singly, strict=True))
        assert torch.equal(turn.keys[t], alone.keys[t])


def test_the_fastest_that_takes_the_call_is_chosen_and_said(caplog: pytest.LogCaptureFixture) -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16

    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        chosen = [
            choose(device=cpu, dtype=bf16, kv_dtype=torch.float8_e5m2),
            choose(device=cpu, dtype=torch.float16),
            choose(device=cpu, dtype=bf16, kv_dtype=torch.float16),
            choose(device=torch.device("meta"), dtype=bf16),
        ]

    reasons = [record.__dict__["reason"] for record in caplog.records]
    assert [isinstance(ops, TorchSmallOps) for ops in chosen[1:]] == [True, True, True]
    assert reasons[1] == "slower than native: activations of torch.float16; it takes torch.float32, torch.bfloat16"
    assert reasons[2].startswith("slower than native: a pool of torch.float16; it takes torch.float32, ")
    assert reasons[3] == "nothing else is written for meta"
    assert isinstance(chosen[0], native_small_ops.NativeSmallOps) == reasons[0].startswith("compiled for ")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.float16), "the native code got activations of torch.float16"),
        (torch.zeros(2, 8, device="meta"), "on meta, the native code wants the CPU"),
    ],
    ids=["dtype", "device"],
)
@pytest.mark.parametrize("level", usable_levels(), ids=lambda level: level.name)
def test_tensors_that_the_native_code_cannot_read_are_refused(level: Level, x: torch.Tensor, message: str) -> None:
    ops = _native(level)

    with pytest.raises(ValueError, match=message):
        ops.rms_norm(x, x[0], EPS)
    with pytest.raises(ValueError, match=message):
        ops.silu_mul(x)


def test_no_rows_make_no_rows(ops: SmallOps) -> None:
    nothing = torch.empty(0, 32)

    assert ops.rms_norm(nothing, torch.ones(32), EPS).shape == (0, 32)
    assert ops.silu_mul(nothing).shape == (0, 16)
    assert Turn(0).made_by(ops).shape == (0, 6, 32)


ROW, LINE = torch.zeros(2, 8), torch.zeros(8)
STEPPED = torch.zeros(2, 16)[:, ::2]
BAD_NORMS = {
    "axes": ({"x": LINE}, "x has 1 axes, wanted 2 or 3"),
    "dtype": ({"x": ROW.double()}, "x is torch.float64, wanted torch.float32 or torch.bfloat16 or torch.float16"),
    "stride": ({"x": STEPPED}, "x has stride 2 on its last axis, wanted 1"),
    "weight": ({"weight": torch.zeros(9)}, r"weight is \[9\], wanted \[8\]"),
    "weight dtype": ({"weight": LINE.bfloat16()}, "weight is torch.bfloat16 on cpu, x torch.float32 on cpu"),
    "residual": ({"residual": ROW[:1]}, r"residual is \[1, 8\], wanted \[2, 8\]"),
    "residual stride": ({"residual": STEPPED}, "residual has stride 2 on its last axis, wanted 1"),
    "residual device": ({"residual": ROW.to("meta")}, "residual is torch.float32 on meta, x torch.float32 on cpu"),
}


@pytest.mark.parametrize(("changed", "message"), BAD_NORMS.values(), ids=BAD_NORMS)
def test_a_norm_of_what_does_not_fit_is_refused(ops: SmallOps, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(**({"x": ROW, "weight": LINE, "eps": EPS} | changed))


BAD_GATES = {
    "axes": (LINE, "gate_up has 1 axes, wanted 2"),
    "dtype": (ROW.int(), "gate_up is torch.int32, wanted torch.float32"),
    "stride": (STEPPED, "gate_up has stride 2 on its last axis, wanted 1"),
    "halves": (ROW[:, :7], "gate_up has rows of 7 elements, which do not make two halves"),
}


@pytest.mark.parametrize(("gate_up", "message"), BAD_GATES.values(), ids=BAD_GATES)
def test_a_gate_that_does_not_fit_is_refused(ops: SmallOps, gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.silu_mul(gate_up)


LONGS = torch.zeros(5, dtype=torch.int64)
BAD_STEPS = {
    "axes": ("planes", lambda x: x[0], "planes has 4 axes, wanted 5"),
    "pool dtype": ("planes", torch.Tensor.int, "planes is torch.int32, wanted"),
    "pool stride": ("planes", lambda x: x.mT.contiguous().mT, "planes has stride 4 on its last axis, wanted 1"),
    "values": ("planes", lambda x: x[:1], "planes has 1 of them, which are not keys and values of layers"),
    "dim": ("planes", lambda x: x[..., :31], "planes has heads of 31 elements, which do not make two halves"),
    "heads": ("heads", lambda _: 5, "heads is 5, no multiple of the planes' 2"),
    "dtype": ("dtype", lambda _: torch.float64, "dtype is torch.float64, wanted torch.float32 or torch.bfloat16 or"),
    "cos axes": ("cos", lambda x: x[None], "cos has 3 axes, wanted 2"),
    "cos dtype": ("cos", torch.Tensor.bfloat16, "cos is torch.bfloat16, wanted torch.float32"),
    "cos rows": ("cos", lambda x: x[:, :16], "cos has rows of 16, wanted 32, the elements of a head"),
    "cos device": ("cos", lambda x: x.to("meta"), "sin is torch.float32 on cpu, cos torch.float32 on meta"),
    "sin": ("sin", lambda x: x[:9], r"sin is \[9, 32\], wanted \[55, 32\]"),
    "positions axes": ("positions", lambda x: x[None], "positions has 2 axes, wanted 1"),
    "positions dtype": ("positions", torch.Tensor.int, "positions is torch.int32, wanted torch.int64"),
    "positions": ("positions", lambda x: x[:4], "positions has 4 entries, slots 5"),
    "positions device": ("positions", lambda x: x.to("meta"), "positions is on meta, planes on cpu"),
    "far position": ("positions", lambda _: LONGS + 55, "positions go from 55 to 55, cos and sin have 55"),
    "negative position": ("positions", lambda _: LONGS - 1, "positions go from -1 to -1, cos and sin have 55"),
    "slots dtype": ("slots", torch.Tensor.int, "slots is torch.int32, wanted torch.int64"),
    "slots device": ("slots", lambda x: x.to("meta"), "slots is on meta, planes on cpu"),
    "far slot": ("slots", lambda x: x.clone().fill_(12), "slots go from 12 to 12, the pool has 12"),
    "negative slot": ("slots", lambda x: x.clone().fill_(-1), "slots go from -1 to -1, the pool has 12"),
}


@pytest.mark.parametrize(("name", "change", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_of_what_does_not_fit_is_refused_and_writes_nothing(
    ops: SmallOps, name: str, change: Callable[[Any], Any], message: str
) -> None:
    turn = Turn(5)

    with pytest.raises(ValueError, match=message):
        turn.prepared(ops, **{name: change(turn.arguments[name])})(0, turn.packed)

    assert turn.planes.isnan().all()


PACKED = torch.zeros(5, 320)
BAD_CALLS = {
    "tokens": ({"packed": PACKED[:4]}, ValueError, r"packed is \[4, 320\] of .* wanted \[5, 320\]"),
    "columns": ({"packed": PACKED[:, :-32]}, ValueError, r"packed is \[5, 288\] of .* wanted \[5, 320\]"),
    "strides": ({"packed": PACKED.T.contiguous().T}, ValueError, r"strides \[1, 5\], wanted .*, contiguous"),
    "dtype": ({"packed": PACKED.bfloat16()}, ValueError, r"of torch.bfloat16 .* of torch.float32"),
    "device": ({"packed": PACKED.to("meta")}, ValueError, r"on meta .* on cpu"),
    "norms": ({"norms": HeadNorms(torch.ones(32), torch.ones(8), EPS)}, ValueError, r"norms.k is \[8\], wanted \[32\]"),
    "no such layer": ({"layer": 1}, IndexError, "layer 1, the pool has 1"),
    "negative layer": ({"layer": -1}, IndexError, "layer -1, the pool has 1"),
}


@pytest.mark.parametrize(("changed", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_prepared_step_refuses_other_layers_and_writes_nothing(
    ops: SmallOps, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    turn = Turn(5)

    with pytest.raises(error, match=message):
        turn.prepared(ops)(**({"layer": 0, "packed": PACKED} | changed))

    assert turn.planes.isnan().all()
