"""Greedy tokens through the paged pool are those of plain transformers, however the prompt is cut and batched."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from octavo import models
from octavo.ids import BlockId, SequenceId
from octavo.records.attend import BlockCopy
from octavo.records.sampling import SamplingParams
from octavo.records.serve import TokenLogprobs
from tests.support import fast_interpreter, tiny_model
from tests.support.hand_runner import BLOCK_SIZE, GREEDY, HandRunner, Stream
from tests.support.oracle import solo_greedy
from worker import pool_size
from worker.core.step import Chunk, Draw, StepPlan, StepResult
from worker.kernels import Attend, native, reference, shared_prefix, torch_cpu
from worker.kernels.native_build import NativeUnavailable
from worker.model.loader import load
from worker.runner import RunnerOptions, open_runner, profile_memory

MODELS = {"llama": tiny_model.save_tiny_llama, "qwen3": tiny_model.save_tiny_qwen3}


def attention(name: str) -> Attend:
    if name == "native":
        try:
            return native.load(torch.float32, torch.float32, 32)
        except NativeUnavailable as unavailable:
            pytest.skip(str(unavailable))
    return {"torch": torch_cpu.attend, "reference": reference.attend}[name]


def triton_attention() -> Attend:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU there is no interpreter; the runner's pool lies on the CPU")
    from worker.kernels import triton_attend

    fast_interpreter.install()
    return triton_attend.attend


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module", params=["native", "torch", "reference"])
def hand(request: pytest.FixtureRequest, folder: Path) -> HandRunner:
    return HandRunner(folder, attention(request.param))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> HandRunner:
    """One model, one attention: for what depends on neither."""
    return HandRunner(tiny_model.save_tiny_llama(tmp_path_factory.mktemp("models") / "one"), torch_cpu.attend)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(3, tiny_model.VOCAB_SIZE) for _ in range(length)]


def chunk(tokens: Sequence[int], table: Sequence[int], *, start: int = 0, sequence: int = 0, draws: int = 1) -> Chunk:
    """A chunk that draws greedily after its last token, `draws` times."""
    return Chunk(
        sequence=SequenceId(sequence),
        start=start,
        tokens=tuple(tokens),
        table=[BlockId(block) for block in table],
        draws=tuple(Draw(GREEDY, sample, start + len(tokens)) for sample in range(draws)),
    )


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_a_prompt_in_chunks_of_any_size_goes_on_as_it_does_alone(hand: HandRunner, folder: Path, size: int) -> None:
    tokens = prompt(53)
    assert hand.run(Stream(tokens, 64, chunk=size)) == [solo_greedy(folder, tokens, 64)]


def test_prefills_and_decodes_in_one_batch_go_on_as_each_does_alone(hand: HandRunner, folder: Path) -> None:
    streams = [
        Stream(prompt(3), 40),
        Stream(prompt(70), 12, chunk=16),
        Stream(prompt(33), 20, chunk=7, begins=2),
        Stream(prompt(16), 20, begins=9),
        Stream(prompt(1), 30, begins=11),
    ]
    assert hand.run(*streams) == [solo_greedy(folder, stream.prompt, stream.count) for stream in streams]


def test_decodes_that_share_blocks_read_them_once_and_go_on_as_each_does_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3, on the kernels of a GPU, which the interpreter runs here; no step of this size would be worth it there."""
    monkeypatch.setattr(shared_prefix, "LAUNCH_POSITIONS", 1)
    monkeypatch.setattr(shared_prefix, "MEMBER_POSITIONS", 0)
    planned = []
    plan = shared_prefix.plan
    monkeypatch.setattr(shared_prefix, "plan", lambda *step, **more: planned.append(plan(*step, **more)) or planned[-1])
    folder = tiny_model.save_tiny_llama(tmp_path / "one")
    hand = HandRunner(folder, triton_attention(), num_blocks=30, shares_prefixes=True)
    common, tails = prompt(3 * BLOCK_SIZE), [prompt(n, seed=n) for n in (2, 9)]
    first = Stream([*common, *tails[0]], 6, table=hand.blocks_for(4 * BLOCK_SIZE))
    second = Stream(
        [*common, *tails[1]], 6, table=first.table[:3] + hand.blocks_for(BLOCK_SIZE), computed=len(common), begins=1
    )

    drawn = hand.run(first, second)

    assert drawn == [solo_greedy(folder, [*common, *tail], 6) for tail in tails]
    positions = [shared.positions.tolist() for shared in planned if shared is not None]
    assert positions == [[48, 48]] * 4, "from the step on in which both decode"


