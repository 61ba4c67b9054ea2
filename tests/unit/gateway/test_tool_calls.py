"""Calls of tools are found in a model's text, however it is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.tool_calls import Piece, ToolCall, ToolCallParser, ToolForm, for_template, form_in, objects_in
from octavo.errors import InvalidRequest

WEATHER = ToolCall("weather", '{"city": "Zürich"}')
CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
TOO_LARGE = '{"name": "f", "arguments": {"x": 1e999}}'
HALF_A_NAME = r'{"name": "\ud83d", "arguments": {}}'
HALF_AN_ARGUMENT = r'{"name": "f", "arguments": {"city": "\ud83d"}}'
HALF_AN_ARGUMENT_AS_TEXT = r'{"name": "f", "arguments": "{\"city\": \"\\ud83d\"}"}'


def parsed(form: ToolForm, text: str, cuts: list[int] | None = None) -> list[Piece]:
    """What comes out of a text that comes in groups; texts that follow one another joined."""
    parser = ToolCallParser(form)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts or ()), len(text)]
    pieces = [piece for start, end in pairwise(borders) for piece in parser.push(text[start:end])]
    pieces += parser.flush()
    assert parser.calls == sum(isinstance(piece, ToolCall) for piece in pieces)
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(
    ("form", "text", "pieces"),
    [
        (ToolForm.HERMES, f"<tool_call>\n{CALL}\n</tool_call>", [WEATHER]),
        (ToolForm.HERMES, f"I look. <tool_call>{CALL}</tool_call>\n", ["I look.", WEATHER]),
        (ToolForm.HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [WEATHER, WEATHER]),
        (ToolForm.HERMES, f"<tool_call>{CALL}</tool_call> so it is", [WEATHER, "so it is"]),
        (ToolForm.HERMES, f"<tool_call>{CALL}", [WEATHER]),
        (ToolForm.HERMES, "<tool_call>{oh</tool_call> no ", ["<tool_call>{oh</tool_call> no "]),
        (ToolForm.HERMES, '<tool_call>{"name": "f"', ['<tool_call>{"name": "f"']),
        (ToolForm.HERMES, f"<tool_call>[{CALL}, 5]</tool_call>", [f"<tool_call>[{CALL}, 5]</tool_call>"]),
        (ToolForm.HERMES, "a < b, <tool", ["a < b, <tool"]),
        (ToolForm.HERMES, CALL, [CALL]),
        (ToolForm.MISTRAL, f"Well [TOOL_CALLS] [{CALL}, {CALL}]", ["Well", WEATHER, WEATHER]),
        (ToolForm.MISTRAL, "[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
        (ToolForm.MISTRAL, f"[{CALL}]", [f"[{CALL}]"]),
        (ToolForm.LLAMA_JSON, CALL.replace("arguments", "parameters"), [WEATHER]),
        (ToolForm.LLAMA_JSON, f"<|python_tag|>{CALL}; {CALL}", [WEATHER, WEATHER]),
        (ToolForm.LLAMA_JSON, f"\n{CALL}", [WEATHER]),
        (ToolForm.LLAMA_JSON, '{"name": "Ada", "born": 1815}', ['{"name": "Ada", "born": 1815}']),
        (ToolForm.LLAMA_JSON, f"It is {CALL}", [f"It is {CALL}"]),
        (ToolForm.LLAMA_JSON, '{"name": "f", "parameters": {"x": NaN}}', ['{"name": "f", "parameters": {"x": NaN}}']),
        (ToolForm.LLAMA_JSON, '{"name": "f", "arguments": "{\\"a\\": 1}"}', [ToolCall("f", '{"a": 1}')]),
        (ToolForm.LLAMA_JSON, '{"a":' * 5000, ['{"a":' * 5000]),
        (ToolForm.LLAMA_JSON, TOO_LARGE, [TOO_LARGE]),
        (ToolForm.LLAMA_JSON, HALF_A_NAME, [HALF_A_NAME]),
        (ToolForm.LLAMA_JSON, HALF_AN_ARGUMENT, [HALF_AN_ARGUMENT]),
        (ToolForm.LLAMA_JSON, HALF_AN_ARGUMENT_AS_TEXT, [HALF_AN_ARGUMENT_AS_TEXT]),
        (ToolForm.LLAMA_JSON, " \n", [" \n"]),
    ],
)
def test_calls_come_out_whole_and_all_else_as_text(form: ToolForm, text: str, pieces: list[Piece]) -> None:
    assert parsed(form, text) == pieces


PARTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        CALL,
        f"[{CALL}]",
        "<",
        "</tool",
        "[",
        "{",
        "}",
        " ",
        "\n",
        "; ",
        "word",
        "ö",
    ]
)


@given(
    form=st.sampled_from(ToolForm),
    parts=st.lists(PARTS, max_size=8),
    cuts=st.lists(st.integers(0, 300), max_size=30),
)
@example(form=ToolForm.HERMES, parts=[" ", "<tool_call>", CALL, "</tool_call>", " ", "<"], cuts=list(range(99)))
def test_how_the_text_is_cut_changes_nothing(form: ToolForm, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    assert parsed(form, text, cuts) == parsed(form, text)


@given(form=st.sampled_from(ToolForm), text=st.text(alphabet='<tool_cal>[]{}" ab\n', max_size=60))
def test_text_without_a_call_comes_out_as_it_is(form: ToolForm, text: str) -> None:
    assert parsed(form, text, list(range(60))) == ([text] if text else [])


def test_text_is_held_back_no_longer_than_it_may_be_a_mark() -> None:
    parser = ToolCallParser(ToolForm.HERMES)
    assert parser.push("so <") == ["so"]
    assert parser.push("tool") == []
    assert parser.push("box> it") == [" <toolbox> it"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("… <tool_call>\n{{ tool_call | tojson }}\n</tool_call> …", ToolForm.HERMES),
        ("… <tool_call>\n<function=name>\n…", None),
        ("{{ '[TOOL_CALLS] [' }}", ToolForm.MISTRAL),
        ("{{ '<|python_tag|>' }}", ToolForm.LLAMA_JSON),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', ToolForm.LLAMA_JSON),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(template: str, form: ToolForm | None) -> None:
    assert form_in(template) is form


# ---- what clients send ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "tools: no JSON"),
        ("{}", "tools: dict, wanted a list of objects"),
        ("[{}, 5]", r"tools\[1\]: int, wanted an object"),
        ("[NaN]", "tools: no JSON: NaN is no JSON"),
        ('["\\ud800"]', "tools: no JSON"),
        ("[1e999]", "tools: no JSON"),
        ("[" * 100_000, "tools: no JSON"),
    ],
)
def test_what_is_no_list_of_objects_is_refused_by_its_field(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        objects_in("tools", text)


def test_no_text_is_no_tools() -> None:
    assert objects_in("tools", "") == []


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"a": 1}', {"a": 1}), ("[1]", "[1]"), ("oh {", "oh {"), ({"a": 1}, {"a": 1})]
)
def test_earlier_arguments_are_shown_as_an_object_where_they_are_one(arguments: Any, shown: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    assert for_template(call) == {"id": "1", "function": {"name": "f", "arguments": shown}}
    assert json.dumps(for_template({"id": "2"})) == '{"id": "2"}'
