"""S56: blocks of float8 are shared, forked, swapped out and swapped in, and mean afterwards what they meant before."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo import models
from octavo.ids import BlockId, SequenceId
from octavo.records.attend import BlockCopy
from tests.support import tiny_model
from tests.support.hand_runner import BLOCK_SIZE, HandRunner, Stream
from tests.support.paged_batch import ROUNDING_LOSS, make_batch
from worker.core.step import Chunk, StepPlan
from worker.kernels import block_ops, choose, reference
from worker.runner import RunnerOptions, open_runner

CPU = torch.device("cpu")
HISTORY = [random.Random(7).randrange(3, tiny_model.VOCAB_SIZE) for _ in range(3 * BLOCK_SIZE - 5)]
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(params=[torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def hand(request: pytest.FixtureRequest, folder: Path) -> HandRunner:
    attend = choose(device=CPU, dtype=torch.float32, kv_dtype=request.param, head_dim=32)
    return HandRunner(folder, attend, kv_dtype=request.param)


@pytest.fixture
def cold(hand: HandRunner) -> list[int]:
    """What follows the history in blocks that nobody else has had."""
    (drawn,) = hand.run(Stream(HISTORY, COUNT))
    return drawn


@pytest.fixture
def table(hand: HandRunner) -> list[BlockId]:
    """Blocks of the history, all but its last token, with room for what follows."""
    blocks = hand.blocks_for(len(HISTORY) + COUNT)
    hand.runner.execute(StepPlan((_chunk(0, HISTORY[:-1], blocks),)))
    return blocks


def _chunk(start: int, tokens: Sequence[int], table: list[BlockId]) -> Chunk:
    """A chunk that draws nothing."""
    return Chunk(sequence=SequenceId(0), start=start, tokens=tuple(tokens), table=table, draws=())


def _go_on(hand: HandRunner, table: list[BlockId]) -> list[int]:
    """What a sequence draws that has found its history in `table`."""
    stream = Stream(HISTORY, COUNT, table=table)
    stream.computed = len(HISTORY) - 1
    (drawn,) = hand.run(stream)
    return drawn


def test_shared_blocks_read_as_they_did(hand: HandRunner, cold: list[int], table: list[BlockId]) -> None:
    full = len(HISTORY) // BLOCK_SIZE
    sibling = [*table[:full], *hand.blocks_for(len(HISTORY) + COUNT - full * BLOCK_SIZE)]
    hand.runner.execute(StepPlan((_chunk(full * BLOCK_SIZE, HISTORY[full * BLOCK_SIZE : -1], sibling),)))

    assert _go_on(hand, sibling) == cold
    assert _go_on(hand, table) == cold


def test_a_forked_block_reads_as_its_source_did(hand: HandRunner, cold: list[int], table: list[BlockId]) -> None:
    last = (len(HISTORY) - 1) // BLOCK_SIZE
    fork = [*table[:last], *hand.blocks_for(len(HISTORY) + COUNT - last * BLOCK_SIZE)]
    other = _chunk(len(HISTORY) - 1, [5], table)
    hand.runner.execute(StepPlan((other,), copies=(BlockCopy(table[last], fork[last]),)))

    assert _go_on(hand, fork) == cold


def test_blocks_swapped_out_and_into_others_read_as_they_did(
    hand: HandRunner, cold: list[int], table: list[BlockId]
) -> None:
    planes = hand.pool.planes
    elsewhere = block_ops.gather_blocks(planes, table).clone()
    for layer in range(hand.pool.shape.num_layers):
        for pool in hand.pool.layer(layer):
            pool[torch.tensor(table)] = torch.full((), torch.nan).to(pool.dtype)
    back = hand.blocks_for(len(table) * BLOCK_SIZE)

    block_ops.scatter_blocks(planes, back, elsewhere)

    assert _go_on(hand, back) == cold


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_float8_loses_is_within_its_tolerance(kv_dtype: torch.dtype) -> None:
    """Scales that use the range of the type, written by `block_ops` and read by the kernel."""
    batch = make_batch([(200, 1), (0, 60)], heads=6, kv_heads=2)
    k_scale, v_scale = torch.tensor([0.02, 3.0]), torch.tensor([0.5, 0.007])
    small = [torch.zeros(batch.k_pool.shape, dtype=kv_dtype) for _ in range(2)]
    num_blocks, _, block_size, _ = batch.k_pool.shape
    slots = torch.arange(num_blocks * block_size)
    rows = [pool.nan_to_num().transpose(1, 2).flatten(0, 1) for pool in (batch.k_pool, batch.v_pool)]
    block_ops.write(*small, *rows, slots, k_scale=k_scale, v_scale=v_scale)
    attend = choose(device=CPU, dtype=torch.float32, kv_dtype=kv_dtype, head_dim=64)
    given = batch.arguments | {"k_pool": small[0], "v_pool": small[1], "k_scale": k_scale, "v_scale": v_scale}

    out = attend(**given)

    assert batch.worst_error(out) < ROUNDING_LOSS[kv_dtype]
    torch.testing.assert_close(out, reference.attend(**given), rtol=1e-4, atol=1e-5)


def test_a_worker_told_so_registers_a_float8_pool_of_four_times_the_blocks(folder: Path) -> None:
    described = models.find(str(folder), folder.parent)
    options = RunnerOptions(kv_memory_bytes=1 << 20, dtype="float32", threads=torch.get_num_threads())

    _, plain = open_runner(described, options)
    _, small = open_runner(described, replace(options, kv_dtype="float8_e4m3fn"))

    assert (plain.dtype, plain.kv_dtype) == ("float32", "float32")
    assert (small.dtype, small.kv_dtype) == ("float32", "float8_e4m3fn")
    assert small.num_blocks == 4 * plain.num_blocks
    assert small.chain_root() != plain.chain_root(), "what one pool holds is no hit for the other"
