"""Two roads through a model of the Llama family: the fast one gives the generic one's logits, keys and values."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from octavo import models
from tests.support import tiny_model
from tests.support.families import FAMILIES, config
from worker.kernels import native, native_small_ops, small_ops, torch_cpu
from worker.kernels.native import NativeAttention
from worker.kernels.native_build import NativeUnavailable
from worker.kernels.small_ops import SmallOps, TorchSmallOps
from worker.kv_pool import KVPool
from worker.model import linear, llama_weights
from worker.model.batch import Batch
from worker.model.generic import UnsupportedModel
from worker.model.linear import MakeLinear
from worker.model.llama import LlamaModel
from worker.model.llama_weights import LlamaWeights
from worker.model.loader import LoadedModel, load

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 24

HALF_TURNED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
KNOWN: dict[str, PreTrainedConfig] = {
    **{name: family for name, family in FAMILIES.items() if llama_weights.misfit(family) is None},
    "llama, an own head": config("Llama", tie_word_embeddings=False),
    "llama, biases everywhere": config("Llama", attention_bias=True, mlp_bias=True),
    "llama 3's positions": config("Llama", rope_parameters=LLAMA3_ROPE),
    "llama, positions four times as dense": config(
        "Llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama, YaRN": config(
        "Llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen2, no window": config("Qwen2", use_sliding_window=False),
    "qwen3, biases": config("Qwen3", attention_bias=True),
}


@dataclass(slots=True)
class Sequence:
    """Tokens that are computed piece by piece, in blocks of its own."""

    tokens: torch.Tensor
    table: torch.Tensor
    computed: int = 0

    def next_piece(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their positions."""
        positions = torch.arange(self.computed, self.computed + count)
        self.computed += count
        return self.tokens[positions], positions


