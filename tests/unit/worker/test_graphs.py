"""Decodes from graphs: the sizes of batches, the rows that stand for nobody, and the same tokens as without.

On a CPU a graph is the function that would be recorded, so all but the recording itself is tested there.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import models
from tests.support import tiny_model
from tests.support.hand_runner import BLOCK_SIZE, HandRunner, Stream
from worker.model.graphs import CudaCapture, again, bucket_sizes
from worker.runner import RunnerOptions, open_runner

MOST = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


class Counting:
    """A capture that counts how often each size is run, once it is recorded."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def __call__(self, run):
        def counted() -> torch.Tensor:
            logits = run()
            self.ran.append(len(logits))
            return logits

        return again(counted)


@given(most=st.integers(1, 300), count=st.integers(1, 300))
def test_every_number_of_decodes_fits_into_a_size_with_few_idle_rows(most: int, count: int):
    sizes = bucket_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    if count <= most:
        size = next(size for size in sizes if size >= count)
        assert size - count < min(8, count)


def streams(count: int) -> list[Stream]:
    """Prompts whose ends lie around the borders of blocks; the first decodes alone, the last for the longest time."""
    return [
        Stream(prompt=range(at, at + BLOCK_SIZE - 2 + at), count=10 + at, begins=at // 3, chunk=9)
        for at in range(count)
    ]


def test_tokens_from_graphs_are_those_without_and_every_decode_is_run_from_one(folder: Path):
    capture = Counting()
    recorded, plain = (HandRunner(folder, capture=how, most_decodes=MOST) for how in (capture, None))
    drawn = recorded.run(*streams(MOST))
    assert drawn == plain.run(*streams(MOST))
    assert set(capture.ran) >= {1, 2, 4, 8, MOST}


def test_idle_rows_write_to_the_idle_block_only(folder: Path):
    runner = HandRunner(folder, capture=again)
    three = [Stream(prompt=range(BLOCK_SIZE + at), count=4) for at in range(3)]
    for stream in three:
        stream.table = runner.blocks_for(2 * BLOCK_SIZE)
    free = [block for block in range(runner.pool.num_blocks) if not any(block in stream.table for stream in three)]
    assert runner.run(*three) == HandRunner(folder).run(*(Stream(stream.prompt, stream.count) for stream in three))
    assert runner.pool.planes[:, free].isnan().all()


def test_a_batch_that_is_too_long_or_too_large_runs_without_a_graph(folder: Path):
    capture = Counting()
    runner = HandRunner(folder, capture=capture, most_decodes=2, longest=2 * BLOCK_SIZE)
    recorded = len(capture.ran)
    runner.run(*(Stream(prompt=range(3), count=4) for _ in range(3)))
    runner.run(Stream(prompt=range(2 * BLOCK_SIZE + 1), count=4))
    assert len(capture.ran) == recorded
    runner.run(Stream(prompt=range(2 * BLOCK_SIZE - 5), count=4))
    assert capture.ran[recorded:] == [1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tokens_from_cuda_graphs_are_those_of_steps_launched_one_by_one(folder: Path):
    runners = [
        HandRunner(folder, device=torch.device("cuda"), capture=capture, most_decodes=MOST)
        for capture in (CudaCapture(), None)
    ]
    recorded, plain = (runner.run(*streams(MOST)) for runner in runners)
    assert recorded == plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_runner_on_cuda_records_its_decodes(folder: Path, caplog: pytest.LogCaptureFixture):
    options = RunnerOptions(kv_memory_bytes=1 << 20, device="cuda", max_running=4)
    runner, pool = open_runner(models.find(str(folder), folder.parent), options)
    assert runner.pool.idle_block == pool.num_blocks
    assert "graphs_not_recorded" not in [record.message for record in caplog.records]
