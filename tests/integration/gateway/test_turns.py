"""The second turn of a conversation has the tokens that the first one was answered with.

The workers here answer a prompt with the prompt itself. A prompt of single letters, where the tokenizer knows longer
words, is answered with tokens that nobody would get by tokenising the answer's text.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.bounds import Bounds
from gateway.client import Completion
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TextPrompt, TokenPrompt
from octavo.records.serve import StepReport, Tokens
from tests.support import words
from tests.support.fake_fleet import FakeFleet, FakeWorker, fake_fleet
from tests.support.gateway_service import Gateway, gateway, words_pool

QUESTION = "quick brown fox"


class OddWorker(FakeWorker):
    """Says every word letter by letter; of an unending answer the first three."""

    async def _decode(self, submission: Any, reports: Any) -> None:
        letters = [words.tokenizer().token_to_id(letter) for letter in SPELT]
        if submission.max_tokens == UNENDING:
            heard = Tokens(submission.request, 0, tuple(letters[:3]))
            reports.put_nowait(StepReport(tokens=(heard,)))
            await asyncio.Event().wait()
        await super()._decode(replace_prompt(submission, letters), reports)


SPELT = "quickĠbrownĠfox"
"""As the byte-level alphabet writes it: each character is a token of its own."""


UNENDING = 900
"""Tokens."""


def replace_prompt(submission: Any, prompt: list[int]) -> Any:
    return replace(submission, prompt=tuple(prompt))


@pytest.fixture
async def fleet() -> AsyncGenerator[FakeFleet]:
    async with fake_fleet() as running:
        worker = OddWorker("a", words_pool(), running.index)
        await worker.start()
        running.workers.append(worker)
        running.manager.tell(worker.info)
        yield running


@pytest.fixture
async def front(fleet: FakeFleet, tmp_path: Path) -> AsyncGenerator[Gateway]:
    async with gateway(fleet, tmp_path) as running:
        yield running


def sent_to(fleet: FakeFleet) -> tuple[int, ...]:
    """The prompt of the last submission."""
    return fleet.workers[0].submissions[-1].prompt


async def ask(front: Gateway, *turns: str, **fields: Any) -> Completion:
    roles = ("user", "assistant")
    chat = ChatPrompt(tuple(ChatMessage(roles[at % 2], said) for at, said in enumerate(turns)))
    return await front.client.complete(Generation(prompt=chat, max_tokens=len(SPELT), **fields))


async def test_turn_three_has_the_tokens_of_both_answers(fleet: FakeFleet, front: Gateway) -> None:
    first = await ask(front, QUESTION)
    begun = sent_to(fleet)
    second = await ask(front, QUESTION, first.text, "and then?")
    gone_on = sent_to(fleet)
    await ask(front, QUESTION, first.text, "and then?", second.text, "so?")

    assert first.text == QUESTION
    assert len(first.samples[0].token_ids) == len(SPELT) > len(words.tokenizer().encode(QUESTION).ids)
    assert gone_on[: len(begun) + len(SPELT)] == begun + first.samples[0].token_ids
    assert sent_to(fleet)[: len(gone_on) + len(SPELT)] == gone_on + second.samples[0].token_ids
    assert words.tokenizer().decode(list(sent_to(fleet)), skip_special_tokens=False) == (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{first.text}<|im_end|>\n"
        f"<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n{second.text}<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_text_goes_on_from_an_answer_that_a_stop_string_cut_off(fleet: FakeFleet, front: Gateway) -> None:
    """S2: the returned text ends inside the block that the stop string was found in."""
    first = await front.client.complete(Generation(prompt=TextPrompt("Say: "), max_tokens=20, stop=("wn f",)))
    begun = sent_to(fleet)
    await front.client.complete(Generation(prompt=TextPrompt("Say: " + first.text + " well"), max_tokens=1))

    assert first.text == "quick bro"
    spelt = first.samples[0].token_ids
    assert len(spelt) == len("quick brown f")
    assert sent_to(fleet)[: len(begun) + len("quick bro")] == begun + spelt[: len("quick bro")]
    assert words.tokenizer().decode(list(sent_to(fleet))) == "Say: quick bro well"


async def test_each_sample_is_remembered(fleet: FakeFleet, front: Gateway) -> None:
    first = await ask(front, QUESTION, samples=2)
    await ask(front, QUESTION, first.texts[1], "more")
    assert first.samples[1].token_ids == sent_to(fleet)[-len(SPELT) - tail("more") : -tail("more")]


def tail(question: str) -> int:
    """Tokens of the template behind an answer, with the next question."""
    text = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return len(words.tokenizer().encode(text).ids)


async def test_an_answer_that_its_client_left_is_remembered_as_far_as_it_was_told(
    fleet: FakeFleet, front: Gateway
) -> None:
    stream = front.client.generate(Generation(prompt=TextPrompt("Say: "), max_tokens=UNENDING))
    heard: list[int] = []
    async for event in stream:
        heard += getattr(event, "token_ids", ())
        if len(heard) == 3:
            break
    await stream.aclose()
    while not front.at_rest():
        await front.load()
    text = words.tokenizer().decode(heard)
    await front.client.complete(Generation(prompt=TextPrompt(f"Say: {text}"), max_tokens=1))
    assert list(sent_to(fleet)[-3:]) == heard


@pytest.mark.parametrize("other", [{"cache_salt": "mine"}, {"cache_salt": ""}])
async def test_no_salt_recalls_what_another_remembers(fleet: FakeFleet, front: Gateway, other: dict[str, str]) -> None:
    first = await ask(front, QUESTION, cache_salt="theirs")
    await ask(front, QUESTION, first.text, "more", **other)
    plain = words.tokenizer().encode(first.text).ids
    assert list(sent_to(fleet)[-len(plain) - tail("more") : -tail("more")]) == plain


async def test_nothing_is_remembered_of_token_ids_or_without_room(fleet: FakeFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path, Bounds(remembered_tokens=0)) as front:
        first = await ask(front, QUESTION)
        await ask(front, QUESTION, first.text, "more")
        plain = words.tokenizer().encode(first.text).ids
        assert list(sent_to(fleet)[-len(plain) - tail("more") : -tail("more")]) == plain

        ids = tuple(words.tokenizer().encode("Say: ").ids)
        answer = await front.client.complete(Generation(prompt=TokenPrompt(ids), max_tokens=5))
        await front.client.complete(Generation(prompt=TextPrompt("Say: " + answer.text), max_tokens=1))
        assert list(sent_to(fleet)) == words.tokenizer().encode("Say: " + answer.text).ids
