"""What HTTP clients are told of an answer: the parts of a stream, joined, are the whole, with whichever extras."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic_core import from_json

from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.tool_calls import ToolForm
from gateway.http_door.answers import Stream, whole
from gateway.http_door.forms import ChatForm, Extras, Form, Head, TextForm
from octavo.ids import WorkerId
from octavo.records.serve import FinishReason, TokenLogprobs

HEAD = Head(id="x-1", created=7, model="words")
ALL = Extras(logprobs=True, token_ids=True)
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Ulm"}}</tool_call>'


def piece(token: int) -> bytes:
    """Tokens are bytes."""
    return bytes([token])


def likely(token: int) -> TokenLogprobs:
    return TokenLogprobs(-token / 8, ((token, -token / 8), (65, -9.0)))


def events_of(
    texts: Sequence[str], cuts: Iterable[int], prompt: bytes = b"ab", reason: FinishReason = FinishReason.STOP
) -> list[Event]:
    """A request whose samples say `texts`, in deltas of so many bytes."""
    said = [text.encode() for text in texts]
    events: list[Event] = [
        Started(
            request_id="r",
            worker_id=WorkerId("w"),
            prompt_tokens=len(prompt),
            predicted_cached_tokens=0,
            prompt_ids=tuple(prompt),
        ),
        PromptLogprobs(tuple(map(likely, prompt[1:]))),
    ]
    sizes = iter(cuts)
    while any(said):
        for sample, rest in enumerate(said):
            if rest:
                size = next(sizes, len(rest))
                now, said[sample] = rest[:size], rest[size:]
                events.append(Delta(sample, now.decode(), tuple(now), tuple(map(likely, now))))
    events += [Finished(sample, reason) for sample in range(len(texts))]
    usage = Usage(
        prompt_tokens=len(prompt),
        cached_tokens=1,
        output_tokens=sum(map(len, texts)),
        worker_id=WorkerId("w"),
        time_to_first_token_seconds=0.1,
        total_seconds=0.2,
    )
    return [*events, usage]


async def told(events: Iterable[Event]) -> AsyncGenerator[tuple[int, Event]]:
    for event in events:
        yield 0, event


async def streamed(events: Iterable[Event], form: Form, samples: int) -> list[dict[str, Any]]:
    """The parts of a stream, by choice and joined; the usage is checked on the way."""
    stream = Stream(form, HEAD, samples, usage=True, usage_so_far=False)
    lines = [line async for line in stream.of(told(events))]
    assert lines[-1] == b"data: [DONE]\n\n"
    chunks = [from_json(line.removeprefix(b"data: ")) for line in lines[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    joined: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for chunk in chunks[:-1]:
        (part,) = chunk["choices"]
        if form.chunk == ChatForm.chunk:
            ChatCompletionChunk.model_validate(chunk)
        joined[part["index"]] = _joined(joined[part["index"]], part)
    return [joined[at] for at in sorted(joined)]


def _joined(one: Any, other: Any) -> Any:
    """Two parts as one: texts and lists one behind the other, objects field by field, else the last that is said."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, dict):
        return {key: _joined(one.get(key), other.get(key)) for key in {**one, **other}}
    return one + other if isinstance(one, str | list) else other


def text_form(extras: Extras, samples: int, echo: str | None) -> TextForm:
    return TextForm(echoes=() if echo is None else (echo,), samples=samples, extras=extras, piece=piece)


texts = st.lists(st.text("abc <>", min_size=1, max_size=12), min_size=1, max_size=3)
cuts = st.lists(st.integers(1, 4), max_size=20)


