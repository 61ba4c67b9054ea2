"""Whatever the scheduler does with a request, its text is that of plain transformers: every family, every way.

The real scheduler, ledger and runner, in float32. Each test is one way for a request to be computed: cold in chunks of
several sizes, on a hit, beside others, preempted, forked, guessed. SmolLM2 goes every way, as the tiny models do.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.commands.model import fetch_model
from octavo.records.sampling import SamplingParams
from tests.support import tiny_model
from tests.support.families import FAMILIES
from tests.support.oracle import solo_greedy
from tests.support.real_world import BLOCK_SIZE, RealWorld
from worker.core.drafting import Drafter, Lookups
from worker.model.loader import Road

WARM = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
TWO_ROADS = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Families that take the fast road by themselves; on the generic one they are right as well."""


@dataclass(frozen=True)
class Served:
    """A model, and the road through it."""

    folder: Path
    road: Road = "auto"

    def world(self, **limits: Any) -> RealWorld:
        return RealWorld(self.folder, road=self.road, **limits)

    def some(self, count: int) -> int:
        """So many tokens of a tiny model; of a whole one, whose tokens take fifty times as long, half as many."""
        return count // 2 if self.folder.name == "smollm2" else count


@pytest.fixture(
    scope="module",
    params=[
        *FAMILIES,
        *(f"{family}, generic" for family in TWO_ROADS),
        pytest.param("smollm2", marks=pytest.mark.model),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    if request.param == "smollm2":
        return Served(fetch_model("smollm2"))
    family, generic, _ = request.param.partition(", generic")
    folder = tiny_model.save(FAMILIES[family], tmp_path_factory.mktemp("models") / family, seed=1)
    return Served(folder, "generic" if generic else "auto")


@lru_cache
def prompt(seed: int, length: int) -> list[int]:
    return Random(seed).choices(range(3, tiny_model.VOCAB_SIZE), k=length)


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_a_cold_prompt_is_computed_in_chunks_of_any_size(served: Served, chunk: int) -> None:
    world = served.world(max_step_tokens=chunk)
    world.ask_for(1, prompt(1, 37), served.some(8))

    largest = max(len(part.tokens) for part in world.step().chunks)
    world.run()

    assert largest == min(chunk, 37)
    world.assert_all_served()


def test_a_hit_says_what_a_miss_says_alone_and_among_strangers(served: Served) -> None:
    """S1: 5 blocks and 3 tokens; cold, warm, and warm in a batch of prefills and decodes."""
    world = served.world(max_step_tokens=32)
    for number in (1, 2):
        world.ask_for(number, prompt(1, 5 * BLOCK_SIZE + 3), served.some(12))
        world.run()
    for stranger in range(10, 14):
        world.ask_for(stranger, prompt(stranger, stranger), served.some(12))
    world.step()
    world.ask_for(3, prompt(1, 5 * BLOCK_SIZE + 3), served.some(12))
    world.run()

    world.assert_all_served()
    assert [world.gateways.of(number).cached_tokens for number in (1, 2, 3)] == [0, 5 * BLOCK_SIZE, 5 * BLOCK_SIZE]


def test_a_request_may_be_preempted_at_every_step(served: Served) -> None:
    """After each number of steps, once, with all that was computed forgotten."""
    at = 0
    while True:
        world = served.world(max_step_tokens=7, num_blocks=4)
        world.ask_for(1, prompt(2, 20), 4)
        for _ in range(at):
            world.step()
        if not world.scheduler.busy:
            break
        world.lose_the_manager()
        world.run()
        world.assert_all_served()
        at += 1
    assert at == 3 + 3, "steps of the prompt, and of all tokens but the first"


def test_a_request_that_is_sent_away_for_want_of_blocks_goes_on_later(served: Served) -> None:
    """S18: three requests that want three blocks each, in a pool that holds little more than one."""
    world = served.world(num_blocks=4)
    for number in (1, 2, 3):
        world.ask_for(number, prompt(number, 14 + number), 20)
    world.run()

    world.assert_all_served()
    assert world.scheduler.preemptions > 0


def test_forked_samples_go_on_as_each_does_alone(served: Served) -> None:
    """S10: two blocks and 5 tokens, four ways on: two blocks are shared, each sample has one of its own."""
    world = served.world(max_step_tokens=64)
    world.ask_for(1, prompt(3, 2 * BLOCK_SIZE + 5), served.some(8), samples=4)
    world.step()
    world.step()
    assert world.ledger.audit().held_blocks == 2 + 4
    world.ask_for(2, prompt(3, 2 * BLOCK_SIZE + 5), served.some(8), samples=4, sampling=WARM)
    world.run()

    for sample in range(4):
        assert world.text(1, sample) == world.solo(1), "greedily all say the same"
        alone = served.world(max_step_tokens=64)
        alone.ask_for(1, prompt(3, 2 * BLOCK_SIZE + 5), served.some(8), first_sample=sample, sampling=WARM)
        alone.run()
        assert world.text(2, sample) == alone.text(1, sample)
    assert len({tuple(world.text(2, sample)) for sample in range(4)}) == 4
    world.assert_at_rest()


def test_guessed_tokens_change_no_text(served: Served) -> None:
    """Bias leaves few tokens to choose from, so that texts repeat themselves and guesses come true."""
    few = tuple((token, 100.0) for token in range(10, 13))
    ways = [SamplingParams(logit_bias=few), replace(WARM, logit_bias=few)]
    plain, guessing = served.world(), served.world(drafter=Drafter(Lookups()))
    for world in (plain, guessing):
        for number, sampling in enumerate(ways):
            world.ask_for(number, prompt(4, 20), 24, sampling=sampling)
        world.run()

    assert [guessing.text(number) for number in range(2)] == [plain.text(number) for number in range(2)]
    assert guessing.text(0) == solo_greedy(served.folder, prompt(4, 20), 24, bias=few)
    assert guessing.scheduler.drafts.drafted >= guessing.scheduler.drafts.accepted > 0
    guessing.assert_at_rest()