@pytest.mark.parametrize(
    ("device", "deterministic", "shares"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", False, False), ("cpu", True, False)],
)
def test_common_blocks_are_read_once_on_a_gpu_unless_the_worker_is_deterministic(
    device: str, deterministic: bool, shares: bool
) -> None:
    options = RunnerOptions(kv_memory_bytes=1, deterministic=deterministic)

    assert options.shares_prefixes_on(torch.device(device)) == shares


def test_a_runner_that_shares_nothing_plans_nothing(one: HandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "LAUNCH_POSITIONS", 1)
    monkeypatch.setattr(shared_prefix, "MEMBER_POSITIONS", 0)
    monkeypatch.setattr(shared_prefix, "plan", lambda *_, **__: pytest.fail("a plan was made"))
    tokens = prompt(2 * BLOCK_SIZE)
    table = one.blocks_for(3 * BLOCK_SIZE)
    sibling = table[:2] + one.blocks_for(BLOCK_SIZE)
    one.runner.execute(StepPlan((chunk(tokens, table, draws=0),)))
    pair = [chunk([7], blocks, start=len(tokens), sequence=at) for at, blocks in enumerate((table, sibling))]

    first, second = one.runner.execute(StepPlan(tuple(pair))).tokens

    assert first == second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_worker_computes_the_same_bits_however_a_prompt_is_cut(dtype: str, tmp_path: Path) -> None:
    """A hit may leave one token to compute, or any other number of them; so may a budget, and a preemption."""
    folder = models.describe("tiny", tiny_model.save_tiny_llama(tmp_path / "model"))
    options = RunnerOptions(kv_memory_bytes=1 << 22, dtype=dtype, device="cpu", deterministic=True)
    runner, _ = open_runner(folder, options)
    tokens = prompt(3 * BLOCK_SIZE + 1)
    told: list[tuple[TokenLogprobs, ...]] = []
    for at, cut in enumerate((len(tokens), len(tokens) - 1, len(tokens) - 2, 7, 1)):
        table = [BlockId(4 * at + block) for block in range(4)]
        for start in range(0, len(tokens), cut):
            part = chunk(tokens[start : start + cut], table, start=start, draws=0)
            if part.end == len(tokens):
                part = replace(part, draws=(Draw(GREEDY, 0, part.end, logprobs=5),))
            result = runner.execute(StepPlan((part,)))
        told.append(result.logprobs[0])
    assert all(each == told[0] for each in told)


def test_what_nobody_wrote_is_never_read(hand: HandRunner, folder: Path) -> None:
    """S55: every length from 1 to three blocks, in a pool that held NaN everywhere."""
    lengths = range(1, 3 * BLOCK_SIZE + 1)
    drawn = hand.run(*(Stream(prompt(length), 3) for length in lengths))
    assert drawn == [solo_greedy(folder, prompt(length), 3) for length in lengths]


def test_blocks_are_copied_before_anything_is_written(one: HandRunner) -> None:
    """A forked sequence keeps the shared block as it was before its sibling's write of the same step."""
    history = prompt(20)
    first, shared, private = one.blocks_for(3 * BLOCK_SIZE)
    one.runner.execute(StepPlan((chunk(history, [first, shared], draws=0),)))

    siblings = (chunk([7], [first, shared], start=20), chunk([9], [first, private], start=20, sequence=1))
    both = one.runner.execute(StepPlan(siblings, copies=(BlockCopy(shared, private),)))
    after = (chunk([11], [first, shared], start=21), chunk([11], [first, private], start=21, sequence=1))
    later = one.runner.execute(StepPlan(after))

    alone = [one.run(Stream([*history, token, *rest], 1)) for token in (7, 9) for rest in ((), (11,))]
    assert [[list(tokens)] for step in zip(both.tokens, later.tokens, strict=True) for tokens in step] == alone


def test_a_plan_without_chunks_only_copies(one: HandRunner) -> None:
    source, target = one.blocks_for(2 * BLOCK_SIZE)
    one.runner.execute(StepPlan((chunk(prompt(16), [source]),)))
    assert one.runner.execute(StepPlan((), copies=(BlockCopy(source, target),))) == StepResult(())
    for layer in range(one.pool.shape.num_layers):
        for tensor in one.pool.layer(layer):
            assert torch.equal(tensor[source], tensor[target])


def test_every_chunk_gets_as_many_tokens_as_it_draws(one: HandRunner) -> None:
    tables = [one.blocks_for(BLOCK_SIZE) for _ in range(3)]
    chunks = [chunk(prompt(5), table, sequence=at, draws=at) for at, table in enumerate(tables)]
    result = one.runner.execute(StepPlan(tuple(chunks)))
    assert [len(tokens) for tokens in result.tokens] == [0, 1, 2]
    assert len({token for tokens in result.tokens for token in tokens}) == 1  # one prompt, greedy


def test_a_step_that_draws_nothing_still_writes(one: HandRunner) -> None:
    tokens, table = prompt(20), one.blocks_for(2 * BLOCK_SIZE)
    silent = one.runner.execute(StepPlan((chunk(tokens[:-1], table, draws=0),)))
    spoken = one.runner.execute(StepPlan((chunk(tokens[-1:], table, start=19),)))
    assert silent.tokens == ((),)
    assert [list(spoken.tokens[0])] == one.run(Stream(tokens, 1))


def test_sampled_tokens_are_the_same_in_another_batch_and_other_blocks(one: HandRunner) -> None:
    def warm(sample: int, begins: int = 0, size: int = 1000) -> Stream:
        sampling = SamplingParams(temperature=1.3, top_k=50, top_p=0.95, seed=5)
        return Stream(prompt(21), 24, chunk=size, sampling=sampling, sample=sample, begins=begins)

    alone = [one.run(warm(sample))[0] for sample in range(3)]
    together = one.run(Stream(prompt(40), 30), warm(0, begins=3), warm(1, size=4), warm(2, begins=1, size=7))
    assert together[1:] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_nan_in_a_sequences_own_history_is_an_error(one: HandRunner) -> None:
    (block,) = one.blocks_for(BLOCK_SIZE)
    one.pool.layer(0)[0][block].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="position 6"):
        one.runner.execute(StepPlan((chunk([5], [block], start=5),)))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk(prompt(33), [0, 1])], "sequence 0: 2 blocks for 33 positions, wanted 3"),
        ([chunk([259], [0])], r"tokens 259 to 259, wanted \[0, 259\)"),
        ([chunk([5], [300])], r"blocks 300 to 300, wanted \[0, 300\)"),
        ([chunk([5], [4]), chunk([6, 7], [4], sequence=1)], "3 tokens for 2 slots"),
        ([chunk([5], [0]), chunk([], [1], start=1)], "chunk 1 of 2 has no tokens"),
    ],
)
def test_a_plan_that_cannot_be_right_is_a_bug_with_its_values(
    one: HandRunner, chunks: list[Chunk], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        one.runner.execute(StepPlan(tuple(chunks)))


class Meter:
    """Says that a step takes a megabyte beside its pool, and remembers that one ran."""

    total, free = 100 << 20, 40 << 20

    def __init__(self, one: HandRunner) -> None:
        self._pool = one.pool
        self.runs = 0

    def taken_by(self, run: Callable[[], None]) -> int:
        run()
        self.runs += 1
        pool = 64 * self._pool.shape.bytes_per_block  # 8 tokens of each of 64 sequences
        return pool + (1 << 20)


def test_a_largest_step_is_run_to_see_what_it_takes(one: HandRunner, tmp_path: Path) -> None:
    folder = tiny_model.save_tiny_llama(tmp_path / "tiny")
    described = models.find(str(folder), tmp_path)
    loaded = load(described, dtype=torch.float32, device=torch.device("cpu"), block_size=BLOCK_SIZE)
    meter = Meter(one)

    memory = profile_memory(loaded, meter, RunnerOptions(), described.max_model_tokens)

    assert meter.runs == 1
    assert asdict(memory) == {"total_bytes": 100 << 20, "free_bytes": 40 << 20, "step_bytes": 1 << 20}


@pytest.mark.parametrize(("told", "num_bytes"), [(None, pool_size.CPU_BUDGET_BYTES), (1 << 20, 1 << 20)])
def test_on_a_cpu_the_pool_is_as_large_as_told_and_says_what_it_holds(
    told: int | None, num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model.save_tiny_llama(tmp_path / "tiny")
    caplog.set_level("INFO", "octavo")

    runner, spec = open_runner(
        models.find(str(folder), tmp_path), RunnerOptions(kv_memory_bytes=told, dtype="float32", device="cpu")
    )

    assert num_bytes - spec.block_bytes < runner.pool.num_bytes <= num_bytes
    (said,) = (vars(record) for record in caplog.records if record.msg == "kv_pool")
    assert (said["bytes"], said["blocks"]) == (runner.pool.num_bytes, spec.num_blocks)
    assert said["tokens"] == spec.num_blocks * BLOCK_SIZE
