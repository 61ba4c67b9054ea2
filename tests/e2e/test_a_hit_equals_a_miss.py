"""Greedy tokens through the whole stack are those of plain transformers, however they came about."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from octavo.commands.model import models_dir
from octavo.v1 import gateway_pb2, worker_pb2
from octavo.v1.types_pb2 import BeamSearch
from tests.support.cluster import BLOCK, SETTLE_SECONDS, Client, greedy, prose, request_of, smollm2, tokenizer
from tests.support.oracle import log_softmax, solo_beams

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with smollm2(workers=2) as running:
        yield running


async def test_a_prompt_gives_the_same_tokens_cold_warm_and_among_strangers(client: Client) -> None:
    """S1."""
    prompt = prose(0, 5 * BLOCK + 3)
    strangers = [prose(100 * i, 20 + 13 * i) for i in range(1, 8)]

    cold = await client.ask(prompt, max_tokens=64)
    warm = await client.ask(prompt, max_tokens=64)
    crowded, others = await asyncio.gather(
        client.ask(prompt, max_tokens=64), client.ask_together(strangers, max_tokens=24)
    )

    assert [answer.usage.cached_tokens for answer in (cold, warm, crowded)] == [0, 5 * BLOCK, 5 * BLOCK]
    assert cold.tokens[0] == greedy(prompt, 64)
    assert warm.tokens == crowded.tokens == cold.tokens
    assert [other.tokens[0][:8] for other in others] == [greedy(stranger, 8) for stranger in strangers]


async def test_the_text_before_a_stop_string_continues_like_a_cold_prompt(client: Client) -> None:
    """S2."""
    prompt = prose(1000, 40)
    whole = await client.ask(prompt, max_tokens=24)
    words = whole.texts[0].split()
    stop = words[len(words) // 2]

    stopped = await client.ask(prompt, max_tokens=24, stop=[stop])
    again = [*prompt, *tokenizer().encode(stopped.texts[0] + " therefore").ids]
    warm = await client.ask(again, max_tokens=8)

    assert stopped.reasons == [worker_pb2.FINISH_REASON_STOP]
    assert whole.texts[0].startswith(stopped.texts[0])
    assert stop not in stopped.texts[0]
    assert warm.usage.cached_tokens >= len(prompt) // BLOCK * BLOCK
    assert warm.tokens[0] == greedy(again, 8)


async def test_turn_two_finds_turn_ones_answer_whatever_tokens_it_was_written_with(client: Client) -> None:
    """S2: drawn hot, an answer is full of tokens that its text would not be given."""
    question = "user: Tell me a story.\nassistant:"
    first = await client.ask(question, max_tokens=60, temperature=3.0, seed=7)
    [answer], [text] = first.tokens, first.texts
    second = await client.ask(question + text + "\nuser: Go on.", max_tokens=1)

    own, plain = tokenizer().encode(question).ids + answer, tokenizer().encode(question + text).ids
    assert own != plain, "the draw was too tame to show anything"
    assert second.usage.cached_tokens >= (len(own) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("blocks", [2, 3])
async def test_a_prompt_of_whole_blocks_is_computed_from_its_last_token_on(client: Client, blocks: int) -> None:
    """S5, S7: of the last block all but one token is copied."""
    prompt = prose(1100 + 64 * blocks, blocks * BLOCK)

    cold = await client.ask(prompt, max_tokens=4)
    warm = await client.ask(prompt, max_tokens=4)

    assert [answer.usage.cached_tokens for answer in (cold, warm)] == [0, blocks * BLOCK - 1]
    assert cold.tokens == warm.tokens == [greedy(prompt, 4)]


async def test_a_prompt_that_leaves_a_remembered_one_inside_a_block_is_reused_to_that_token(client: Client) -> None:
    """S7: 3 blocks and 10 tokens of a longer prompt, then something else; the index can only promise whole blocks."""
    remembered = prose(1900, 5 * BLOCK)
    leaves = remembered[: 3 * BLOCK + 10] + prose(100, 9)

    first = await client.ask(remembered, max_tokens=1)
    told = await until_found(client, request_of(leaves, max_tokens=16), first.usage.worker_id, 3 * BLOCK)
    answer = await client.ask(leaves, max_tokens=16)

    found = {worker.worker_id: worker.cache for worker in told.workers}
    assert found[first.usage.worker_id].reused_tokens == found[first.usage.worker_id].position == 3 * BLOCK + 10
    assert (len(found), told.prompt_tokens) == (2, len(leaves))

    assert answer.started.predicted_cached_tokens == 3 * BLOCK
    assert answer.usage.cached_tokens == 3 * BLOCK + 10
    assert answer.tokens == [greedy(leaves, 16)]


async def until_found(
    client: Client, request: gateway_pb2.GenerateRequest, holder: str, tokens: int
) -> gateway_pb2.ExplainReply:
    """What is said of a request once its holder would be sent it for so many tokens that it holds.

    An answer's last token is told before its worker has told the cache manager what it wrote, and the index follows
    that a moment later; the load that a gateway hears of is older still.
    """
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            told = await client.gateway.Explain(gateway_pb2.ExplainRequest(request=request), timeout=10)
            at_holder = next(worker for worker in told.workers if worker.worker_id == holder)
            held = min(at_holder.cache.reused_tokens, at_holder.predicted_cached_tokens)
            if told.chosen == holder and held >= tokens:
                return told


async def test_prompts_around_one_block_are_answered_right(client: Client) -> None:
    prompts = [prose(1400 + 3 * length, length) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1)]

    answers = await client.ask_together(prompts, max_tokens=BLOCK + 2)

    assert [answer.tokens[0] for answer in answers] == [greedy(prompt, BLOCK + 2) for prompt in prompts]


async def test_four_greedy_samples_are_four_times_the_same(client: Client) -> None:
    prompt = prose(1500, 2 * BLOCK + 5)

    forked = await client.ask(prompt, max_tokens=12, n=4)

    assert forked.tokens == [greedy(prompt, 12)] * 4
    assert forked.usage.prompt_tokens == len(prompt)
    assert forked.usage.output_tokens == 4 * 12


async def test_a_sample_depends_on_its_seed_and_number_alone(client: Client) -> None:
    """Cold or warm, with two sisters or none: sample i of a seed is sample i of that seed."""
    prompt = prose(1600, 2 * BLOCK + 5)
    drawn = {"max_tokens": 10, "temperature": 0.8, "top_p": 0.95, "seed": 7}

    four = await client.ask(prompt, n=4, **drawn)
    four_again = await client.ask(prompt, n=4, **drawn)
    two = await client.ask(prompt, n=2, **drawn)
    one = await client.ask(prompt, **drawn)
    other_seed = await client.ask(prompt, n=4, **(drawn | {"seed": 8}))

    assert four_again.tokens == four.tokens
    assert two.tokens == four.tokens[:2]
    assert one.tokens == four.tokens[:1]
    assert len({tuple(tokens) for tokens in four.tokens}) == 4
    assert other_seed.tokens != four.tokens


async def test_prompts_of_different_salts_share_nothing(client: Client) -> None:
    prompt = prose(1700, 4 * BLOCK)

    mine = await client.ask(prompt, max_tokens=4, cache_salt="mine")
    yours = await client.ask(prompt, max_tokens=4, cache_salt="yours")
    mine_again = await client.ask(prompt, max_tokens=4, cache_salt="mine")

    assert [answer.usage.cached_tokens for answer in (mine, yours, mine_again)] == [0, 0, 4 * BLOCK - 1]
    assert mine.tokens == yours.tokens == mine_again.tokens == [greedy(prompt, 4)]


async def test_a_client_that_leaves_frees_what_it_held(client: Client) -> None:
    """S15, over gRPC."""
    before = await client.at_rest()
    call = client.gateway.Generate(request_of(prose(1800, 100), max_tokens=4000), timeout=60)
    async for reply in call:
        if reply.HasField("delta"):
            break
    call.cancel()

    after = await client.at_rest()
    outputs = sum(worker.load.output_tokens for worker in (await client.fleet()).workers)
    assert after.num_blocks == before.num_blocks
    assert outputs < 4000


async def test_everything_is_free_or_remembered_when_nothing_runs(client: Client) -> None:
    """S24."""
    lengths = (3, 16, 17, 40, 65, 100, 31, 90, 2, 48, 75, 20)
    await client.ask_together([prose(150 * i, length) for i, length in enumerate(lengths)], max_tokens=6)

    books = await client.at_rest()

    assert books.cached > 0


async def test_a_prompts_logprobs_are_the_same_cold_and_warm_and_all_are_there(client: Client) -> None:
    """S49."""
    prompt = prose(2400, 3 * BLOCK + 3)
    cold = await client.ask(prompt, max_tokens=2, prompt_logprobs=1, logprobs=2)
    plain = await client.ask(prompt, max_tokens=2)
    warm = await client.ask(prompt, max_tokens=2, prompt_logprobs=1, logprobs=2)

    assert (plain.usage.cached_tokens, warm.usage.cached_tokens) == (3 * BLOCK, 0)
    scores = log_softmax(models_dir() / "smollm2", [*prompt, *cold.tokens[0]])
    for answer in (cold, warm):
        wanted = [row[token].item() for row, token in zip(scores, prompt[1:], strict=False)]
        assert [told.logprob for told in answer.prompt_logprobs] == pytest.approx(wanted, abs=2e-3)
        assert [told.logprob for told in answer.logprobs] == [
            pytest.approx(scores[len(prompt) - 1 + at][token].item(), abs=2e-3)
            for at, token in enumerate(answer.tokens[0])
        ]
        assert all(told.top[0].token_id == token for told, token in zip(answer.logprobs, answer.tokens[0], strict=True))
        assert all(len(told.top) == 1 for told in answer.prompt_logprobs)


async def test_the_best_of_several_samples_are_told_by_rank(client: Client) -> None:
    prompt = prose(2500, 2 * BLOCK)
    drawn = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    every = await client.ask(prompt, n=4, logprobs=0, **drawn)
    best = await client.ask(prompt, n=2, best_of=4, **drawn)

    ranked = sorted(range(4), key=lambda sample: -every.cumulative[sample])  # all are of one length
    assert best.tokens == [every.tokens[sample] for sample in ranked[:2]]
    assert [best.cumulative[place] for place in (0, 1)] == pytest.approx(
        [every.cumulative[sample] for sample in ranked[:2]], abs=2e-3
    )
    assert best.logprobs == []
    assert best.usage.output_tokens == 4 * 6


async def test_four_beams_are_those_of_transformers(client: Client) -> None:
    prompt = prose(2600, 2 * BLOCK + 3)
    found = await client.ask(prompt, n=2, max_tokens=8, beam=BeamSearch(width=4), stop_token_ids=[0])
    theirs = solo_beams(models_dir() / "smollm2", prompt, 8, width=4, samples=2, stop=0)
    assert found.tokens == theirs
    assert found.cumulative[0] >= found.cumulative[1]
