"""The embedded default model, in float32: its greedy tokens are those of plain transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from octavo.commands.model import fetch_model
from tests.support.hand_runner import HandRunner, Stream
from tests.support.oracle import solo_greedy
from worker.core.step import StepPlan
from worker.kernels import choose

pytestmark = pytest.mark.model

QUESTION = "<|im_start|>user\nWhy do printers fold a sheet into sixteen pages?<|im_end|>\n<|im_start|>assistant\n"
COUNT = 64


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_model("smollm2")


@pytest.fixture(scope="module")
def hand(folder: Path) -> HandRunner:
    attend = choose(device=torch.device("cpu"), dtype=torch.float32, head_dim=64)
    return HandRunner(folder, attend, num_blocks=40)


@pytest.fixture(scope="module")
def small(folder: Path) -> HandRunner:
    """The same model on a pool of float8."""
    kv_dtype = torch.float8_e4m3fn
    attend = choose(device=torch.device("cpu"), dtype=torch.float32, kv_dtype=kv_dtype, head_dim=64)
    return HandRunner(folder, attend, num_blocks=40, kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def question(folder: Path) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(QUESTION).ids


def test_a_cold_prompt_in_one_chunk_goes_on_as_in_transformers(
    hand: HandRunner, folder: Path, question: list[int]
) -> None:
    assert hand.run(Stream(question, COUNT)) == [solo_greedy(folder, question, COUNT)]


def test_a_float8_pool_goes_on_alike_for_a_sentence(small: HandRunner, folder: Path, question: list[int]) -> None:
    assert small.run(Stream(question, 16)) == [solo_greedy(folder, question, 16)]


def test_in_a_float8_pool_a_hit_is_a_miss_bit_for_bit(small: HandRunner, question: list[int]) -> None:
    """What a hit finds was rounded as what a miss computes: logits of whatever follows are the same."""
    (cold,) = small.run(Stream(question, COUNT))

    table = small.blocks_for(len(question) + COUNT)
    hit = Stream(question, COUNT, table=table)
    small.runner.execute(StepPlan((replace(hit.next_chunk(0), tokens=tuple(question[:16]), draws=()),)))
    hit.computed = 16

    assert small.run(hit) == [cold]
