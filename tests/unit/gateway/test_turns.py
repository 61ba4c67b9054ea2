"""Earlier answers are found again by the text that ends with them, within bounds."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core import turns
from gateway.core.events import Delta, Finished
from gateway.core.turns import ANSWER_COST, CHUNK_CHARACTERS, Answer, Listener, TurnMemory
from octavo.records.serve import FinishReason

PLENTY = 1 << 20


def test_every_answer_of_a_conversation_is_found_at_its_place() -> None:
    memory = TurnMemory(PLENTY)
    memory.remember(b"us", "hi! hello", 4, [1, 2])
    memory.remember(b"us", "hi! hello more? yes", 16, [3])
    assert memory.recall(b"us", "hi! hello more? yes and so on") == (Answer(4, 9, (1, 2)), Answer(16, 19, (3,)))
    assert memory.recall(b"us", "hi! hello") == (Answer(4, 9, (1, 2)),)
    assert memory.recall(b"us", "hi! hell") == ()
    assert memory.recall(b"us", "ho! hello more?") == ()


def test_nobody_recalls_what_another_realm_remembers() -> None:
    memory = TurnMemory(PLENTY)
    memory.remember(b"us", "hi! hello", 4, [1, 2])
    assert memory.recall(b"them", "hi! hello") == ()


def test_an_answer_that_is_generated_again_takes_the_place_of_the_first() -> None:
    memory = TurnMemory(PLENTY)
    memory.remember(b"", "hi! hello", 4, [1, 2])
    memory.remember(b"", "hi! hello", 4, [7])
    assert memory.recall(b"", "hi! hello") == (Answer(4, 9, (7,)),)
    assert memory.answers == 1


def test_those_that_nobody_asks_for_go_first() -> None:
    memory = TurnMemory(2 * ANSWER_COST + 4)
    memory.remember(b"", "one a", 4, [1])
    memory.remember(b"", "two b", 4, [2])
    assert memory.recall(b"", "one a")
    memory.remember(b"", "three c", 6, [3])
    assert [bool(memory.recall(b"", text)) for text in ("one a", "two b", "three c")] == [True, False, True]


@pytest.mark.parametrize("room", [0, ANSWER_COST])
def test_what_is_larger_than_the_room_is_not_remembered(room: int) -> None:
    memory = TurnMemory(room)
    memory.remember(b"", "one a", 4, [1])
    memory.check()
    assert memory.recall(b"", "one a") == ()


@pytest.mark.parametrize("length", [CHUNK_CHARACTERS - 1, CHUNK_CHARACTERS, CHUNK_CHARACTERS + 1, 3 * CHUNK_CHARACTERS])
def test_an_answer_may_end_anywhere_in_a_long_text(length: int) -> None:
    memory = TurnMemory(PLENTY)
    text = ("本を読む。" * length)[:length]
    memory.remember(b"", text, length - 1, [9])
    assert memory.recall(b"", text + "さ" * 1000) == (Answer(length - 1, length, (9,)),)
    assert memory.recall(b"", "x" + text[1:] + "さ" * 1000) == ()


def test_a_listener_puts_each_sample_together() -> None:
    listener = Listener()
    assert listener.hear(Delta(0, "a", (1,))) is None
    listener.hear(Delta(1, "x", (8,)))
    listener.hear(Delta(0, "b", (2, 3)))
    assert listener.hear(Finished(0, FinishReason.STOP)) == ("ab", (1, 2, 3))
    assert listener.hear(Finished(5, FinishReason.STOP)) is None
    assert listener.rest() == [("x", (8,))]
    assert listener.rest() == []


class Conversations(RuleBasedStateMachine):
    """Beside it, a memory that looks at every answer it ever had, the newest last."""

    @initialize(room=st.sampled_from([0, ANSWER_COST + 3, 3 * ANSWER_COST, PLENTY]))
    def open(self, room: int) -> None:
        self.memory = TurnMemory(room)
        self.is_large = room == PLENTY
        self.all: dict[tuple[bytes, str], tuple[int, tuple[int, ...]]] = {}

    @rule(
        realm=st.sampled_from([b"", b"a"]),
        text=st.text("ab", min_size=1, max_size=9),
        start=st.integers(0, 8),
        tokens=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    )
    def remember(self, realm: bytes, text: str, start: int, tokens: list[int]) -> None:
        start %= len(text)
        self.memory.remember(realm, text, start, tokens)
        self.all[realm, text] = start, tuple(tokens)

    @rule(realm=st.sampled_from([b"", b"a"]), text=st.text("ab", max_size=12))
    def recall(self, realm: bytes, text: str) -> None:
        found = self.memory.recall(realm, text)
        for answer in found:
            assert self.all[realm, text[: answer.end]] == (answer.start, answer.tokens)
        if self.is_large:
            assert list(found) == self._expected(realm, text)

    def _expected(self, realm: bytes, text: str) -> list[Answer]:
        found: list[Answer] = []
        limit = len(text)
        while ends := [end for end in range(1, limit + 1) if (realm, text[:end]) in self.all]:
            start, tokens = self.all[realm, text[: ends[-1]]]
            found.insert(0, Answer(start, ends[-1], tokens))
            limit = start
        return found

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check()


class WithShortChunks(Conversations):
    """So that answers end within chunks, at their borders and several chunks on."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(turns, "CHUNK_CHARACTERS", 3)

    def teardown(self) -> None:
        self._patch.undo()


TestConversations: Any = WithShortChunks.TestCase