@pytest.mark.parametrize("extras", [Extras(), ALL])
@pytest.mark.parametrize("echo", [None, "ab"])
@given(texts=texts, cuts=cuts)
async def test_a_completions_parts_joined_are_the_whole(
    extras: Extras, echo: str | None, texts: list[str], cuts: list[int]
) -> None:
    events = events_of(texts, cuts)
    answer = await whole(told(events), text_form(extras, len(texts), echo), HEAD, len(texts))
    parts = await streamed(events, text_form(extras, len(texts), echo), len(texts))

    expected = answer.model_dump()
    if not (echo and extras.logprobs):  # the package's types know no null, which OpenAI says of a prompt's first token
        Completion.model_validate(expected)
    assert parts == expected["choices"]
    assert [choice["text"] for choice in expected["choices"]] == [(echo or "") + text for text in texts]
    if extras.logprobs:
        for choice in expected["choices"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert [choice["text"][at:][:1] for at in choice["logprobs"]["text_offset"]] == choice["logprobs"]["tokens"]


@pytest.mark.parametrize("extras", [Extras(), ALL])
@given(texts=texts, cuts=cuts, called=st.booleans())
async def test_a_chats_parts_joined_are_the_whole(
    extras: Extras, texts: list[str], cuts: list[int], called: bool
) -> None:
    said = [text + CALL + CALL for text in texts] if called else texts
    events = events_of(said, cuts)

    def form() -> ChatForm:
        return ChatForm(tool_form=ToolForm.HERMES, extras=extras, piece=piece)

    expected = (await whole(told(events), form(), HEAD, len(texts))).model_dump()
    parts = await streamed(events, form(), len(texts))

    ChatCompletion.model_validate(expected)
    assert len(parts) == len(expected["choices"])
    for part, choice in zip(parts, expected["choices"], strict=True):
        message = choice["message"]
        assert part["delta"]["role"] == message["role"]
        assert part["delta"]["content"] == (message["content"] or "")
        assert (part["finish_reason"], part["logprobs"]) == (choice["finish_reason"], choice["logprobs"])
        assert part.get("token_ids") == choice.get("token_ids")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert [call["function"] for call in part["delta"].get("tool_calls", ())] == calls
        assert len(calls) == 2 * called
        assert choice["finish_reason"] == ("tool_calls" if called else "stop")


async def test_calls_are_numbered_and_each_has_an_id_of_its_own() -> None:
    events = events_of(["see" + CALL + " and " + CALL], [5] * 60)
    form = ChatForm(tool_form=ToolForm.HERMES, extras=Extras(), piece=piece)
    (choice,) = await streamed(events, form, 1)

    calls = choice["delta"]["tool_calls"]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


async def test_a_call_that_was_cut_off_is_text_that_ran_out_of_room() -> None:
    events = events_of([CALL[:30]], [3] * 20, reason=FinishReason.LENGTH)
    answer = await whole(told(events), ChatForm(tool_form=ToolForm.HERMES, extras=Extras(), piece=piece), HEAD, 1)

    (choice,) = answer.model_dump()["choices"]
    assert choice["message"]["content"] == CALL[:30]
    assert choice["finish_reason"] == "length"


async def test_where_no_tools_were_given_a_call_is_text() -> None:
    answer = await whole(told(events_of([CALL], [])), ChatForm(tool_form=None, extras=Extras(), piece=piece), HEAD, 1)

    assert answer.model_dump()["choices"][0]["message"]["content"] == CALL


async def test_a_prompts_logprobs_are_listed_by_token_id_from_the_second_on() -> None:
    form = text_form(Extras(prompt_logprobs=True), 1, None)
    answer = await whole(told(events_of(["c"], [], prompt=b"ab")), form, HEAD, 1)

    assert answer.model_dump()["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -12.25, "decoded_token": "b"},
            "65": {"logprob": -9.0, "decoded_token": "A"},
        },
    ]


async def test_half_a_character_has_its_bytes_and_minus_infinity_a_number() -> None:
    half = "é".encode()[:1]
    delta = Delta(0, "", tuple(half), (TokenLogprobs(float("-inf")),))
    events = [*events_of([""], [])[:2], delta, *events_of([""], [])[2:]]
    form = ChatForm(tool_form=None, extras=Extras(logprobs=True), piece=piece)
    answer = await whole(told(events), form, HEAD, 1)

    (entry,) = answer.model_dump()["choices"][0]["logprobs"]["content"]
    assert entry == {"token": "\ufffd", "logprob": -9999.0, "bytes": list(half), "top_logprobs": []}