def batch_of(pieces: list[tuple[Sequence, int]]) -> Batch:
    """Of every sequence, its next tokens; logits of all of them."""
    ids, positions = zip(*(sequence.next_piece(count) for sequence, count in pieces), strict=True)
    slots = [
        sequence.table[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        for (sequence, _), at in zip(pieces, positions, strict=True)
    ]
    counts = torch.tensor([0, *(count for _, count in pieces)])
    return Batch(
        ids=torch.cat(ids)[None],
        positions=torch.cat(positions)[None],
        slots=torch.cat(slots),
        tables=torch.stack([sequence.table for sequence, _ in pieces]),
        lengths=torch.tensor([sequence.computed for sequence, _ in pieces], dtype=torch.int32),
        query_starts=counts.cumsum(0).int(),
        logit_rows=torch.arange(int(counts.sum())),
    )


SCHEDULE = ({0: 70, 1: 40}, {0: 1, 2: 33, 1: 1}, {2: 1, 0: 1, 1: 1})
"""Of each step, which sequence computes how much: a chunk with a whole prompt, decodes with another, only decodes."""


def steps(seed: int, only: int | None = None) -> list[Batch]:
    """The batches of the schedule, or what is left of them if one sequence runs alone."""
    random = torch.Generator().manual_seed(seed)
    tables = torch.randperm(NUM_BLOCKS, generator=random).reshape(3, -1).int()
    sequences = [Sequence(torch.randint(tiny_model.VOCAB_SIZE, (100,), generator=random), table) for table in tables]
    kept = [{who: count for who, count in step.items() if only in (None, who)} for step in SCHEDULE]
    return [batch_of([(sequences[who], count) for who, count in step.items()]) for step in kept if step]


def rows_of(who: int) -> list[slice]:
    """Where one sequence's rows lie in each step of the schedule that it is in."""
    starts = [sum(list(step.values())[: list(step).index(who)]) for step in SCHEDULE if who in step]
    counts = [step[who] for step in SCHEDULE if who in step]
    return [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]


def open_model(folder: Path, **options: object) -> LoadedModel:
    described = models.find(str(folder), folder.parent)
    fields = {"dtype": torch.float32, "device": CPU, "block_size": BLOCK_SIZE} | options
    return load(described, **fields)  # type: ignore[arg-type]


def run(loaded: LoadedModel, batches: list[Batch]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The logits of every step, and what the pool holds in the end; it holds NaN where nothing was written."""
    pool = KVPool(loaded.shape, NUM_BLOCKS, CPU)
    pool.planes.fill_(torch.nan)
    with torch.inference_mode():
        return [loaded.forward(batch, pool) for batch in batches], pool.planes


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def worst(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number wanted."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("family", KNOWN)
def test_the_fast_road_gives_the_logits_of_the_generic_one(family: str, tmp_path: Path) -> None:
    folder = tiny_model.save(KNOWN[family], tmp_path / "model", seed=1)
    batches = steps(seed=2)

    wanted, wanted_pool = run(open_model(folder, road="generic"), batches)
    got, got_pool = run(open_model(folder, road="fast"), batches)

    for mine, theirs in zip(got, wanted, strict=True):
        assert worst(mine, theirs) < 1e-5
        assert torch.equal(mine.argmax(-1), theirs.argmax(-1))
    assert torch.equal(got_pool.isnan(), wanted_pool.isnan())
    assert worst(got_pool.nan_to_num(), wanted_pool.nan_to_num()) < 1e-5


PARTS: dict[str, tuple[MakeLinear, Callable[[], SmallOps]]] = {
    "plain products": (linear.plain, lambda: small_ops.choose(device=CPU, dtype=torch.float32)),
    "packed products": (linear.packed, lambda: small_ops.choose(device=CPU, dtype=torch.float32)),
    "small operations of torch": (linear.plain, TorchSmallOps),
}


@pytest.mark.parametrize("parts", PARTS)
def test_it_does_so_from_any_parts(parts: str, tmp_path: Path) -> None:
    folder = tiny_model.save(FAMILIES["qwen3"], tmp_path / "model", seed=1)
    batches = steps(seed=3)
    loaded = open_model(folder, road="generic")
    wanted, _ = run(loaded, batches)
    make_linear, make_ops = PARTS[parts]
    weights = llama_weights.take(plain_model(folder), make_linear, [None, None])

    loaded = replace(loaded, forward=LlamaModel(weights, torch_cpu.attend, make_ops()))

    got, _ = run(loaded, batches)
    assert max(worst(mine, theirs) for mine, theirs in zip(got, wanted, strict=True)) < 1e-5


def native_parts(family: str, folder: Path) -> tuple[LlamaWeights, NativeAttention, SmallOps, LoadedModel]:
    """A bfloat16 model's fast road in native code only; its shape is that of the model on the generic road."""
    loaded = open_model(folder, road="generic", dtype=torch.bfloat16)
    model = plain_model(folder, torch.bfloat16)
    window = getattr(KNOWN[family], "sliding_window", None)
    windows = [window] * len(model.model.layers)
    try:
        weights = llama_weights.take(model, linear.tiled, windows)
        attend = native.load(torch.bfloat16, torch.bfloat16, loaded.shape.head_dim)
        ops = native_small_ops.load(torch.bfloat16, torch.bfloat16)
    except NativeUnavailable as unavailable:
        pytest.skip(str(unavailable))
    return weights, attend, ops, loaded


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "llama, biases everywhere"])
def test_a_chain_of_native_calls_gives_what_the_calls_give(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, attend, ops, loaded = native_parts(family, tiny_model.save(KNOWN[family], tmp_path / "model", seed=1))
    batches = steps(seed=5)

    def one_by_one(*args: Any, **options: Any) -> torch.Tensor:
        return attend(*args, **options)

    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        chain, calls = (
            replace(loaded, forward=LlamaModel(weights, attention, ops)) for attention in (attend, one_by_one)
        )
    got, got_pool = run(chain, batches)
    wanted, wanted_pool = run(calls, batches)

    assert [record.__dict__["backend"] for record in caplog.records] == ["chain", "calls"]
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(got_pool.nan_to_num(), wanted_pool.nan_to_num())


@pytest.mark.parametrize(("field", "message"), [("slots", "slots go from"), ("tables", "tables")])
def test_a_chain_tells_what_is_wrong_with_a_batch(field: str, message: str, tmp_path: Path) -> None:
    weights, attend, ops, loaded = native_parts("llama", tiny_model.save_tiny_llama(tmp_path / "model"))
    batch = steps(seed=6)[-1]
    beyond = torch.full_like(getattr(batch, field), NUM_BLOCKS * BLOCK_SIZE)

    with pytest.raises(ValueError, match=message):
        run(replace(loaded, forward=LlamaModel(weights, attend, ops)), [replace(batch, **{field: beyond})])


def test_a_step_that_wants_no_logits_writes_its_keys_and_values_all_the_same(tmp_path: Path) -> None:
    loaded = open_model(tiny_model.save_tiny_llama(tmp_path / "model"), road="fast")
    (batch, *_), nothing = steps(seed=4), torch.empty(0, dtype=torch.int64)
    pools = [KVPool(loaded.shape, NUM_BLOCKS, CPU) for _ in range(2)]

    with torch.inference_mode():
        loaded.forward(batch, pools[0])
        logits = loaded.forward(replace(batch, logit_rows=nothing), pools[1])

    assert logits.shape == (0, tiny_model.VOCAB_SIZE)
    assert torch.equal(pools[0].planes, pools[1].planes)


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_what_is_taken_is_freed_layer_by_layer(family: str, tmp_path: Path) -> None:
    model = plain_model(tiny_model.save(FAMILIES[family], tmp_path / "model", seed=0))
    held: list[int] = []

    def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        held.append(sum(x.device.type == "cpu" for layer in model.model.layers for x in layer.parameters()))
        return linear.plain(weight, bias)

    llama_weights.take(model, make_linear, [None, None])

    first, *_, last, head = held
    assert last == first / 2
    assert head == 0


def test_in_bfloat16_the_roads_differ_by_no_more_than_bfloat16_does(tmp_path: Path) -> None:
    folder = tiny_model.save(FAMILIES["qwen3"], tmp_path / "model", seed=1)
    batches = steps(seed=5)
    exact, _ = run(open_model(folder, road="generic"), batches)

    errors = {}
    for road in ("generic", "fast"):
        logits, _ = run(open_model(folder, road=road, dtype=torch.bfloat16), batches)
        errors[road] = max(worst(mine.float(), theirs) for mine, theirs in zip(logits, exact, strict=True))

    assert errors["fast"] < 1.2 * errors["generic"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_deterministic_gives_a_sequence_the_same_bits_in_any_company(
    dtype: torch.dtype, tmp_path: Path, threads: Callable[[int], None]
) -> None:
    """S55: prompts in a crowd of 110 rows and each by itself; decodes of three and of one."""
    wide = config("Llama", intermediate_size=1536)  # libraries sum so much in several ways
    loaded = open_model(tiny_model.save(wide, tmp_path / "model", seed=1), dtype=dtype, deterministic=True)
    threads(2)
    together, _ = run(loaded, steps(seed=6))

    for who in range(3):
        alone, _ = run(loaded, steps(seed=6, only=who))
        crowds = [logits for logits, step in zip(together, SCHEDULE, strict=True) if who in step]
        mine = [crowd[rows] for crowd, rows in zip(crowds, rows_of(who), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(alone, mine, strict=True))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (FAMILIES["gpt-neox"], "gpt_neox is not one of llama, "),
        (config("Llama", hidden_act="gelu"), "its MLP has gelu, not SiLU"),
        (config("Phi3", rope_parameters=HALF_TURNED), "it turns 0.5 of each head, not all"),
        (config("Llama", quantization_config={"quant_method": "fp8"}), "its weights are quantised"),
    ],
    ids=["family", "activation", "rotation", "quantised"],
)
def test_what_the_fast_road_does_not_know_it_names(other: PreTrainedConfig, reason: str) -> None:
    assert reason in (llama_weights.misfit(other) or "")


def test_the_road_is_chosen_by_the_model_unless_it_is_asked_for_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama = tiny_model.save_tiny_llama(tmp_path / "llama")
    other = tiny_model.save(FAMILIES["gpt-neox"], tmp_path / "other", seed=0)

    with caplog.at_level(logging.INFO, logger="octavo.worker"):
        taken = [
            type(open_model(folder, road=road).forward).__name__
            for folder, road in ((llama, "auto"), (llama, "fast"), (llama, "generic"), (other, "auto"))
        ]
        with pytest.raises(UnsupportedModel, match="other cannot take the fast road: gpt_neox is not one of llama, "):
            open_model(other, road="fast")

    assert taken == ["LlamaModel", "LlamaModel", "GenericModel", "GenericModel"]
    told = [(r.__dict__["road"], r.__dict__["reason"]) for r in caplog.records if r.message == "model_road"]
    assert told[0] == told[1] == ("fast", "llama is of the Llama family")
    assert told[2] == ("generic", "asked for")
    assert told[3][1].startswith("gpt_neox is not one of ")
