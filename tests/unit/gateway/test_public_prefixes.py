"""What the operator calls public, and how much of a prompt it is."""

from pathlib import Path

import pytest

from gateway.core.public_part import public_tokens
from gateway.core.request import ChatMessage, ChatPrompt, TextPrompt
from gateway.public_prefixes import as_read_by, read_public_prefixes
from gateway.tokenizer import Tokenizer
from octavo.commands.model import fetch_model


@pytest.mark.parametrize(
    ("prompt", "public"),
    [([1, 2, 3, 9], 3), ([1, 2, 9], 2), ([7, 8], 2), ([7], 1), ([9, 1, 2, 3], 0), ([], 0)],
)
def test_a_prompt_is_public_as_far_as_it_begins_like_something_public(prompt: list[int], public: int) -> None:
    assert public_tokens(prompt, [(1, 2, 3), (7, 8)]) == public
    assert public_tokens(prompt, []) == 0


def listed(folder: Path, content: str) -> Path:
    file = folder / "public.toml"
    file.write_text(content)
    return file


def test_a_list_has_system_messages_and_texts(tmp_path: Path) -> None:
    chat, text = read_public_prefixes(listed(tmp_path, 'system = ["Be brief."]\ntext = ["Translate:"]'))
    assert isinstance(chat, ChatPrompt)
    assert chat.messages[0] == ChatMessage("system", "Be brief.")
    assert text == TextPrompt("Translate:")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('systems = ["a"]', "systems: not known, wanted system or text"),
        ('system = "a"', "system: str, wanted a list of strings"),
        ('text = ["a", 3]', r"text\[1\]: int, wanted a string"),
        ('text = [""]', r"text\[0\]: empty, wanted a string"),
        ("text = [", "public.toml: "),
    ],
)
def test_what_is_no_list_is_refused_by_its_field(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_public_prefixes(listed(tmp_path, content))


@pytest.mark.model
def test_a_system_message_is_the_beginning_of_every_conversation_with_it() -> None:
    tokenizer = Tokenizer(fetch_model("smollm2"), "smollm2")
    system = "You are a patient tutor. Answer in three sentences and give one example."
    prefixes = as_read_by(tokenizer, "smollm2", [ChatPrompt((ChatMessage("system", system), ChatMessage("user", "?")))])
    asked = ChatPrompt((ChatMessage("system", system), ChatMessage("user", "What is a prime number?")))
    tokens = tokenizer.encode(tokenizer.render(asked), add_special_tokens=False)
    public = public_tokens(tokens, prefixes)
    assert system in tokenizer.decode(tokens[:public], special_tokens=True)
    assert "prime" not in tokenizer.decode(tokens[:public], special_tokens=True)
