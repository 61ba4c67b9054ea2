"""A chat template can neither reach the host nor hang the gateway."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway import template_process
from gateway.chat_template import Template
from gateway.core.request import ChatMessage, ChatPrompt
from gateway.core.tool_calls import ToolForm
from octavo.errors import InvalidRequest

HELLO = ChatPrompt((ChatMessage("user", "hello"),))
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def rendered(source: str, chat: ChatPrompt = HELLO) -> str:
    return Template(source, {"bos_token": "<s>"}).render(chat)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''.format.__self__.__class__.__mro__ }}",
        "{% include '/etc/hostname' %}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(escape: str) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: the model's template refuses it: "):
        rendered(escape)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (ENDLESS, "more than 0.2 s of processor time"),
        ("{{ 9 ** (9 ** 9) }}", "more than 0.2 s of processor time"),
        ("{{ 'x' * 10 ** 10 }}", "more than 512 MiB"),
        (
            "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "512 MiB|0.2 s",
        ),
        ("{{ messages[0].content * 2 ** 22 }}", "20971520 characters, at most 16777216"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ messages | nofilter }}", "No filter named 'nofilter'"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_template_takes_only_so_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, said: str) -> None:
    quick(monkeypatch, tmp_path)
    template = Template(source, {})
    with pytest.raises(InvalidRequest, match=said):
        template.render(HELLO)
    with pytest.raises(InvalidRequest, match=said):  # and again, in a new process where the first one ended
        template.render(HELLO)


def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let templates have a tenth of the time."""
    text = Path(template_process.__file__).read_text()
    script = tmp_path / "quick.py"
    script.write_text(text.replace("MAX_CPU_SECONDS = 2.0", "MAX_CPU_SECONDS = 0.2"))
    monkeypatch.setattr(template_process, "__file__", str(script))
    monkeypatch.setattr(template_process, "MAX_CPU_SECONDS", 0.2)


def test_after_a_rendering_that_took_too_long_the_next_one_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick(monkeypatch, tmp_path)
    template = Template("{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}well", {})
    with pytest.raises(InvalidRequest, match="processor time"):
        template.render(ChatPrompt((ChatMessage("user", "loop"),)))
    assert template.render(HELLO) == "well"


def test_the_process_knows_nothing_of_the_gateways_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SALT_SECRET", "hidden")
    template = Template("{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(HELLO) == "<s>"
    environments = [
        (entry / "environ").read_bytes()
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_child(entry) and b"template_process" in (entry / "cmdline").read_bytes()
    ]
    assert environments
    assert not any(b"OCTAVO" in environment for environment in environments)


def is_child(entry: Path) -> bool:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


def test_many_threads_get_each_its_own_text() -> None:
    template = Template("{{ messages[0].content }}", {})
    chats = [ChatPrompt((ChatMessage("user", str(at)),)) for at in range(50)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, chats)) == [str(at) for at in range(50)]


def test_a_template_sees_tools_and_their_calls_as_objects() -> None:
    call = '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]'
    chat = ChatPrompt(
        (ChatMessage("assistant", "", tool_calls=call), ChatMessage("tool", "5", tool_call_id="1", name="f")),
        tools='[{"type": "function", "function": {"name": "f"}}]',
    )
    source = (
        "{{ tools[0].function.name }} {{ messages[0].tool_calls[0].function.arguments.a }} "
        "{{ messages[1].tool_call_id }} {{ messages[1].name }} {{ 'name' in messages[0] }}"
    )
    assert rendered(source, chat) == "f 1 1 f False"
    assert rendered("{{ tools is none }}") == "True"


def test_tools_are_refused_where_the_template_knows_none() -> None:
    chat = ChatPrompt((ChatMessage("user", "hello"),), tools='[{"type": "function", "function": {"name": "f"}}]')
    with pytest.raises(InvalidRequest, match=r"prompt.chat.tools: 1 tools, the model's chat template takes none"):
        rendered("{{ messages[0].content }}", chat)


def test_calls_of_any_depth_are_rendered_or_refused() -> None:
    """Arguments just shallow enough to be read lie a few levels deeper in what the template gets."""
    template = Template("{{ messages[0].content }}", {})
    ends: set[str] = set()
    for depth in range(800, 1000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        calls = json.dumps([{"type": "function", "function": {"name": "f", "arguments": arguments}}])
        try:
            ends.add(template.render(ChatPrompt((ChatMessage("assistant", "called", tool_calls=calls),))))
        except InvalidRequest as error:
            ends.add(str(error).split(":")[1])
    assert ends == {"called", " nested too deeply"}


def test_what_does_not_parse_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="does not parse"):
        Template("{% if %}", {})
    with pytest.raises(ValueError, match="does not parse"):
        Template("{{ " + "(" * 10_000, {})


def test_a_template_tells_how_its_model_writes_calls() -> None:
    assert Template("<tool_call>", {}).tool_form is ToolForm.HERMES
