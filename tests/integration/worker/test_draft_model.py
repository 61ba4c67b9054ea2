"""A small model guesses for another: no text changes, and whoever knows the other one well guesses well."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from octavo.records.sampling import SamplingParams
from tests.support import tiny_model
from tests.support.real_world import RealWorld, draft_model, loaded
from worker.composition import drafter_of
from worker.core.drafting import Drafter
from worker.core.step import StepPlan, StepResult
from worker.draft_model import DraftModel, require_same_tokens
from worker.settings import WorkerSettings

WARM = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
WAYS = [SamplingParams(), WARM, replace(WARM, presence_penalty=0.5)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("models") / "served")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_qwen3(tmp_path_factory.mktemp("models") / "stranger", seed=9)


def prompt(seed: int, length: int) -> list[int]:
    return Random(seed).choices(range(3, tiny_model.VOCAB_SIZE), k=length)


def texts(folder: Path, drafts: DraftModel | None, **limits: int) -> tuple[RealWorld, list[list[int]]]:
    """Three requests of 30 tokens, each drawn in its own way."""
    world = RealWorld(folder, drafter=Drafter(drafts) if drafts else None, **limits)
    for number, sampling in enumerate(WAYS):
        world.ask_for(number, prompt(number, 12 + number), 30, sampling=sampling)
    world.run()
    world.assert_at_rest()
    if drafts:
        drafts.check()
    return world, [world.text(number) for number in range(len(WAYS))]


def test_who_knows_the_model_guesses_everything_sampled_or_not(served: Path) -> None:
    """It is the same model, so with the same random numbers it draws the same tokens, and all are accepted."""
    _, plain = texts(served, None)

    world, guessed = texts(served, draft_model(served))

    assert guessed == plain
    counts = world.scheduler.drafts
    assert counts.drafted == counts.accepted > 40


def test_who_knows_another_model_changes_no_text_either(served: Path, stranger: Path) -> None:
    world, guessed = texts(served, draft_model(stranger))

    assert guessed == texts(served, None)[1]
    counts = world.scheduler.drafts
    assert counts.drafted > 2 * counts.accepted


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_with_too_few_blocks_fewer_texts_are_guessed(served: Path, num_blocks: int) -> None:
    _, guessed = texts(served, draft_model(served, num_blocks))

    assert guessed == texts(served, None)[1]


def test_a_preempted_text_is_guessed_on(served: Path) -> None:
    world, guessed = texts(served, draft_model(served), num_blocks=4)

    assert guessed == texts(served, None)[1]
    assert world.scheduler.preemptions > 0
    assert world.scheduler.drafts.accepted == world.scheduler.drafts.drafted


def test_a_long_text_is_read_in_parts_before_it_is_guessed(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.draft_model.CATCH_UP_TOKENS", 5)
    world, guessed = texts(served, draft_model(served))

    assert guessed == texts(served, None)[1]
    assert world.scheduler.drafts.accepted == world.scheduler.drafts.drafted > 0


def test_a_draft_model_with_other_tokens_is_refused(served: Path, tmp_path: Path) -> None:
    folder = loaded(served).folder
    require_same_tokens(folder, folder)
    with pytest.raises(ValueError, match="draft model other has another tokenizer than served"):
        require_same_tokens(replace(folder, name="other", tokenizer_digest=b"t" * 32), folder)
    with pytest.raises(ValueError, match="draft model other has a vocabulary of 7, served of 259"):
        require_same_tokens(replace(folder, name="other", vocab_size=7), folder)


def test_where_the_draft_model_fails_there_is_no_guess(served: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(plan: StepPlan) -> StepResult:
        raise FloatingPointError(f"{len(plan.chunks)} chunks")

    failing = DraftModel(fail, num_blocks=8, block_size=16, max_model_tokens=512)
    world, guessed = texts(served, failing)

    assert guessed == texts(served, None)[1]
    assert world.scheduler.drafts.drafted == 0
    assert {record.msg for record in caplog.records} == {"draft_failed"}


async def test_a_worker_opens_the_draft_model_that_it_is_told_of(served: Path) -> None:
    config = WorkerSettings(
        model=str(served),
        draft_model=str(served),
        draft_memory=1 << 20,
        speculate="model",
        dtype="float32",
        device="cpu",
    )
    with ThreadPoolExecutor(1) as thread:
        drafter = await drafter_of(config, thread)
        world = RealWorld(served, drafter=drafter)
        world.ask_for(1, prompt(1, 20), 20)
        world.run()

    world.assert_all_served()
    assert world.scheduler.drafts.accepted > 10
