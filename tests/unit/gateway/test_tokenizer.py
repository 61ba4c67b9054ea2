"""Text <-> token ids with a model folder's own tokenizer."""

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Words
from tokenizers import decoders, models, normalizers, processors

from gateway.core.request import ChatMessage, ChatPrompt
from gateway.core.transcript import Detokenizer
from gateway.core.turns import Answer
from gateway.tokenizer import Tokenizer
from octavo.commands.model import fetch_model
from octavo.errors import InvalidRequest
from tests.support import words

any_tokens = st.lists(st.integers(0, words.VOCAB_SIZE - 1), max_size=40)
texts = st.text(alphabet=st.sampled_from("ab ö日本🤗👩‍🚀\n"), max_size=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words.save_model(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, "words")


def pieces(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    """What comes out for tokens that come in groups, and the rest at the end."""
    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    groups = [tokens[start:end] for start, end in pairwise(borders)]
    return [*map(detokenizer.push, groups), detokenizer.flush()]


# ---- detokenising --------------------------------------------------------------------------------------------


@given(tokens=any_tokens, cuts=st.lists(st.integers(0, 40), max_size=10))
def test_the_pieces_of_any_tokens_cut_anywhere_join_to_the_text_of_all(
    tokenizer: Tokenizer, tokens: list[int], cuts: list[int]
) -> None:
    assert "".join(pieces(tokenizer.detokenizer(), tokens, cuts)) == tokenizer.decode(tokens)


@given(text=texts)
def test_no_piece_ends_within_a_character(tokenizer: Tokenizer, text: str) -> None:
    tokens = list(encode_as_text(tokenizer, text))
    so_far = pieces(tokenizer.detokenizer(), tokens, cuts=list(range(len(tokens))))

    assert "".join(so_far) == text
    assert not any("\ufffd" in piece for piece in so_far)
    assert so_far[-1] == "", "whole text leaves nothing for the end"


def test_half_a_character_at_the_end_is_shown_as_one_when_no_more_comes(tokenizer: Tokenizer) -> None:
    tokens = [words.tokenizer().token_to_id(letter) for letter in "æĹ"]  # two of the three bytes of a character
    assert pieces(tokenizer.detokenizer(), tokens, cuts=[1]) == ["", "", "\ufffd"]


def test_special_tokens_and_unknown_ones_have_no_text(tokenizer: Tokenizer) -> None:
    [letter] = encode_as_text(tokenizer, "a")
    assert pieces(tokenizer.detokenizer(), [1, letter, words.EOS_TOKEN, 10**6], cuts=[]) == ["a", ""]


def encode_as_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text, add_special_tokens=True)


def encode_chat(tokenizer: Tokenizer, *messages: ChatMessage) -> tuple[int, ...]:
    return tokenizer.encode(tokenizer.render(ChatPrompt(messages)), add_special_tokens=False)


def encode_as_chat(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return encode_chat(tokenizer, ChatMessage("user", text))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", b"nope", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config.json", b"[1]", r"tokenizer_config\.json holds no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template in tokenizer_config.json: int, wanted text"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": {}}]}', "dict, wanted text"),
        ("chat_template.jinja", b"\xff", "the chat template is not UTF-8"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_by_its_file(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    (words.save_model(tmp_path) / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path, "words")


def test_what_is_no_template_among_named_ones_is_passed_over(tmp_path: Path) -> None:
    config = {"chat_template": [1, {}, {"name": "tools"}], "eos_token": {}}
    (words.save_model(tmp_path) / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="model words has no chat template"):
        encode_chat(Tokenizer(tmp_path, "words"), ChatMessage("user", "hi"))


@pytest.mark.parametrize("encode", [encode_as_text, encode_as_chat], ids=["text", "chat"])
def test_others_go_on_while_a_long_text_is_encoded(
    tokenizer: Tokenizer, encode: Callable[[Tokenizer, str], tuple[int, ...]]
) -> None:
    """The gateway's event loop is such another: it streams every other request meanwhile."""
    thread = threading.Thread(target=encode, args=(tokenizer, "an abbey " * 40_000))
    turns = 0
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 20, "a text that takes a tenth of a second and more was encoded in one go"


def sentencepiece(folder: Path, decoder: decoders.Decoder | None = None) -> Tokenizer:
    """A tokenizer of the other kind: words begin with a mark, bytes are tokens of their own, it begins with <s>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "本"]
    own = Words(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    own.add_special_tokens(["<unk>", "<s>", "</s>"])
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    own.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, "pieces")


@pytest.fixture(scope="module")
def other_kind(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("pieces") / "model")


@given(text=st.text(alphabet=st.sampled_from("ab ö本🤗"), max_size=20), cuts=st.lists(st.integers(0, 60), max_size=10))
def test_the_pieces_of_any_text_join_for_the_other_kind_of_tokenizer_too(
    other_kind: Tokenizer, text: str, cuts: list[int]
) -> None:
    tokens = list(encode_as_text(other_kind, text))
    so_far = pieces(other_kind.detokenizer(), tokens, cuts)

    assert "".join(so_far) == other_kind.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in so_far)


def without_strip() -> decoders.Decoder:
    """As Gemma has it: a text's first space is part of it."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def in_another_order() -> decoders.Decoder:
    """Does the same as the usual one, and is not known by its form: the text is found by decoding windows."""
    return decoders.Sequence(
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


@pytest.fixture(scope="module", params=[None, without_strip, in_another_order])
def any_other_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    decoder = request.param and request.param()
    return sentencepiece(tmp_path_factory.mktemp("pieces") / "model", decoder)


piece_tokens = st.lists(
    st.integers(0, 263) | st.sampled_from([259, 260, 262, 263, 3 + 0xE6, 3 + 0x9C, 3 + 0xAC]), max_size=30
)


@given(prompt=piece_tokens, tokens=piece_tokens)
def test_an_output_goes_on_from_its_prompt_as_the_text_of_both_does(
    any_other_kind: Tokenizer, prompt: list[int], tokens: list[int]
) -> None:
    """Byte tokens of every kind among them: where all is text, the pieces are; where bytes are none, U+FFFD stands."""
    so_far = pieces(any_other_kind.detokenizer(prompt), tokens, cuts=list(range(len(tokens))))

    before, whole = any_other_kind.decode(prompt), any_other_kind.decode([*prompt, *tokens])
    if "\ufffd" not in before + whole:
        assert before + "".join(so_far) == whole
    for at, piece in enumerate(so_far[:-1]):
        assert "\ufffd" not in piece or "\ufffd" in before + whole, at


@given(tokens=piece_tokens, cuts=st.lists(st.integers(0, 30), max_size=9))
def test_how_bytes_that_are_no_text_are_cut_changes_nothing(
    other_kind: Tokenizer, tokens: list[int], cuts: list[int]
) -> None:
    one_by_one = pieces(other_kind.detokenizer(), tokens, cuts=list(range(len(tokens))))
    in_groups = pieces(other_kind.detokenizer(), tokens, cuts)
    assert "".join(in_groups) == "".join(one_by_one)


def test_bytes_that_are_never_text_are_not_held_back_for_ever(any_other_kind: Tokenizer) -> None:
    detokenizer = any_other_kind.detokenizer()
    said = "".join(detokenizer.push([3 + 0xFF]) for _ in range(100))
    assert said.count("\ufffd") > 50
    assert (said + detokenizer.flush()).count("\ufffd") == 100


# ---- earlier answers -----------------------------------------------------------------------------------------


@given(before=texts, tokens=any_tokens, behind=texts, cut=st.integers(0, 30))
def test_an_answers_own_tokens_are_used_wherever_they_decode_to_its_text(
    tokenizer: Tokenizer, before: str, tokens: list[int], behind: str, cut: int
) -> None:
    """Any tokens at all, of which a stop string may have cut off the text."""
    told = "".join(pieces(tokenizer.detokenizer(), tokens, cuts=[]))[:cut]
    count, characters = tokenizer.covered([], tokens, told)
    text = before + told[:characters] + behind
    answer = Answer(len(before), len(before) + characters, tuple(tokens[:count]))

    encoded = tokenizer.encode(text, [answer] if count else [], add_special_tokens=True)

    head, tail = encode_as_text(tokenizer, before), encode_as_text(tokenizer, behind)
    assert tokenizer.decode(encoded) == text
    assert encoded == (*head, *answer.tokens, *tail) or not count
    assert tokenizer.decode(tokens[:count]) == told[:characters]


def test_covered_text_ends_with_a_character_and_before_a_special_token(tokenizer: Tokenizer) -> None:
    whole = list(encode_as_text(tokenizer, "ab"))
    halves = [words.tokenizer().token_to_id(letter) for letter in "æĹ"]
    assert tokenizer.covered([], [*whole, *halves], "ab\ufffd") == (len(whole), 2)
    assert tokenizer.covered([], [*whole, words.EOS_TOKEN, *whole], "abab") == (len(whole), 2)
    assert tokenizer.covered([], [*whole, 10**6, *whole], "abab") == (len(whole), 2)
    assert tokenizer.covered([], whole, "") == (0, 0)


@given(
    before=st.text("ab ö本", min_size=1, max_size=9),
    tokens=st.lists(st.integers(3, 263), max_size=9),
    behind=st.sampled_from(["", "</s> a b", "a b", " b"]),
)
def test_the_other_kind_of_tokenizer_uses_them_only_where_the_text_stays_the_same(
    other_kind: Tokenizer, before: str, tokens: list[int], behind: str
) -> None:
    told = "".join(pieces(other_kind.detokenizer(), tokens, cuts=[]))
    count, characters = other_kind.covered([], tokens, told)
    text = before + told[:characters] + behind
    answer = Answer(len(before), len(before) + characters, tuple(tokens[:count]))

    exact = other_kind.encode(text, [answer] if count else [], add_special_tokens=True)
    plain = other_kind.encode(text, add_special_tokens=True)

    assert other_kind.decode(exact, special_tokens=True) == other_kind.decode(plain, special_tokens=True)


def test_tokens_that_have_no_text_cover_nothing(other_kind: Tokenizer) -> None:
    """Such as the space that a text does not begin with, of a sample that had no more tokens."""
    [*_, space] = other_kind.encode(" ", add_special_tokens=False)
    assert other_kind.decode([space]) == ""
    assert other_kind.covered([], [space], "") == (0, 0)


# ---- encoding ------------------------------------------------------------------------------------------------


def test_raw_text_gets_the_tokenizers_special_tokens_and_a_chat_only_its_templates(tmp_path: Path) -> None:
    own = sentencepiece(tmp_path / "model")
    assert encode_as_text(own, "a")[0] == 1
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert 1 not in encode_chat(Tokenizer(tmp_path / "model", "pieces"), ChatMessage("user", "a"))


def test_a_chat_is_rendered_up_to_the_assistants_next_turn(tokenizer: Tokenizer) -> None:
    tokens = encode_chat(tokenizer, ChatMessage("system", "Be brief."), ChatMessage("user", "本?"))
    rendered = words.tokenizer().decode(list(tokens), skip_special_tokens=False)

    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n本?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_a_template_refuses_is_an_invalid_request_with_its_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: .*nobody may not speak"):
        encode_chat(tokenizer, ChatMessage("nobody", "psst"))


def test_a_model_without_a_template_takes_no_chat(other_kind: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="model pieces has no chat template"):
        encode_chat(other_kind, ChatMessage("user", "hi"))


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        pytest.param("{{ messages | tojson }}", '[{"role": "user", "content": "ä<b>"}]', id="json as it is"),
        pytest.param("{% generation %}x{% endgeneration %}", "x", id="marks for training"),
        pytest.param(
            "{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1", id="break"
        ),
        pytest.param("{{ strftime_now('%%') }}{{ bos_token }}", "%<|im_start|>", id="the date and a special token"),
        pytest.param("a\n  {% if true %}\nb{% endif %}", "a\nb", id="blocks leave no blank lines"),
    ],
)
def test_templates_find_what_they_are_written_for(folder: Path, tmp_path: Path, template: str, rendered: str) -> None:
    words.save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokens = encode_chat(Tokenizer(tmp_path, "words"), ChatMessage("user", "ä<b>"))

    assert words.tokenizer().decode(list(tokens), skip_special_tokens=False) == rendered


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    words.save_model(tmp_path)
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    tokens = encode_chat(Tokenizer(tmp_path, "words"), ChatMessage("user", "hi"))
    assert words.tokenizer().decode(list(tokens)) == "plain"


def test_a_tokenizer_that_truncates_in_its_file_does_not_here(tmp_path: Path) -> None:
    words.save_model(tmp_path)
    own = words.tokenizer()
    own.enable_truncation(3)
    own.save(str(tmp_path / "tokenizer.json"))
    own.no_truncation()
    assert len(encode_as_text(Tokenizer(tmp_path, "words"), "a b a b a b")) > 3


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [("tokenizer.json", "{}", ValueError), ("chat_template.jinja", "{% if %}", ValueError)],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, error: type[Exception]) -> None:
    words.save_model(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(error, match=str(tmp_path)):
        Tokenizer(tmp_path, "words")


def test_a_folder_without_the_fast_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, "words")


# ---- against transformers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch_model("smollm2")


@pytest.mark.model
@pytest.mark.parametrize("text", ["", "Hello wörld", "<|im_start|>user\nhi<|im_end|>", "日本語 🤗\n\n  1234 naïve\t"])
def test_text_and_chat_are_the_ids_that_transformers_gives(smollm2: Path, text: str) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(smollm2)
    ours = Tokenizer(smollm2, "smollm2")
    turns = [("user", text), ("assistant", "ok"), ("user", text)]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, return_dict=False
    )

    assert list(encode_as_text(ours, text)) == theirs(text)["input_ids"]
    assert list(encode_chat(ours, *(ChatMessage(role, content) for role, content in turns))) == expected
